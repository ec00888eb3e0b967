//! Garbage from either side: it is refused, nothing is published or kept, and who is sound is served as before.
#![allow(missing_docs, reason = "tests")]

mod common;
#[path = "common/liar.rs"]
mod liar;
mod wearing;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::net::Net;
use common::{
    ShmDir, TOKEN, check, connect, connect_by, fetch, fetch_whole, keys, namespace, reserved, serve, store, until,
};
use liar::{Liar, Lie};
use pegaflow_peers::limits::{BACKOFF_MIN, LEASE_MARGIN, LEASE_TIME, PROTOCOL_VERSION};
use pegaflow_peers::proto::peer_client::PeerClient;
use pegaflow_peers::proto::{self, FindRequest, HelloRequest, LeaseRequest, NamespaceName, Question, ReleaseRequest};
use pegaflow_peers::{Peers, PeersOptions};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request};
use wearing::{Wear, Wearing};

const POOL_BYTES: u64 = 4 << 20;

/// Numbers that look random and are the same each time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB) ^ mixed >> 31
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn bytes(&mut self, most: u64) -> Vec<u8> {
        let count = self.below(most);
        (0..count).map(|_| self.next() as u8).collect()
    }
}

fn seed() -> u64 {
    let given = std::env::var("PEGAFLOW_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        now.as_nanos() as u64 >> 10
    });
    println!("PEGAFLOW_TEST_SEED={seed}");
    seed
}

fn signed<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {TOKEN}").parse().unwrap());
    request
}

async fn client(address: &str) -> PeerClient<Channel> {
    PeerClient::new(Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap())
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn a_server_outlives_any_bytes_on_its_port() {
    let (dir, net) = (ShmDir::new("bytes"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    store(&theirs, namespace(&theirs), 0..10);
    let (server, address) = serve(&theirs, &net);
    let mut random = Random(seed());
    let mut half_open = Vec::new();
    for round in 0..300 {
        let mut stream = TcpStream::connect(&address).unwrap();
        let mut bytes = random.bytes(2000);
        if round % 3 != 0 {
            // Frames of any kind, behind the words with which HTTP/2 begins.
            bytes.splice(0..0, *b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        }
        let _it_may_be_closed_already = stream.write_all(&bytes);
        if round % 10 == 0 {
            half_open.push(stream);
        }
    }
    let peers = connect(&ours, &net, &[address]);
    fetch_whole(&peers, namespace(&ours), &keys(0..10));
    assert!(server.facts().problem.is_none());
    drop(server);
    for mut stream in half_open {
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let mut rest = Vec::new();
        let read = stream.read_to_end(&mut rest);
        let timed_out = |error: &std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
        assert!(!read.is_err_and(|error| timed_out(&error)), "a server that has stopped has no connections");
    }
}

/// A question that is nearly one.
fn question(random: &mut Random) -> Question {
    let namespace = NamespaceName {
        fingerprint: if random.below(4) == 0 { random.bytes(40) } else { vec![9; 32] },
        group: random.below(2) as u32,
        part_bytes: match random.below(4) {
            0 => (0..random.below(100)).map(|_| random.next()).collect(),
            1 => vec![u64::MAX, u64::MAX],
            _ => common::PARTS.to_vec(),
        },
    };
    let proper = keys(0..random.below(20)).iter().flat_map(|key| key.to_bytes()).collect();
    let (key_bytes, keys) = match random.below(3) {
        0 => (random.below(40) as u32, random.bytes(500)),
        1 => (random.next() as u32, proper),
        _ => (32, proper),
    };
    Question { namespace: (random.below(8) > 0).then_some(namespace), key_bytes, keys, chained: random.below(2) == 0 }
}

#[test]
fn a_server_outlives_any_calls() {
    let (dir, net) = (ShmDir::new("calls"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    store(&theirs, namespace(&theirs), 0..20);
    let (server, address) = serve(&theirs, &net);
    let mut random = Random(seed());
    runtime().block_on(async {
        let mut client = client(&address).await;
        let session = vec![5; 16];
        let hello = HelloRequest { version: PROTOCOL_VERSION, session: session.clone(), pool_id: 0 };
        let term = client.hello(signed(hello)).await.unwrap().into_inner().term;
        for _ in 0..400 {
            let session = if random.below(10) == 0 { random.bytes(20) } else { session.clone() };
            let term = if random.below(10) == 0 { random.next() } else { term };
            let wrong = match random.below(3) {
                0 => {
                    let questions = (0..random.below(70)).map(|_| question(&mut random)).collect();
                    client.find(signed(FindRequest { session, term, questions })).await.map(drop)
                }
                1 => {
                    let question = (random.below(8) > 0).then(|| question(&mut random));
                    let (bytes_max, parent) = (random.next() >> random.below(64), random.bytes(40));
                    let request = LeaseRequest { session, term, question, wait_ms: 1, bytes_max, parent };
                    client.lease(signed(request)).await.map(drop)
                }
                _ => {
                    let leases = (0..random.below(100)).map(|_| random.next()).collect();
                    client.release(signed(ReleaseRequest { session, term, leases })).await.map(drop)
                }
            };
            let known = [Code::InvalidArgument, Code::FailedPrecondition, Code::ResourceExhausted];
            assert!(wrong.as_ref().is_ok() || known.contains(&wrong.as_ref().unwrap_err().code()), "{wrong:?}");
        }
        let wrong = client.find(Request::new(FindRequest::default())).await.unwrap_err();
        assert_eq!(wrong.code(), Code::Unauthenticated, "without the token");
        let old = HelloRequest { version: PROTOCOL_VERSION - 1, session: vec![1; 16], pool_id: 0 };
        assert_eq!(client.hello(signed(old)).await.unwrap_err().code(), Code::FailedPrecondition);
    });
    // The connection is gone, and so is what was leased over it.
    until(|| (server.facts().leases == 0 && server.facts().leased_bytes == 0).then_some(()));
    let peers = connect(&ours, &net, &[address]);
    fetch_whole(&peers, namespace(&ours), &keys(0..20));
}

#[test]
fn a_client_takes_no_more_than_its_share_of_a_pool() {
    let (dir, net) = (ShmDir::new("share"), Net::default());
    let theirs = dir.pool("theirs", 1 << 20);
    store(&theirs, namespace(&theirs), 0..100);
    let (server, address) = serve(&theirs, &net);
    runtime().block_on(async {
        let mut client = client(&address).await;
        let session = vec![5; 16];
        let hello = HelloRequest { version: PROTOCOL_VERSION, session: session.clone(), pool_id: 0 };
        let term = client.hello(signed(hello)).await.unwrap().into_inner().term;
        let namespace = NamespaceName { fingerprint: vec![9; 32], group: 0, part_bytes: common::PARTS.to_vec() };
        let keys = keys(0..100).iter().flat_map(|key| key.to_bytes()).collect();
        let question = Question { namespace: Some(namespace), key_bytes: 32, keys, chained: true };
        loop {
            let began = Instant::now();
            let mut all = Vec::new();
            for _ in 0..10 {
                let request = LeaseRequest {
                    session: session.clone(),
                    term,
                    question: Some(question.clone()),
                    bytes_max: u64::MAX,
                    ..LeaseRequest::default()
                };
                all.push(client.lease(signed(request)).await.unwrap().into_inner());
            }
            assert!(server.facts().leased_bytes <= (1 << 20) / 4);
            let leases: Vec<u64> = all.iter().map(|lease| lease.lease).collect();
            let release = ReleaseRequest { session: session.clone(), term, leases: leases.clone() };
            let held = client.release(signed(release)).await.unwrap().into_inner().held;
            let again = ReleaseRequest { session: session.clone(), term, leases: leases.clone() };
            let held_again = client.release(signed(again)).await.unwrap().into_inner().held;
            assert!(held_again.iter().all(|held| *held == 0), "nothing is given back twice");
            // Leases that are over make room for others.
            if began.elapsed() < LEASE_TIME {
                let blocks: usize = all.iter().map(|lease: &proto::LeaseReply| lease.blocks.len()).sum();
                assert_eq!(blocks, (1 << 20) / 4 / common::BLOCK_BYTES as usize);
                let held = held.iter().filter(|held| **held == 1).count();
                assert_eq!(held, leases.iter().filter(|lease| **lease != 0).count());
                break;
            }
        }
    });
    until(|| (server.facts().leased_bytes == 0).then_some(()));
}

#[test]
fn what_a_lying_peer_says_is_not_believed() {
    std::thread::scope(|scope| {
        for lie in Lie::ALL {
            scope.spawn(move || nothing_comes_of(lie));
        }
    });
}

#[test]
fn a_lease_is_read_from_for_no_longer_than_leases_last_whatever_the_peer_says() {
    let (dir, net) = (ShmDir::new("for-ever"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    store(&theirs, namespace(&theirs), 0..10);
    let (_server, address) = serve(&theirs, &net);
    let liar = Liar::start(&address, Lie::LeaseForEver);
    let wear = Arc::new(Wear::default());
    let noting = Arc::new(Wearing(Arc::clone(&wear), net.transport(&ours)));
    let peers = connect_by(&ours, vec![noting], std::slice::from_ref(&liar.address));
    until(|| (fetch(&peers, namespace(&ours), &keys(0..10)).1 == 10).then_some(()));
    let patience = wear.patience.lock().unwrap();
    assert!(!patience.is_empty());
    assert!(patience.iter().all(|time| *time <= LEASE_TIME - LEASE_MARGIN), "{patience:?}");
}

fn nothing_comes_of(lie: Lie) {
    let (dir, net) = (ShmDir::new(&format!("liar-{lie:?}")), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    store(&theirs, namespace(&theirs), 0..10);
    let (_server, address) = serve(&theirs, &net);
    let liar = Liar::start(&address, lie);
    let options = PeersOptions {
        addresses: vec![liar.address.clone()],
        credentials: common::credentials(),
        transports: vec![net.transport(&ours)],
    };
    let peers = Peers::start(Arc::clone(&ours), options).unwrap();
    let ns = namespace(&ours);
    let began = Instant::now();
    let question = pegaflow_peers::Question { namespace: ns, keys: keys(0..10), chained: true };
    let mut found = 0;
    let failures = || peers.facts()[0].numbers.iter().find(|(name, _)| *name == "failures").unwrap().1;
    let is_seen = || failures() > 0 || lie.is_no_failure() || began.elapsed() > Duration::from_secs(120);
    while began.elapsed() < Duration::from_secs(2) || !is_seen() {
        if let Some(query) = peers.find(vec![question.clone()]).unwrap() {
            until(|| query.poll());
            if let Some(fetch) = query.fetch(0, 0..10, None).unwrap() {
                found += until(|| fetch.poll());
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(found, 0, "{lie:?}");
    assert_eq!(check(&ours, ns, 0..10), 0, "{lie:?}");
    until(|| (reserved(&ours, ns) == 0).then_some(()));
    let failures = failures();
    assert!(failures > 0 || lie.is_no_failure(), "{lie:?}: {:?}", peers.facts());
    // After each it is left alone for a while.
    let most = 2 + (began.elapsed().as_secs_f64() / BACKOFF_MIN.as_secs_f64()) as u64;
    assert!(failures <= most, "{lie:?}: a peer that fails is left alone, not asked {failures} times");
}
