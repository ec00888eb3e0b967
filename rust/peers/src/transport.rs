//! The seam between fetching and the network: read parts of a peer's leased blocks into reserved slots of ours.
//!
//! A client opens a [`Channel`] to each peer and uses it from one thread at a time; a server has a [`LeasedParts`] from
//! which its transports send.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Instant;

use pegaflow_engine::{BlockRef, Error, Result};

use crate::proto::{ConnectReply, ConnectRequest, HelloReply, Nic, RegionsReply, RegionsRequest};

/// Which transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransportKind {
    /// Streams.
    Tcp,
    /// One-sided reads.
    Rdma,
}

/// A lease of a peer, as the one who has it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Ticket {
    /// Number of the lease.
    pub lease: u64,
    /// Who has these bytes may read.
    pub secret: [u8; 16],
}

/// One part of one block: where it is over there, and the reserved slot that it goes to.
#[derive(Clone, Copy)]
pub struct PartRead {
    /// The lease that holds it.
    pub ticket: Ticket,
    /// Number of the block in the lease.
    pub index: u32,
    /// Number of the part.
    pub part: u32,
    /// Segment of the peer, and offset in it. In one term of the peer a number is that of one segment only.
    pub segment: u32,
    /// See `segment`.
    pub offset: u64,
    /// Length of the part; equal on both sides.
    pub bytes: u64,
    /// A block of our pool that is reserved by this process until the read is over.
    pub target: BlockRef,
}

/// What became of the reads of one call.
pub struct ReadOutcome {
    /// Per part, in order: the xxh3-64 (seed: the part) of the bytes as they lie in the slot now; `None` if not all are
    /// there.
    pub arrived: Vec<Option<u64>>,
    /// Nothing can write into any of the slots any more. If not, they have to be quarantined.
    pub quiet: bool,
    /// Why the channel cannot be used again; `None` if it can. Of kind *full*: the peer, or this host, has too much to
    /// do, which is a miss and no failure of the peer.
    pub broken: Option<Error>,
}

/// A connection to one peer's memory. Used by one thread at a time; dropped, it is torn down.
pub trait Channel: Send {
    /// Which transport it is of.
    fn kind(&self) -> TransportKind;

    /// Read all parts, or what can be had until `deadline`. Returns when nothing is under way any more, or
    /// says that it is not `quiet`.
    fn read(&mut self, parts: &[PartRead], deadline: Instant) -> ReadOutcome;

    /// It can be used, but another one may be better.
    fn is_worn(&self) -> bool {
        false
    }

    /// There is none better now: it is not worn for a while.
    fn keep(&mut self) {}
}

/// Calls that a transport makes while it opens or uses a channel.
pub trait ControlCalls: Send + Sync {
    /// Have the peer make the other ends of queue pairs.
    fn connect(&self, request: ConnectRequest) -> Result<ConnectReply>;

    /// Tell the peer which queue pairs it need not keep. Does not wait: what is not told goes with the session.
    fn give_up(&self, request: ConnectRequest);

    /// Ask for keys of segments.
    fn regions(&self, request: RegionsRequest) -> Result<RegionsReply>;
}

/// The client's side of one kind of network.
pub trait Transport: Send + Sync {
    /// Which it is.
    fn kind(&self) -> TransportKind;

    /// Open a channel to the peer at `host` that greeted with `hello`. `session` names us there. Errors of kind
    /// *not found* mean that there is no way to this peer by this transport.
    fn open(
        &self,
        host: std::net::IpAddr,
        hello: &HelloReply,
        session: [u8; 16],
        calls: Arc<dyn ControlCalls>,
        deadline: Instant,
    ) -> Result<Box<dyn Channel>>;
}

/// Blocks that a server has leased to its peers, for a transport that sends them.
pub trait LeasedParts: Send + Sync {
    /// Begin to send from a lease. `None` if there is no such lease, it has ended or the secret is wrong. Until the
    /// value is dropped the blocks stay leased. When the lease ends meanwhile, `end` is called, once; it must not
    /// wait.
    fn begin(&self, ticket: &Ticket, end: Box<dyn FnOnce() + Send>) -> Option<Box<dyn Sending>>;
}

/// A lease from which is being sent.
pub trait Sending: Send {
    /// Bytes of a part of block `index`; `None` if there is no such part.
    fn part(&self, index: u32, part: u32) -> Option<&[u8]>;
}

/// The server's half of the data plane by TCP, for as long as the value lives.
pub trait DataServer: Send + Sync {
    /// Counters by name.
    fn counters(&self) -> Vec<(&'static str, u64)>;
}

/// Starts to send from leases to whoever comes to the listener.
pub type DataStarter = dyn Fn(TcpListener, Arc<dyn LeasedParts>) -> Result<Box<dyn DataServer>> + Send + Sync;

/// The server's half of RDMA: its ports, its registered segments, and the other ends of queue pairs. Called from
/// threads that may wait, several at a time.
pub trait RegionSource: Send + Sync {
    /// Ports, as greetings tell them.
    fn nics(&self) -> Vec<Nic>;

    /// Regions from `version` on, and those of the `wanted` segments whatever their version, numbered as by
    /// [`pegaflow_engine::Pool::data_segments`].
    fn regions(&self, version: u64, wanted: &[u32]) -> Result<RegionsReply>;

    /// Destroy what a client has given up, and make the other ends of its queue pairs.
    fn connect(&self, session: [u8; 16], request: &ConnectRequest) -> Result<ConnectReply>;

    /// A client is gone: destroy what was made for it.
    fn session_gone(&self, session: [u8; 16]);
}
