//! Streams whose bytes are changed, lost, made up or cut off on the way, in either direction: those of calls and those
//! of blocks.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use crate::common::{ShmDir, check, connect_by_tcp, key, keys, namespace, serve_by_tcp, store, until};
use crate::hosts::{forget, nothing_is_left, unused_address};
use crate::middleman::{Lane, Middleman, Piece};
use crate::numbers::Numbers;
use crate::report::{Tally, in_lanes};

const WANTED: u64 = 100;

/// Spoil the stream from byte `at` on; whether it goes on.
fn spoil(piece: &mut Piece<'_>, at: u64, how: u64, numbers: &mut Numbers) -> bool {
    let Some(at) = at.checked_sub(piece.before).map(|at| at as usize).filter(|at| *at < piece.bytes.len()) else {
        return true;
    };
    let end = (at + 1 + numbers.below(60) as usize).min(piece.bytes.len());
    match how {
        0 => piece.bytes[at] ^= 1 << numbers.below(8),
        1 => drop(piece.bytes.drain(at..end)),
        2 => drop(piece.bytes.splice(at..at, (0..end - at).map(|_| numbers.next() as u8))),
        3 => piece.bytes[at..end].iter_mut().for_each(|byte| *byte = numbers.next() as u8),
        _ => piece.bytes.truncate(at),
    }
    how < 4
}

/// One stream spoiled per case, of a client of its own.
fn streams_spoiled(fault: &'static str, lane: Lane) {
    let tally = Tally::new(fault);
    in_lanes(4, |cases| {
        let dir = ShmDir::new("spoiled");
        let (theirs, ours) = (dir.pool("theirs", 4 << 20), dir.pool("ours", 4 << 20));
        store(&theirs, namespace(&theirs), 0..WANTED);
        let address = unused_address();
        let server = serve_by_tcp(&theirs, &address);
        until(|| server.facts().address);
        let middleman = Middleman::before(&address);
        let mut numbers = Numbers::new();
        // How many bytes pass in this lane if all is well.
        until(|| {
            middleman.plan(|_| true);
            let found = one_request(&ours, &middleman.address);
            forget(&ours);
            (found == WANTED as usize).then_some(())
        });
        let usual = middleman.passed(lane);
        for _ in cases {
            let (at, how, mut own) = (numbers.below(usual), numbers.below(5), Numbers::new());
            middleman.plan(move |piece| piece.lane != lane || spoil(piece, at, how, &mut own));
            let started = Instant::now();
            let found = one_request(&ours, &middleman.address);
            tally.add(found, WANTED, started.elapsed());
            check(&ours, namespace(&ours), 0..WANTED);
            forget(&ours);
            nothing_is_left(&ours);
            until(|| (server.facts().leases == 0 && server.facts().leased_bytes == 0).then_some(()));
        }
        // Who is sound is served as before.
        middleman.rest();
        until(|| (one_request(&ours, &address) == WANTED as usize).then_some(()));
    });
    tally.end();
}

/// Come, ask, fetch and go. How many blocks came.
fn one_request(ours: &std::sync::Arc<pegaflow_engine::Pool>, address: &str) -> usize {
    let peers = connect_by_tcp(ours, &[address.to_owned()]);
    until(|| (peers.facts()[0].state != "unknown").then_some(()));
    let question = || pegaflow_peers::Question { namespace: namespace(ours), keys: keys(0..WANTED), chained: true };
    let Some(query) = peers.find(vec![question()]).unwrap() else { return 0 };
    until(|| query.poll());
    let fetch = query.fetch(0, 0..WANTED as usize, None).unwrap();
    fetch.map_or(0, |fetch| until(|| fetch.poll()))
}

/// What a single changed bit can do to a call, done on purpose: it asks for another block that is there.
#[test]
fn a_call_that_names_another_block_on_its_way_brings_no_block_under_the_wrong_key() {
    let dir = ShmDir::new("renamed");
    let (theirs, ours) = (dir.pool("theirs", 4 << 20), dir.pool("ours", 4 << 20));
    store(&theirs, namespace(&theirs), 0..WANTED + 1);
    let address = unused_address();
    let server = serve_by_tcp(&theirs, &address);
    until(|| server.facts().address);
    let middleman = Middleman::before(&address);
    for meant in [0, WANTED / 2, WANTED - 1] {
        let changed = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&changed);
        middleman.plan(move |piece| {
            let (meant, other) = (key(meant).to_bytes(), key(WANTED).to_bytes());
            let at = piece.bytes.windows(meant.len()).position(|bytes| bytes == meant);
            if let Some(at) = at.filter(|_| !piece.lane.answers && !piece.lane.data) {
                piece.bytes[at..at + other.len()].copy_from_slice(&other);
                seen.fetch_add(1, Relaxed);
            }
            true
        });
        // In the question who has it, and in the one for a lease, which is not asked where the answer was late.
        until(|| {
            changed.store(0, Relaxed);
            one_request(&ours, &middleman.address);
            check(&ours, namespace(&ours), 0..WANTED);
            forget(&ours);
            (changed.load(Relaxed) >= 2).then_some(())
        });
        nothing_is_left(&ours);
    }
    middleman.rest();
    until(|| (one_request(&ours, &address) == WANTED as usize).then_some(()));
}

#[test]
fn garbage_in_calls_of_a_client_costs_a_miss() {
    streams_spoiled("garbage in the client's calls", Lane { data: false, answers: false });
}

#[test]
fn garbage_in_answers_to_calls_costs_a_miss() {
    streams_spoiled("garbage in the server's answers", Lane { data: false, answers: true });
}

#[test]
fn garbage_in_requests_for_blocks_costs_a_miss() {
    streams_spoiled("garbage in requests for blocks", Lane { data: true, answers: false });
}

#[test]
fn garbage_among_blocks_costs_a_miss() {
    streams_spoiled("garbage among blocks", Lane { data: true, answers: true });
}
