//! Both sides of one transport in one process.

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pegaflow_engine::checksum::part_checksum;
use pegaflow_engine::{BlockRef, Error, ErrorKind, Result};
use pegaflow_peers::proto::{ConnectReply, ConnectRequest, HelloReply, RegionsReply, RegionsRequest};
use pegaflow_peers::rdma::{Nic, RdmaServer, RdmaTransport};
use pegaflow_peers::tcp::{TcpServer, TcpTransport};
use pegaflow_peers::transport::{
    Channel, ControlCalls, PartRead, ReadOutcome, RegionSource, Ticket, Transport, TransportKind,
};

use super::leases::Leases;
use super::pools::{PARTS, Side, pattern};

pub const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const ASKED_AGAIN_MAX: usize = 4;
pub const SESSION: [u8; 16] = [7; 16];

/// A peer without a control plane.
pub struct NoCalls;

impl ControlCalls for NoCalls {
    fn connect(&self, _request: ConnectRequest) -> Result<ConnectReply> {
        Err(Error::new(ErrorKind::Closed, "this test has no control plane"))
    }

    fn give_up(&self, _request: ConnectRequest) {}

    fn regions(&self, _request: RegionsRequest) -> Result<RegionsReply> {
        Err(Error::new(ErrorKind::Closed, "this test has no control plane"))
    }
}

pub fn soon() -> Instant {
    after(120_000)
}

pub fn after(milliseconds: u64) -> Instant {
    Instant::now() + Duration::from_millis(milliseconds)
}

/// Wait until something holds; it has to before long.
pub fn until(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(120), "{what}: in vain");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A control plane that is a call within this process.
struct LocalCalls(Arc<RdmaServer>);

impl ControlCalls for LocalCalls {
    fn connect(&self, request: ConnectRequest) -> Result<ConnectReply> {
        self.0.connect(request.session[..].try_into().unwrap(), &request)
    }

    fn give_up(&self, request: ConnectRequest) {
        self.connect(request).unwrap();
    }

    fn regions(&self, request: RegionsRequest) -> Result<RegionsReply> {
        self.0.regions(request.version, &request.wanted)
    }
}

pub struct Rig {
    pub server: Side,
    pub client: Side,
    pub leases: Arc<Leases>,
    pub tcp: Mutex<Option<TcpServer>>,
    pub rdma: Option<Arc<RdmaServer>>,
    pub transport: Box<dyn Transport>,
    pub hello: HelloReply,
    pub calls: Arc<dyn ControlCalls>,
    /// Whether the transport itself looks at leases, as streams do.
    pub asks_leases: bool,
}

/// Every transport that this machine has: streams, and RDMA where `PEGAFLOW_RDMA_DEVICES` names two devices.
pub fn kinds() -> Vec<TransportKind> {
    if devices().is_empty() { vec![TransportKind::Tcp] } else { vec![TransportKind::Tcp, TransportKind::Rdma] }
}

/// Devices that `PEGAFLOW_RDMA_DEVICES` names, by commas: the client's and the server's. `PEGAFLOW_RDMA_GID` is the
/// number of their address, 1 unless it is set.
pub fn devices() -> Vec<Nic> {
    devices_in("PEGAFLOW_RDMA_DEVICES")
}

/// Several pairs of the same, each on a cable of its own: `PEGAFLOW_RDMA_CABLES`.
pub fn cables() -> Vec<Nic> {
    devices_in("PEGAFLOW_RDMA_CABLES")
}

fn devices_in(variable: &str) -> Vec<Nic> {
    let names = std::env::var(variable).unwrap_or_default();
    let gid_index = std::env::var("PEGAFLOW_RDMA_GID").map_or(1, |text| text.parse().unwrap());
    let nic = |name: &str| Nic { device: name.to_owned(), port: 1, gid_index, mtu_bytes: 4096, node: None };
    names.split(',').filter(|name| !name.is_empty()).map(nic).collect()
}

/// Run a claim over every transport.
pub fn over_each(parts: &[u64], claim: impl Fn(&Rig)) {
    for kind in kinds() {
        println!("over {kind:?}");
        claim(&Rig::new(kind, parts));
    }
}

impl Rig {
    pub fn new(kind: TransportKind, parts: &[u64]) -> Self {
        match kind {
            TransportKind::Tcp => Self::tcp(parts),
            TransportKind::Rdma => Self::rdma(parts),
        }
    }

    pub fn tcp(parts: &[u64]) -> Self {
        let (server, client) = (Side::new("peers-server", parts), Side::new("peers-client", parts));
        let leases = Arc::new(Leases::new(server.space()));
        let tcp = TcpServer::start(TcpListener::bind((HOST, 0)).unwrap(), Arc::clone(&leases) as _).unwrap();
        let hello = HelloReply { data_port: tcp.address().port().into(), ..HelloReply::default() };
        let transport = Box::new(TcpTransport::new(client.space()));
        let (tcp, calls) = (Mutex::new(Some(tcp)), Arc::new(NoCalls));
        Self { server, client, leases, tcp, rdma: None, transport, hello, calls, asks_leases: true }
    }

    pub fn rdma(parts: &[u64]) -> Self {
        let devices = devices();
        assert_eq!(devices.len(), 2, "PEGAFLOW_RDMA_DEVICES names two devices");
        Self::rdma_over(parts, &devices)
    }

    /// Over several devices: the client's and the server's, in turns.
    pub fn rdma_over(parts: &[u64], devices: &[Nic]) -> Self {
        let (server, client) = (Side::new("peers-server", parts), Side::new("peers-client", parts));
        let leases = Arc::new(Leases::new(server.space()));
        let every_other = |first| devices.iter().skip(first).step_by(2).cloned().collect::<Vec<Nic>>();
        let serving = RdmaServer::open(Arc::clone(&server.pool), &every_other(1)).expect("the server's devices");
        let serving = Arc::new(serving);
        let transport =
            RdmaTransport::open(Arc::clone(&client.pool), &every_other(0), 2).expect("the client's devices");
        let hello = HelloReply { nics: serving.nics(), term: 5, ..HelloReply::default() };
        let calls = Arc::new(LocalCalls(Arc::clone(&serving)));
        let (tcp, rdma, transport) = (Mutex::new(None), Some(serving), Box::new(transport));
        Self { server, client, leases, tcp, rdma, transport, hello, calls, asks_leases: false }
    }

    pub fn open(&self) -> Box<dyn Channel> {
        let opened = self.transport.open(HOST, &self.hello, SESSION, Arc::clone(&self.calls), soon());
        opened.unwrap_or_else(|error| panic!("{error}"))
    }

    /// All parts of leased blocks into slots, block by block.
    pub fn reads(&self, ticket: Ticket, leased: &[BlockRef], slots: &[BlockRef]) -> Vec<PartRead> {
        let mut reads = Vec::new();
        for (index, (&from, &target)) in leased.iter().zip(slots).enumerate() {
            for (part, &bytes) in self.server.part_bytes.iter().enumerate() {
                let (segment, offset) = self.server.place(from, part as u32);
                let (index, part) = (index as u32, part as u32);
                reads.push(PartRead { ticket, index, part, segment, offset, bytes, target });
            }
        }
        reads
    }

    /// Have the server vanish, with whatever it was doing.
    pub fn stop_server(&self) {
        drop(self.tcp.lock().unwrap().take());
        self.rdma.iter().for_each(|server| server.session_gone(SESSION));
    }

    /// See [`check_arrived`].
    pub fn check(&self, first: u64, reads: &[PartRead], outcome: &ReadOutcome) -> usize {
        check_arrived(&self.client, first, reads, outcome)
    }

    /// Soft-RoCE of a kernel under load may say that a READ is done of which no byte has come. Only where
    /// `PEGAFLOW_RDMA_FORGETFUL` says that the devices are of that kind: all is read again, a few times.
    pub fn asked_again(&self, reads: &[PartRead], mut outcome: ReadOutcome) -> ReadOutcome {
        let is_forgetful = self.rdma.is_some() && std::env::var_os("PEGAFLOW_RDMA_FORGETFUL").is_some();
        for _ in 0..if is_forgetful { ASKED_AGAIN_MAX } else { 0 } {
            let untouched =
                |read: &PartRead| self.client.reserved_bytes(read.target, read.part).iter().all(|&byte| byte == 0xEE);
            let arrived = reads.iter().zip(&outcome.arrived).filter(|(_, arrived)| arrived.is_some());
            let count = arrived.filter(|(read, _)| untouched(read)).count();
            if count == 0 || !outcome.quiet {
                break;
            }
            println!("the device said that {count} parts had come of which no byte had: all is read again");
            reads.iter().for_each(|read| self.client.fill(read.target, 0xEE));
            outcome = self.open().read(reads, soon());
        }
        outcome
    }

    /// A channel with `count` blocks leased over there and as many slots here, all filled with 0xEE.
    pub fn blocks(&self, count: u64) -> (Ticket, Vec<PartRead>) {
        let leased = self.server.store(0..count);
        assert_eq!(leased.len() as u64, count);
        let ticket = self.leases.add(leased.clone());
        let slots = self.client.reserve(0..count);
        slots.iter().for_each(|&slot| self.client.fill(slot, 0xEE));
        (ticket, self.reads(ticket, &leased, &slots))
    }
}

pub fn usual() -> &'static [u64] {
    &PARTS
}

/// Whether what is said to have arrived has, and is what the blocks from `first` on hold. Returns how many parts did.
pub fn check_arrived(client: &Side, first: u64, reads: &[PartRead], outcome: &ReadOutcome) -> usize {
    assert_eq!(outcome.arrived.len(), reads.len());
    for (read, arrived) in reads.iter().zip(&outcome.arrived) {
        let Some(checksum) = arrived else { continue };
        let expected = pattern(first + u64::from(read.index), read.part, read.bytes as usize);
        let come = client.reserved_bytes(read.target, read.part);
        let wrong: Vec<usize> = (0..expected.len()).filter(|&at| come[at] != expected[at]).collect();
        assert!(
            wrong.is_empty(),
            "block {} part {}: {} of {} bytes are others, from {:?} to {:?}; {} of them are those from before",
            read.index,
            read.part,
            wrong.len(),
            expected.len(),
            wrong.first(),
            wrong.last(),
            wrong.iter().filter(|&&at| come[at] == 0xEE).count()
        );
        assert_eq!(*checksum, part_checksum(read.part, &expected));
    }
    outcome.arrived.iter().flatten().count()
}

/// Slots are given to somebody else after a read, whose bytes then stay.
pub fn stay_as_they_are(client: &Side, reads: &[PartRead]) {
    let mut slots: Vec<BlockRef> = reads.iter().map(|read| read.target).collect();
    slots.dedup();
    slots.iter().for_each(|&slot| client.fill(slot, 0x11));
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(300) {
        for read in reads {
            let bytes = client.reserved_bytes(read.target, read.part);
            assert!(bytes.iter().all(|&byte| byte == 0x11), "something was written after the read had returned");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
