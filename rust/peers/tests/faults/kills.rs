//! Processes that are killed before, during and after reads.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::common::{BLOCK_BYTES, ShmDir, check, connect_by_tcp, namespace, serve_by_tcp, store, until};
use crate::hosts::{BLOCKS, POOL_BYTES, Worker, fetch_all, forget, nothing_is_left, request_through, unused_address};
use crate::middleman::{Lane, Middleman};
use crate::numbers::Numbers;
use crate::report::{Tally, cases, in_lanes};

/// Bytes of blocks, from the server.
const READ: Lane = Lane { data: true, answers: true };

/// Kill a server once so much of a read has passed; `all`: how much that is in all.
fn servers_killed(fault: &'static str, at: impl Fn(&mut Numbers, u64) -> u64 + Sync) {
    let tally = Tally::new(fault);
    in_lanes(4, |lane| {
        let dir = ShmDir::new("kill-server");
        let ours = dir.pool("ours", POOL_BYTES);
        let address = unused_address();
        let middleman = Middleman::before(&address);
        let peers = connect_by_tcp(&ours, std::slice::from_ref(&middleman.address));
        let mut numbers = Numbers::new();
        for _ in lane {
            let server = Worker::start("serve", &dir, &address);
            middleman.plan(|_| true);
            fetch_all(&peers, &ours);
            let threshold = at(&mut numbers, middleman.passed(READ));
            let killed = kill_at(&middleman, server, threshold);
            let (found, took) = request_through(&peers, &ours, &killed);
            tally.add(found, BLOCKS, took);
            middleman.rest();
            check(&ours, namespace(&ours), 0..BLOCKS);
            forget(&ours);
        }
        nothing_is_left(&ours);
    });
    tally.end();
}

/// Kill it when so many bytes of blocks have come: when that was.
fn kill_at(middleman: &Middleman, process: Worker, threshold: u64) -> mpsc::Receiver<Instant> {
    let (tell, killed) = mpsc::channel();
    let mut process = Some(process);
    let mut look = move |passed: u64| {
        if passed >= threshold && process.take().is_some() {
            tell.send(Instant::now()).unwrap();
        }
    };
    look(0);
    middleman.plan(move |piece| {
        if piece.lane == READ {
            look(piece.before + piece.bytes.len() as u64);
        }
        true
    });
    killed
}

#[test]
fn a_server_that_is_killed_before_a_read_costs_a_miss_and_its_successor_is_found() {
    servers_killed("server killed before a read", |_, _| 0);
}

#[test]
fn a_server_that_is_killed_in_the_middle_of_a_read_costs_a_miss() {
    servers_killed("server killed in the middle of a read", |numbers, all| 1 + numbers.below(all - 1));
}

#[test]
fn a_server_that_is_killed_behind_the_last_byte_of_a_read_costs_a_miss() {
    servers_killed("server killed after a read", |_, all| all);
}

#[test]
fn a_client_that_is_killed_leaves_neither_leases_nor_slots() {
    let dir = ShmDir::new("kill-client");
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    store(&theirs, namespace(&theirs), 0..BLOCKS);
    let address = unused_address();
    let server = serve_by_tcp(&theirs, &address);
    until(|| server.facts().address);
    let (tally, mut numbers) = (Tally::new("client killed in the middle of a read"), Numbers::new());
    for _ in 0..cases() {
        let middleman = Middleman::before(&address);
        let client = Worker::start("fetch", &dir, &middleman.address);
        let killed = kill_at(&middleman, client, 1 + numbers.below(BLOCKS * BLOCK_BYTES));
        let killed = killed.recv_timeout(Duration::from_secs(120)).unwrap();
        until(|| {
            let facts = server.facts();
            (facts.leased_bytes == 0 && facts.leases == 0 && facts.sessions == 0).then_some(())
        });
        nothing_is_left(&ours);
        tally.add(0, BLOCKS, killed.elapsed());
        check(&ours, namespace(&ours), 0..BLOCKS);
        forget(&ours);
    }
    tally.end();
}

#[test]
fn another_process_of_the_pool_serves_when_the_first_is_killed() {
    let dir = ShmDir::new("successor");
    let ours = dir.pool("ours", POOL_BYTES);
    let address = unused_address();
    let first = Worker::start("serve", &dir, &address);
    let theirs = dir.pool("theirs", POOL_BYTES);
    let second = serve_by_tcp(&theirs, &address);
    let peers = connect_by_tcp(&ours, std::slice::from_ref(&address));
    fetch_all(&peers, &ours);
    assert_eq!(second.facts().address, None);
    assert_eq!(second.facts().problem, None, "that another one serves is none");
    drop(first);
    until(|| second.facts().address);
    fetch_all(&peers, &ours);
    nothing_is_left(&ours);
}
