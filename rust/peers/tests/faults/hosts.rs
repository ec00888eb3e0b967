//! The other host as a process, and a client of it in this one.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use pegaflow_engine::Pool;
use pegaflow_peers::{Peers, Question};

use crate::common::{ShmDir, check, keys, namespace, reserved, until};

/// Less than a quarter of the pools, which is what may be on its way at a time.
pub(crate) const BLOCKS: u64 = 1500;
pub(crate) const POOL_BYTES: u64 = 32 << 20;

/// A process that is killed when it goes out of scope.
pub(crate) struct Worker(pub(crate) Child);

impl Worker {
    pub(crate) fn start(role: &str, dir: &ShmDir, address: &str) -> Self {
        Self::start_with(&[], &[role, dir.0.to_str().unwrap(), address, &BLOCKS.to_string()])
    }

    /// Started by another program; back once it has said that it is at work.
    pub(crate) fn start_with(by: &[&str], args: &[&str]) -> Self {
        let mut command: Vec<&str> = by.to_vec();
        command.push(env!("CARGO_BIN_EXE_peer-worker"));
        let mut child = Command::new(command[0]).args(&command[1..]).args(args).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.ends_with("ing\n"), "it has ended: {line}");
        Self(child)
    }

    pub(crate) fn signal(&self, name: &str) {
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

/// An address that nobody has at the moment and nobody else was told of, with the port behind it. Below those that the
/// kernel gives to whoever connects somewhere: it stays free until it is used.
pub(crate) fn unused_address() -> String {
    static TOLD: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    until(|| {
        let nanos = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos();
        let port = 20_000 + (nanos / 64 % 6_000) as u16 * 2;
        let next = port + 1;
        let _first = std::net::TcpListener::bind(("127.0.0.1", port)).ok()?;
        let _second = std::net::TcpListener::bind(("127.0.0.1", next)).ok()?;
        let mut told = TOLD.lock().unwrap();
        (told.is_disjoint(&[port, next].into()) && told.insert(port) && told.insert(next))
            .then(|| format!("127.0.0.1:{port}"))
    })
}

/// Ask and fetch once, whatever there is. How many came, and how long it took.
pub(crate) fn request(peers: &Peers, pool: &Arc<Pool>) -> (usize, Duration) {
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

/// Request until the fault has come about, of which `when` tells: a busy host may be late once with an answer, and then
/// nothing is read. How many blocks came of the last request, and how long it went on after the fault.
pub(crate) fn request_through(peers: &Peers, pool: &Arc<Pool>, when: &mpsc::Receiver<Instant>) -> (usize, Duration) {
    until(|| {
        let (found, _) = request(peers, pool);
        let ended = Instant::now();
        let fault = when.try_recv().ok();
        if fault.is_none() {
            forget(pool);
        }
        fault.map(|fault| (found, ended.saturating_duration_since(fault)))
    })
}

/// Until all have come; then forget them.
pub(crate) fn fetch_all(peers: &Peers, pool: &Arc<Pool>) {
    until(|| (request(peers, pool).0 == BLOCKS as usize).then_some(()));
    assert_eq!(check(pool, namespace(pool), 0..BLOCKS), BLOCKS as usize);
    forget(pool);
}

pub(crate) fn forget(pool: &Arc<Pool>) {
    pool.reset(namespace(pool)).unwrap();
}

/// All slots have come back.
pub(crate) fn nothing_is_left(pool: &Arc<Pool>) {
    until(|| {
        pool.reap().unwrap();
        (reserved(pool, namespace(pool)) == 0 && quarantined(pool) == 0).then_some(())
    });
}

/// Slots in quarantine, of all namespaces.
pub(crate) fn quarantined(pool: &Pool) -> u64 {
    let report = pegaflow_engine::admin::inspect(pool.path()).unwrap();
    let counts = report.split("\"blocks_quarantined\":").skip(1);
    counts.map(|rest| rest.split(|byte: char| !byte.is_ascii_digit()).next().unwrap().parse::<u64>().unwrap()).sum()
}
