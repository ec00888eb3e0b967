//! A peer that has too much to do is no peer that has failed, and can be told what gives it less to do.
#![allow(missing_docs, reason = "tests")]

mod common;
#[path = "common/liar.rs"]
mod liar;

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::net::Net;
use common::{ShmDir, TOKEN, connect, connect_by_tcp, credentials, keys, namespace, serve, store, until};
use liar::{BUSY, Liar, Lie};
use pegaflow_engine::Pool;
use pegaflow_peers::limits::{CALLS_MAX, CONNECTION_CALLS_MAX, PROTOCOL_VERSION, TURNED_AWAY_MAX};
use pegaflow_peers::proto::peer_client::PeerClient;
use pegaflow_peers::proto::*;
use pegaflow_peers::transport::{DataServer, LeasedParts, RegionSource};
use pegaflow_peers::{PeerServer, Peers, ServerOptions};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request};

const POOL_BYTES: u64 = 4 << 20;
/// More than are needed for as many calls as a server works on.
const CONNECTIONS: usize = 2 + CALLS_MAX / CONNECTION_CALLS_MAX as usize;

/// Devices that take their time until they are let go.
#[derive(Default)]
struct Held(Mutex<bool>, Condvar);

impl Held {
    fn let_go(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }
}

impl RegionSource for Held {
    fn nics(&self) -> Vec<Nic> {
        Vec::new()
    }

    fn regions(&self, _: u64, _: &[u32]) -> pegaflow_engine::Result<RegionsReply> {
        drop(self.1.wait_while(self.0.lock().unwrap(), |gone| !*gone).unwrap());
        Ok(RegionsReply::default())
    }

    fn connect(&self, _: [u8; 16], _: &ConnectRequest) -> pegaflow_engine::Result<ConnectReply> {
        Ok(ConnectReply::default())
    }

    fn session_gone(&self, _: [u8; 16]) {}
}

fn signed<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {TOKEN}").parse().unwrap());
    request
}

/// One client of a server.
struct Session {
    client: PeerClient<Channel>,
    session: Vec<u8>,
    term: u64,
}

impl Session {
    async fn begin(address: &str, number: u8) -> Self {
        let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
        let (client, session) = (PeerClient::new(channel), vec![number; 16]);
        let mut begun = Self { client, session, term: 0 };
        begun.term = begun.greet().await.term;
        begun
    }

    async fn greet(&mut self) -> HelloReply {
        let hello = HelloRequest { version: PROTOCOL_VERSION, session: self.session.clone(), pool_id: 0 };
        self.client.hello(signed(hello)).await.unwrap().into_inner()
    }

    async fn lease(&mut self, pool_keys: std::ops::Range<u64>) -> u64 {
        let namespace = NamespaceName { fingerprint: vec![9; 32], group: 0, part_bytes: common::PARTS.to_vec() };
        let keys = keys(pool_keys).iter().flat_map(|key| key.to_bytes()).collect();
        let question = Some(Question { namespace: Some(namespace), key_bytes: 32, keys, chained: true });
        let (session, term) = (self.session.clone(), self.term);
        let request = LeaseRequest { session, term, question, bytes_max: u64::MAX, ..LeaseRequest::default() };
        self.client.lease(signed(request)).await.unwrap().into_inner().lease
    }

    async fn release(&mut self, lease: u64) -> Vec<u8> {
        let request = ReleaseRequest { session: self.session.clone(), term: self.term, leases: vec![lease] };
        self.client.release(signed(request)).await.unwrap().into_inner().held
    }

    async fn is_refused(&mut self) -> bool {
        let request = FindRequest { session: self.session.clone(), term: self.term, questions: Vec::new() };
        self.client.find(signed(request)).await.is_err_and(|status| status.code() == Code::ResourceExhausted)
    }

    /// Ask for what takes its time, again and again.
    fn keep_busy(&self) {
        for _ in 0..CONNECTION_CALLS_MAX {
            let (mut client, session, term) = (self.client.clone(), self.session.clone(), self.term);
            tokio::spawn(async move {
                loop {
                    let request = RegionsRequest { session: session.clone(), term, ..RegionsRequest::default() };
                    let _too_many_or_late = client.regions(signed(request)).await;
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            });
        }
    }
}

#[test]
fn a_server_that_is_full_greets_takes_leases_back_and_tells_its_health() {
    let dir = ShmDir::new("full");
    let pool = dir.pool("p", POOL_BYTES);
    store(&pool, namespace(&pool), 0..5);
    let held = Arc::new(Held::default());
    let regions = Some(Arc::clone(&held) as Arc<dyn RegionSource>);
    let options = ServerOptions { listen: "127.0.0.1:0".to_owned(), credentials: credentials(), data: None, regions };
    let server = PeerServer::start(pool, options).unwrap();
    let address = until(|| server.facts().address).to_string();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut first = Session::begin(&address, 0).await;
        let lease = first.lease(0..5).await;
        let mut others = Vec::new();
        for number in 1..=CONNECTIONS {
            others.push(Session::begin(&address, number as u8).await);
        }
        others.iter().for_each(Session::keep_busy);
        while !first.is_refused().await {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(first.greet().await.term, first.term);
        first.client.health(signed(HealthRequest {})).await.unwrap();
        assert_eq!(first.release(lease).await, [1]);
    });
    held.let_go();
    drop(runtime);
    assert_eq!(server.facts().leased_bytes, 0);
}

/// Ask for blocks, and fetch what is said to be there; nothing comes.
fn fetch_in_vain(peers: &Peers, pool: &Arc<Pool>) {
    let question = pegaflow_peers::Question { namespace: namespace(pool), keys: keys(0..10), chained: true };
    if let Some(query) = peers.find(vec![question]).unwrap() {
        until(|| query.poll());
        if let Some(fetch) = query.fetch(0, 0..10, None).unwrap() {
            assert_eq!(until(|| fetch.poll()), 0);
        }
    }
}

/// Ask for blocks and fetch them until a peer has refused, and for some time after that. What was wrong with the peer.
fn problems(peers: &Peers, pool: &Arc<Pool>, refused: impl Fn() -> u64) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    let mut ends = None;
    until(|| {
        fetch_in_vain(peers, pool);
        all.extend(peers.facts().remove(0).problem);
        if refused() > 0 && ends.is_none() {
            ends = Some(Instant::now() + Duration::from_millis(500));
        }
        ends.filter(|ends| Instant::now() > *ends)
    });
    all
}

fn is_no_failure(lie: Lie) {
    let (dir, net) = (ShmDir::new(&format!("busy-{lie:?}")), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    if lie != Lie::BusyGreeting {
        store(&theirs, namespace(&theirs), 0..10);
    }
    let (_server, address) = serve(&theirs, &net);
    let liar = Liar::start(&address, lie);
    let peers = connect(&ours, &net, std::slice::from_ref(&liar.address));
    let problems = problems(&peers, &ours, || liar.refused.load(Relaxed));
    assert!(problems.iter().all(|problem| !problem.contains(BUSY)), "{lie:?}: {problems:?}");
}

#[test]
fn a_peer_that_has_too_much_to_do_for_a_call_is_not_left_alone() {
    std::thread::scope(|scope| {
        for lie in [Lie::BusyGreeting, Lie::BusyFind, Lie::BusyLease, Lie::BusyRelease] {
            scope.spawn(move || is_no_failure(lie));
        }
    });
}

/// Takes streams and ends them at once, as a server does that has no room for more.
struct NoRoom {
    stops: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl NoRoom {
    fn start(listener: TcpListener, ended: Arc<AtomicU64>) -> Self {
        let stops = Arc::new(AtomicBool::new(false));
        listener.set_nonblocking(true).unwrap();
        let thread = std::thread::spawn({
            let stops = Arc::clone(&stops);
            move || {
                while !stops.load(Relaxed) {
                    match listener.accept() {
                        Ok(stream) => {
                            drop(stream);
                            ended.fetch_add(1, Relaxed);
                        }
                        Err(_) => std::thread::sleep(Duration::from_millis(2)),
                    }
                }
            }
        });
        Self { stops, thread: Some(thread) }
    }
}

impl DataServer for NoRoom {
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

impl Drop for NoRoom {
    fn drop(&mut self) {
        self.stops.store(true, Relaxed);
        self.thread.take().into_iter().for_each(|thread| thread.join().unwrap());
    }
}

#[test]
fn a_peer_that_has_no_room_for_a_stream_is_left_alone_only_if_it_never_has() {
    let dir = ShmDir::new("streams");
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    store(&theirs, namespace(&theirs), 0..10);
    let ended = Arc::new(AtomicU64::new(0));
    let starter = {
        let ended = Arc::clone(&ended);
        move |listener: TcpListener, _: Arc<dyn LeasedParts>| {
            let started: Box<dyn DataServer> = Box::new(NoRoom::start(listener, Arc::clone(&ended)));
            Ok(started)
        }
    };
    let options = ServerOptions {
        listen: "127.0.0.1:0".to_owned(),
        credentials: credentials(),
        data: Some(Arc::new(starter)),
        regions: None,
    };
    let server = PeerServer::start(theirs, options).unwrap();
    let address = until(|| server.facts().address).to_string();
    let peers = connect_by_tcp(&ours, &[address]);
    let problem = until(|| {
        fetch_in_vain(&peers, &ours);
        peers.facts().remove(0).problem.filter(|problem| problem.contains("stream"))
    });
    assert!(problem.contains("no room"), "{problem}");
    // Each time two, and the last of them is counted when it has ended.
    assert!(ended.load(Relaxed) + 1 >= 2 * u64::from(TURNED_AWAY_MAX), "{ended:?}");
}
