//! Helpers of the tests: pools whose blocks tell what they are, and a data plane in the process that fails on demand.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "each test binary uses some of them")]

#[path = "../fake/mod.rs"]
pub mod fake;
pub mod net;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pegaflow_engine::checksum::part_checksum;
use pegaflow_engine::{BlockRef, Key, Namespace, OpenOptions, Pool};
use pegaflow_peers::transport::Transport;
use pegaflow_peers::{
    Credentials, PeerFacts, PeerFetch, PeerQuery, PeerServer, Peers, PeersOptions, Question, ServerOptions, network,
};

use self::net::Net;

pub const TOKEN: &str = "only-for-tests";
/// Two parts, as of two ranks.
pub const PARTS: [u64; 2] = [4096, 512];
pub const BLOCK_BYTES: u64 = PARTS[0] + PARTS[1];
const WAIT_MAX: Duration = Duration::from_secs(120);

/// A directory below /dev/shm that goes away with its pools.
pub struct ShmDir(pub PathBuf);

impl ShmDir {
    pub fn new(test: &str) -> Self {
        let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
        let dir = PathBuf::from(format!("/dev/shm/pega-peers-{test}-{}-{nanos}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        Self(dir)
    }

    pub fn pool(&self, name: &str, pool_bytes: u64) -> Arc<Pool> {
        self.pool_with_policy(name, pool_bytes, None)
    }

    pub fn pool_with_policy(&self, name: &str, pool_bytes: u64, policy: Option<&str>) -> Arc<Pool> {
        let options = OpenOptions {
            shm_dir: self.0.clone(),
            pool_bytes: Some(pool_bytes),
            segment_bytes: Some(pool_bytes / 8),
            policy: policy.map(str::to_owned),
            ..OpenOptions::default()
        };
        Pool::open(name, &options).unwrap()
    }
}

impl Drop for ShmDir {
    fn drop(&mut self) {
        let _best_effort = std::fs::remove_dir_all(&self.0);
    }
}

pub fn key(number: u64) -> Key {
    let mut bytes = [7u8; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Key::new(&bytes).unwrap()
}

pub fn keys(numbers: std::ops::Range<u64>) -> Vec<Key> {
    numbers.map(key).collect()
}

pub fn namespace(pool: &Pool) -> Namespace {
    pool.namespace(&[9; 32], 0, &PARTS, "test").unwrap()
}

/// Bytes of a part of the block of that number.
pub fn content(number: u64, part: u32) -> Vec<u8> {
    let bytes = PARTS[part as usize] as usize;
    let seed = (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ u64::from(part);
    (0..bytes as u64 / 8).flat_map(|word| (seed ^ word.wrapping_mul(0xD6E8_FEB8_6659_FD93)).to_le_bytes()).collect()
}

/// Write a part of a reserved slot.
pub fn write(pool: &Arc<Pool>, block: BlockRef, part: u32, bytes: &[u8]) -> bool {
    let Some(target) = pool.space().write_target(block, part) else { return false };
    assert_eq!(target.bytes, bytes.len());
    // SAFETY: reserved by this process, so nobody reads it; address and length come from the pool.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.address, bytes.len()) };
    true
}

/// Store blocks of a chain, with checksums. Returns how many were published.
pub fn store(pool: &Arc<Pool>, ns: Namespace, numbers: std::ops::Range<u64>) -> usize {
    store_summed(pool, ns, numbers, true)
}

/// The same, with checksums or without any.
pub fn store_summed(pool: &Arc<Pool>, ns: Namespace, numbers: std::ops::Range<u64>, summed: bool) -> usize {
    let all = keys(numbers.clone());
    let started = Instant::now();
    loop {
        let reserved = pool.reserve(ns, &all, None, true).unwrap();
        if reserved.is_empty() && pool.lookup(ns, &all, 0).unwrap() < all.len() {
            assert!(started.elapsed() < WAIT_MAX, "no slot: {:?}", pool.last_grow_error());
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        for (position, block) in &reserved {
            for part in 0..PARTS.len() as u32 {
                let bytes = content(numbers.start + *position as u64, part);
                assert!(write(pool, *block, part, &bytes));
                let sum = [part_checksum(part, &bytes)];
                pool.mark_written(part, &[*block], summed.then_some(sum.as_slice())).unwrap();
            }
        }
        let blocks: Vec<BlockRef> = reserved.iter().map(|(_, block)| *block).collect();
        let published = pool.publish(&blocks).unwrap();
        if reserved.is_empty() || pool.lookup(ns, &all, 0).unwrap() == all.len() {
            return published;
        }
    }
}

/// How many of these are in memory with the right bytes; panics at the first wrong one.
pub fn check(pool: &Arc<Pool>, ns: Namespace, numbers: std::ops::Range<u64>) -> usize {
    let all = keys(numbers.clone());
    let lent = pool.lend(ns, &all, false, u64::MAX).unwrap();
    for (position, block) in &lent {
        for part in 0..PARTS.len() as u32 {
            let bytes = block.bytes(part).unwrap();
            assert!(bytes == content(numbers.start + *position as u64, part), "wrong bytes in block {position}");
        }
    }
    lent.len()
}

/// Slots that are reserved by anybody.
pub fn reserved(pool: &Pool, ns: Namespace) -> u64 {
    let stats = pool.namespace_stats(ns).unwrap();
    stats.iter().find(|(name, _)| *name == "blocks_reserved").unwrap().1
}

pub fn credentials() -> Credentials {
    Credentials::new(Some(TOKEN), None).unwrap()
}

/// Serve `pool` at a port of the kernel's choice.
pub fn serve(pool: &Arc<Pool>, net: &Net) -> (PeerServer, String) {
    serve_at(pool, net, "127.0.0.1:0")
}

/// Serve `pool` with the data plane by TCP.
pub fn serve_by_tcp(pool: &Arc<Pool>, listen: &str) -> PeerServer {
    let options = ServerOptions {
        listen: listen.to_owned(),
        credentials: credentials(),
        data: Some(network::data_starter()),
        regions: None,
    };
    PeerServer::start(Arc::clone(pool), options).unwrap()
}

/// Fetch by TCP.
pub fn connect_by_tcp(pool: &Arc<Pool>, addresses: &[String]) -> Peers {
    let transports = network::transports(pool, &[], 1);
    let options = PeersOptions { addresses: addresses.to_vec(), credentials: credentials(), transports };
    Peers::start(Arc::clone(pool), options).unwrap()
}

pub fn serve_at(pool: &Arc<Pool>, net: &Net, listen: &str) -> (PeerServer, String) {
    let options = ServerOptions {
        listen: listen.to_owned(),
        credentials: credentials(),
        data: Some(net.starter()),
        regions: None,
    };
    let server = PeerServer::start(Arc::clone(pool), options).unwrap();
    let address = until(|| server.facts().address);
    (server, address.to_string())
}

pub fn connect(pool: &Arc<Pool>, net: &Net, addresses: &[String]) -> Peers {
    connect_by(pool, vec![net.transport(pool)], addresses)
}

/// The same, by these transports.
pub fn connect_by(pool: &Arc<Pool>, transports: Vec<Arc<dyn Transport>>, addresses: &[String]) -> Peers {
    let options = PeersOptions { addresses: addresses.to_vec(), credentials: credentials(), transports };
    let peers = Peers::start(Arc::clone(pool), options).unwrap();
    until(|| peers.facts().iter().all(|peer| peer.state == "up").then_some(()));
    peers
}

/// Ask until there is something.
pub fn until<T>(mut ask: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(started.elapsed() < WAIT_MAX, "nothing within {WAIT_MAX:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub fn find(peers: &Peers, ns: Namespace, keys: &[Key]) -> (PeerQuery, Vec<u8>) {
    ask(peers, &Question { namespace: ns, keys: keys.to_vec(), chained: true })
}

/// Ask until all have answered: on a slow host an answer may be late, and then it is as if nobody had anything.
pub fn ask(peers: &Peers, question: &Question) -> (PeerQuery, Vec<u8>) {
    let counts = || {
        let facts = peers.facts();
        let is = |(name, _): &&(&str, u64), wanted: &str| *name == wanted;
        let numbers = || facts.iter().flat_map(|peer| &peer.numbers);
        let sum = |wanted| numbers().filter(|number| is(number, wanted)).map(|(_, count)| count).sum::<u64>();
        (sum("finds"), sum("finds_answered"), facts.iter().filter(|peer| peer.state == "up").count() as u64)
    };
    until(|| {
        let (asked, answered, up) = counts();
        let query = peers.find(vec![question.clone()]).unwrap()?;
        let tiers = until(|| query.poll()).remove(0);
        let (asked_now, answered_now, _) = counts();
        let is_answered = asked_now - asked == answered_now - answered && answered_now - answered >= up.max(1);
        is_answered.then_some((query, tiers))
    })
}

/// Fetch until all of a chain is there: what is late is a miss.
pub fn fetch_whole(peers: &Peers, ns: Namespace, keys: &[Key]) {
    until(|| (fetch(peers, ns, keys).1 == keys.len()).then_some(()));
}

/// Fetch all of a chain, and wait for it.
pub fn fetch(peers: &Peers, ns: Namespace, keys: &[Key]) -> (Option<PeerFetch>, usize) {
    let (query, _) = find(peers, ns, keys);
    let fetch = query.fetch(0, 0..keys.len(), None).unwrap();
    let found = fetch.as_ref().map_or(0, |fetch| until(|| fetch.poll()));
    (fetch, found)
}

/// A counter of the first peer.
pub fn counter(peers: &Peers, name: &str) -> u64 {
    number(&peers.facts()[0], name)
}

/// A counter of a peer.
pub fn number(peer: &PeerFacts, name: &str) -> u64 {
    peer.numbers.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no counter {name}")).1
}
