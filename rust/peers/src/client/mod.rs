//! The client of a process: what it knows of its peers, and how it asks them for blocks.

mod calls;
mod facts;
mod lane;
mod link;
mod peer;
mod query;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use pegaflow_engine::{Error, ErrorKind, Key, Namespace, Pool, Result};
use tokio::runtime::{Handle, Runtime};

pub use self::facts::PeerFacts;
pub(crate) use self::lane::{Job, Lane};
pub(crate) use self::peer::{Peer, Up};
pub use self::query::PeerQuery;
use crate::credentials::Credentials;
use crate::fetch::Fetch;
use crate::limits::{FLIGHT_BYTES_MAX, FLIGHT_SHARE, HELD_MAX, LEASE_TIME, PEERS_MAX, QUERIES_MAX, STOP_WAIT_MAX};
use crate::sync::{AtomicU64, AtomicUsize, Relaxed, lock};
use crate::transport::{Transport, TransportKind};

/// What a client has beside the pool.
#[derive(Clone, Default)]
pub struct PeersOptions {
    /// `host:port` of each peer.
    pub addresses: Vec<String>,
    /// What to show them.
    pub credentials: Credentials,
    /// Ways for the bytes, the best first.
    pub transports: Vec<Arc<dyn Transport>>,
}

/// Keys of one namespace that peers are asked for.
#[derive(Clone, Debug)]
pub struct Question {
    /// Of this process's pool.
    pub namespace: Namespace,
    /// In order.
    pub keys: Vec<Key>,
    /// Each is the child of the one before it.
    pub chained: bool,
}

/// What all parts of a client share.
pub(crate) struct Inner {
    pub(crate) pool: Arc<Pool>,
    pub(crate) credentials: Credentials,
    pub(crate) transports: Vec<Arc<dyn Transport>>,
    pub(crate) handle: Handle,
    /// Bytes that peers were asked for and that are not there yet.
    pub(crate) flight_bytes: AtomicU64,
    pub(crate) queries: AtomicUsize,
    peers: Mutex<Vec<Arc<Peer>>>,
    fetches: Mutex<Vec<Weak<Fetch>>>,
}

impl Inner {
    pub(crate) fn peers(&self) -> Vec<Arc<Peer>> {
        lock(&self.peers).clone()
    }

    /// Bytes that may be asked for now.
    pub(crate) fn flight_room(&self) -> u64 {
        let most = FLIGHT_BYTES_MAX.min(self.pool.pool_bytes() / FLIGHT_SHARE);
        most.saturating_sub(self.flight_bytes.load(Relaxed))
    }

    /// Have what a fetch holds given back in time, whoever forgets it.
    pub(crate) fn note_fetch(&self, fetch: &Arc<Fetch>) {
        let mut fetches = lock(&self.fetches);
        fetches.retain(|fetch| fetch.strong_count() > 0);
        fetches.push(Arc::downgrade(fetch));
    }

    pub(crate) fn give_back_in_time(&self, fetch: &Arc<Fetch>) {
        let fetch = Arc::downgrade(fetch);
        self.handle.spawn(async move {
            tokio::time::sleep(HELD_MAX).await;
            if let Some(fetch) = fetch.upgrade() {
                fetch.give_back();
            }
        });
    }
}

/// This process's connections to other hosts' pools.
pub struct Peers {
    inner: Arc<Inner>,
    runtime: Option<Runtime>,
}

impl Peers {
    /// Begin to look for the peers.
    pub fn start(pool: Arc<Pool>, options: PeersOptions) -> Result<Self> {
        pool.member()?;
        options.credentials.client_tls("localhost")?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(2)
            .thread_name("pega-peers")
            .enable_all()
            .build()
            .map_err(|error| {
                Error::new(ErrorKind::Busy, format!("cannot start threads for peers ({error}): check ulimit -u"))
            })?;
        let inner = Arc::new(Inner {
            pool,
            credentials: options.credentials,
            transports: options.transports,
            handle: runtime.handle().clone(),
            flight_bytes: AtomicU64::new(0),
            queries: AtomicUsize::new(0),
            peers: Mutex::default(),
            fetches: Mutex::default(),
        });
        let peers = Self { inner, runtime: Some(runtime) };
        peers.set_addresses(&options.addresses)?;
        Ok(peers)
    }

    /// Talk to these and no others from now on. What is under way to others goes on.
    pub fn set_addresses(&self, addresses: &[String]) -> Result<()> {
        if addresses.len() > PEERS_MAX {
            let text = format!("{} peers are too many: give at most {PEERS_MAX}, or a directory", addresses.len());
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        addresses.iter().try_for_each(|address| peer::check(address))?;
        let mut peers = lock(&self.inner.peers);
        let mut known: HashMap<String, Arc<Peer>> = peers.drain(..).map(|peer| (peer.address.clone(), peer)).collect();
        for address in addresses {
            if peers.iter().any(|peer: &Arc<Peer>| peer.address == *address) {
                continue;
            }
            let peer = known.remove(address).unwrap_or_else(|| Peer::begin(&self.inner, address));
            peers.push(peer);
        }
        drop(peers);
        known.into_values().for_each(|peer| peer.stop());
        Ok(())
    }

    /// Ask all peers that can be asked. `None`: none can, or too many questions are open. Never waits.
    pub fn find(&self, questions: Vec<Question>) -> Result<Option<PeerQuery>> {
        self.ask(questions, None)
    }

    /// As [`Self::find`], of the peers at these addresses alone.
    pub fn find_among(&self, questions: Vec<Question>, addresses: &[String]) -> Result<Option<PeerQuery>> {
        self.ask(questions, Some(addresses))
    }

    fn ask(&self, questions: Vec<Question>, among: Option<&[String]>) -> Result<Option<PeerQuery>> {
        self.inner.pool.member()?;
        if self.inner.queries.load(Relaxed) >= QUERIES_MAX || questions.iter().all(|question| question.keys.is_empty())
        {
            return Ok(None);
        }
        PeerQuery::ask(&self.inner, questions, among)
    }

    /// How each peer is doing, in the order of their addresses.
    pub fn facts(&self) -> Vec<PeerFacts> {
        self.inner.peers().iter().map(|peer| peer.facts()).collect()
    }

    /// How many seconds `block_bytes` more bytes would take to come from the best of the peers; `None`: none is there.
    pub fn read_seconds(&self, block_bytes: u64) -> Option<f64> {
        let peers = self.inner.peers();
        peers.iter().filter_map(|peer| peer.read_seconds(block_bytes)).min_by(f64::total_cmp)
    }

    /// Whether devices may write what is fetched.
    pub fn has_rdma(&self) -> bool {
        self.inner.transports.iter().any(|transport| transport.kind() == TransportKind::Rdma)
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        if self.inner.pool.member().is_err_and(|error| error.kind() == ErrorKind::Forked) {
            // The threads, and what they hold, are the parent's.
            std::mem::forget((runtime, Arc::clone(&self.inner)));
            return;
        }
        let peers = std::mem::take(&mut *lock(&self.inner.peers));
        peers.iter().for_each(|peer| peer.stop());
        // A read ends with its lease at the latest.
        let until = Instant::now() + LEASE_TIME + STOP_WAIT_MAX;
        for peer in &peers {
            if !peer.wait_for_lane(until) {
                log::warn!("pegaflow: peer {} does not let go: it is left without waiting for it", peer.address);
            }
        }
        lock(&self.inner.fetches).drain(..).filter_map(|fetch| fetch.upgrade()).for_each(|fetch| fetch.give_back());
        runtime.shutdown_timeout(Duration::min(STOP_WAIT_MAX, until.saturating_duration_since(Instant::now())));
    }
}
