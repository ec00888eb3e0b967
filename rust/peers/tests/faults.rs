//! Peers that die or stand still at any moment, over TCP: right bytes or none, nothing waits for ever, and all slots
//! and leases come back. `PEGAFLOW_PEER_CASES` says how often.
#![allow(missing_docs, reason = "tests")]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{ShmDir, check, connect_by_tcp, keys, namespace, reserved, serve_by_tcp, store, until};
use pegaflow_engine::Pool;
use pegaflow_peers::{Peers, Question};

/// Less than a quarter of the pools, which is what may be on its way at a time.
const BLOCKS: u64 = 1500;

fn cases() -> u64 {
    std::env::var("PEGAFLOW_PEER_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(5)
}

/// A process that is killed when it goes out of scope.
struct Worker(Child);

impl Worker {
    fn start(role: &str, dir: &ShmDir, address: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_peer-worker"))
            .args([role, dir.0.to_str().unwrap(), address, &BLOCKS.to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.ends_with("ing\n"), "it has ended: {line}");
        Self(child)
    }

    fn signal(&self, name: &str) {
        let done = Command::new("kill").args([name, &self.0.id().to_string()]).status().unwrap();
        assert!(done.success());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// An address that nobody has at the moment, with the port behind it.
fn unused_address() -> String {
    until(|| {
        let first = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = first.local_addr().unwrap().port();
        let second = port.checked_add(1).and_then(|next| std::net::TcpListener::bind(("127.0.0.1", next)).ok());
        second.map(|_| format!("127.0.0.1:{port}"))
    })
}

/// Ask and fetch once, whatever there is. How many came, and how long it took.
fn request(peers: &Peers, pool: &Arc<Pool>) -> (usize, Duration) {
    let ns = namespace(pool);
    let started = Instant::now();
    let question = Question { namespace: ns, keys: keys(0..BLOCKS), chained: true };
    let mut found = 0;
    if let Some(query) = peers.find(vec![question]).unwrap() {
        until(|| query.poll());
        if let Some(fetch) = query.fetch(0, 0..BLOCKS as usize, None).unwrap() {
            found = until(|| fetch.poll());
        }
    }
    (found, started.elapsed())
}

fn fetch_all(peers: &Peers, pool: &Arc<Pool>) {
    until(|| (request(peers, pool).0 == BLOCKS as usize).then_some(()));
    assert_eq!(check(pool, namespace(pool), 0..BLOCKS), BLOCKS as usize);
}

fn nothing_is_left(pool: &Arc<Pool>) {
    until(|| {
        pool.reap().unwrap();
        (reserved(pool, namespace(pool)) == 0).then_some(())
    });
}

#[test]
fn a_server_that_is_killed_costs_a_miss_and_its_successor_is_found() {
    let dir = ShmDir::new("kill-server");
    let ours = dir.pool("ours", 32 << 20);
    let address = unused_address();
    let peers = connect_by_tcp(&ours, std::slice::from_ref(&address));
    let (mut whole, mut partial, mut none, mut worst) = (0, 0, 0, Duration::ZERO);
    for case in 0..cases() {
        let server = Worker::start("serve", &dir, &address);
        fetch_all(&peers, &ours);
        ours.reset(namespace(&ours)).unwrap();
        let (found, took) = std::thread::scope(|scope| {
            // Before, during and after the read.
            scope.spawn(move || {
                std::thread::sleep(Duration::from_micros(case * 7919 % 30_000));
                drop(server);
            });
            request(&peers, &ours)
        });
        match found as u64 {
            0 => none += 1,
            BLOCKS => whole += 1,
            _ => partial += 1,
        }
        worst = worst.max(took);
        check(&ours, namespace(&ours), 0..BLOCKS);
        ours.reset(namespace(&ours)).unwrap();
    }
    println!("killed servers: {whole} fetches whole, {partial} in part, {none} not; longest {worst:?}");
    nothing_is_left(&ours);
}

#[test]
fn a_server_that_stands_still_costs_a_bounded_wait() {
    let dir = ShmDir::new("stop-server");
    let ours = dir.pool("ours", 32 << 20);
    let address = unused_address();
    let server = Worker::start("serve", &dir, &address);
    let peers = connect_by_tcp(&ours, std::slice::from_ref(&address));
    let mut worst = Duration::ZERO;
    for case in 0..cases() {
        fetch_all(&peers, &ours);
        ours.reset(namespace(&ours)).unwrap();
        let (_, took) = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_micros(case * 7919 % 20_000));
                server.signal("-STOP");
            });
            request(&peers, &ours)
        });
        worst = worst.max(took);
        check(&ours, namespace(&ours), 0..BLOCKS);
        server.signal("-CONT");
        ours.reset(namespace(&ours)).unwrap();
    }
    println!("frozen servers: longest request {worst:?}");
    nothing_is_left(&ours);
}

#[test]
fn a_client_that_is_killed_leaves_neither_leases_nor_slots() {
    let dir = ShmDir::new("kill-client");
    let (theirs, ours) = (dir.pool("theirs", 32 << 20), dir.pool("ours", 32 << 20));
    store(&theirs, namespace(&theirs), 0..BLOCKS);
    let address = unused_address();
    let server = serve_by_tcp(&theirs, &address);
    until(|| server.facts().address);
    for case in 0..cases() {
        let client = Worker::start("fetch", &dir, &address);
        let sent = |server: &pegaflow_peers::ServerFacts| {
            server.numbers.iter().find(|(name, _)| *name == "blocks_leased").map_or(0, |(_, count)| *count)
        };
        let before = sent(&server.facts());
        until(|| (sent(&server.facts()) > before).then_some(()));
        std::thread::sleep(Duration::from_micros(case * 7919 % 20_000));
        drop(client);
        until(|| (server.facts().leased_bytes == 0 && server.facts().leases == 0).then_some(()));
        until(|| (server.facts().sessions == 0).then_some(()));
        nothing_is_left(&ours);
        check(&ours, namespace(&ours), 0..BLOCKS);
    }
}

#[test]
fn another_process_of_the_pool_serves_when_the_first_is_killed() {
    let dir = ShmDir::new("successor");
    let ours = dir.pool("ours", 32 << 20);
    let address = unused_address();
    let first = Worker::start("serve", &dir, &address);
    let theirs = dir.pool("theirs", 32 << 20);
    let second = serve_by_tcp(&theirs, &address);
    let peers = connect_by_tcp(&ours, std::slice::from_ref(&address));
    fetch_all(&peers, &ours);
    assert_eq!(second.facts().address, None);
    assert_eq!(second.facts().problem, None, "that another one serves is none");
    drop(first);
    until(|| second.facts().address);
    ours.reset(namespace(&ours)).unwrap();
    fetch_all(&peers, &ours);
    nothing_is_left(&ours);
}
