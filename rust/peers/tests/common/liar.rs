//! A server that stands before a true one and says something wrong.
#![allow(dead_code, reason = "each test binary uses some of it")]

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use pegaflow_peers::proto::peer_client::PeerClient;
use pegaflow_peers::proto::peer_server::{Peer, PeerServer};
use pegaflow_peers::proto::{self, *};
use pegaflow_peers::wire::Sealed;
use tokio::runtime::Runtime;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    OtherVersion,
    TiersBeyondKeys,
    UnknownTiers,
    NoTiers,
    LeaseOfAnotherRequest,
    LeaseOfOtherKeys,
    LeaseTwice,
    LeaseBackwards,
    LeaseOfOtherParts,
    LeaseWithoutSecret,
    LeaseOfValues,
    LeaseThatIsOver,
    /// True otherwise.
    LeaseForEver,
    WrongChecksum,
    WrongSecret,
    NotHeld,
    NoAnswerToRelease,
    Forgets,
    Errors,
    /// Too much to do for this call; of greetings, for those of a session that it knows.
    BusyGreeting,
    BusyFind,
    BusyLease,
    BusyRelease,
}

/// What it says then.
pub(crate) const BUSY: &str = "too much to do";

impl Lie {
    /// Those of which nothing comes.
    pub(crate) const ALL: [Self; 18] = [
        Self::OtherVersion,
        Self::TiersBeyondKeys,
        Self::UnknownTiers,
        Self::NoTiers,
        Self::LeaseOfAnotherRequest,
        Self::LeaseOfOtherKeys,
        Self::LeaseTwice,
        Self::LeaseBackwards,
        Self::LeaseOfOtherParts,
        Self::LeaseWithoutSecret,
        Self::LeaseOfValues,
        Self::LeaseThatIsOver,
        Self::WrongChecksum,
        Self::WrongSecret,
        Self::NotHeld,
        Self::NoAnswerToRelease,
        Self::Forgets,
        Self::Errors,
    ];

    /// It could be the truth: a miss, for which nobody is left alone.
    pub(crate) fn is_no_failure(self) -> bool {
        matches!(self, Self::NotHeld | Self::LeaseThatIsOver | Self::WrongSecret | Self::Forgets)
    }
}

#[derive(Clone)]
struct Service {
    true_one: PeerClient<Channel>,
    lie: Lie,
    known: Arc<Mutex<BTreeSet<Vec<u8>>>>,
    refused: Arc<AtomicU64>,
}

pub(crate) struct Liar {
    pub(crate) address: String,
    /// Calls for which it had too much to do.
    pub(crate) refused: Arc<AtomicU64>,
    _runtime: Runtime,
}

impl Liar {
    pub(crate) fn start(true_address: &str, lie: Lie) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let endpoint = Endpoint::from_shared(format!("http://{true_address}")).unwrap();
        let true_one = PeerClient::new(runtime.block_on(endpoint.connect()).unwrap());
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        listener.set_nonblocking(true).unwrap();
        let inside = runtime.enter();
        let incoming = TcpIncoming::from(tokio::net::TcpListener::from_std(listener).unwrap());
        drop(inside);
        let refused = Arc::new(AtomicU64::new(0));
        let service = PeerServer::new(Service { true_one, lie, known: Arc::default(), refused: Arc::clone(&refused) });
        runtime.spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
        Self { address: address.to_string(), refused, _runtime: runtime }
    }
}

impl Service {
    /// Refuse a call if that is the lie.
    fn refuse(&self, lie: Lie) -> Result<(), Status> {
        if self.lie != lie {
            return Ok(());
        }
        self.refused.fetch_add(1, Relaxed);
        Err(Status::resource_exhausted(BUSY))
    }

    fn spoil(&self, lease: &mut LeaseReply) {
        let Some(first) = lease.blocks.first().cloned() else { return };
        match self.lie {
            Lie::LeaseOfOtherKeys => lease.blocks[0].key = 1000,
            Lie::LeaseTwice => lease.blocks.push(first),
            Lie::LeaseBackwards => lease.blocks.reverse(),
            Lie::LeaseOfOtherParts => drop(lease.blocks[0].parts.pop()),
            Lie::LeaseWithoutSecret => lease.secret.clear(),
            Lie::LeaseOfValues => lease.blocks[0].used_bytes = 7,
            Lie::LeaseThatIsOver => lease.time_ms = 0,
            Lie::LeaseForEver => lease.time_ms = u32::MAX,
            Lie::WrongChecksum => lease.blocks.iter_mut().for_each(|block| block.checksum = Some(1)),
            Lie::WrongSecret => lease.secret[3] ^= 1,
            _ => {}
        }
    }
}

#[tonic::async_trait]
impl Peer for Service {
    async fn hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        if !self.known.lock().unwrap().insert(request.get_ref().session.clone()) {
            self.refuse(Lie::BusyGreeting)?;
        }
        let mut reply = self.true_one.clone().hello(request).await?;
        if self.lie == Lie::OtherVersion {
            reply.get_mut().version += 1;
        }
        Ok(reply)
    }

    async fn find(&self, request: Request<FindRequest>) -> Result<Response<FindReply>, Status> {
        self.refuse(Lie::BusyFind)?;
        let mut reply = self.true_one.clone().find(request).await?;
        let tiers = &mut reply.get_mut().tiers;
        match self.lie {
            Lie::TiersBeyondKeys => tiers[0].push(1),
            Lie::UnknownTiers => tiers[0][0] = 3,
            Lie::NoTiers => tiers.clear(),
            Lie::Forgets => return Err(Status::failed_precondition("who are you?")),
            Lie::Errors => return Err(Status::internal("no\n\x1b[31m reason")),
            _ => {}
        }
        Ok(reply)
    }

    async fn lease(&self, request: Request<LeaseRequest>) -> Result<Response<LeaseReply>, Status> {
        self.refuse(Lie::BusyLease)?;
        let asked = request.get_ref().clone();
        let mut reply = self.true_one.clone().lease(request).await?.into_inner();
        self.spoil(&mut reply);
        reply.digest = 0;
        let mut reply = reply.sealed(&asked);
        reply.digest ^= u64::from(self.lie == Lie::LeaseOfAnotherRequest);
        Ok(Response::new(reply))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<ReleaseReply>, Status> {
        self.refuse(Lie::BusyRelease)?;
        let mut reply = self.true_one.clone().release(request).await?;
        match self.lie {
            Lie::NotHeld => reply.get_mut().held = vec![0],
            Lie::NoAnswerToRelease => return Err(Status::internal("gone")),
            _ => {}
        }
        Ok(reply)
    }

    async fn regions(&self, request: Request<RegionsRequest>) -> Result<Response<RegionsReply>, Status> {
        self.true_one.clone().regions(request).await
    }

    async fn connect(&self, request: Request<ConnectRequest>) -> Result<Response<ConnectReply>, Status> {
        self.true_one.clone().connect(request).await
    }

    async fn health(&self, request: Request<HealthRequest>) -> Result<Response<proto::HealthReply>, Status> {
        self.true_one.clone().health(request).await
    }
}
