//! Fetching by a transport that fails in every way, and slots that something may still write.

use std::time::Instant;

use crate::common::net::{Fault, Net};
use crate::common::{ShmDir, check, connect, fetch, fetch_whole, keys, namespace, reserved, serve, store, until};
use crate::hosts::{Worker, nothing_is_left};
use crate::report::{Tally, cases, in_lanes};

const WANTED: u64 = 20;
const POOL_BYTES: u64 = 4 << 20;

fn fails(fault: Fault, name: &'static str) {
    let tally = Tally::new(name);
    in_lanes(4, |lane| {
        let (dir, net) = (ShmDir::new("transport"), Net::default());
        let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
        store(&theirs, namespace(&theirs), 0..WANTED);
        let (server, address) = serve(&theirs, &net);
        for _ in lane {
            net.set_fault(fault);
            let peers = connect(&ours, &net, std::slice::from_ref(&address));
            let started = Instant::now();
            let found = fetch(&peers, namespace(&ours), &keys(0..WANTED)).1;
            tally.add(found, WANTED, started.elapsed());
            assert_eq!(found, if fault == Fault::Slow { WANTED as usize } else { 0 }, "{fault:?}");
            assert_eq!(check(&ours, namespace(&ours), 0..WANTED), found);
            until(|| (reserved(&ours, namespace(&ours)) == 0).then_some(()));
            until(|| (server.facts().leases == 0 && server.facts().leased_bytes == 0).then_some(()));
            net.set_fault(Fault::None);
            let peers = connect(&ours, &net, std::slice::from_ref(&address));
            fetch_whole(&peers, namespace(&ours), &keys(0..WANTED));
            ours.reset(namespace(&ours)).unwrap();
        }
        nothing_is_left(&ours);
    });
    tally.end();
}

#[test]
fn a_transport_that_is_late_is_waited_for() {
    fails(Fault::Slow, "transport: delays");
}

#[test]
fn a_transport_that_breaks_in_the_middle_of_a_part_costs_a_miss() {
    fails(Fault::Short, "transport: short reads");
}

#[test]
fn a_transport_that_brings_other_bytes_costs_a_miss() {
    fails(Fault::WrongByte, "transport: wrong bytes");
}

#[test]
fn a_transport_that_disconnects_costs_a_miss() {
    fails(Fault::Breaks, "transport: disconnects");
}

#[test]
fn a_transport_that_never_answers_costs_a_miss() {
    fails(Fault::Never, "transport: never answers");
}

#[test]
fn a_transport_that_loses_count_costs_a_miss() {
    fails(Fault::LosesCount, "transport: answers for fewer parts");
}

/// Processes whose devices write on and on after a read was given up: nobody else gets the slots until they are dead
/// and a while has passed, and then all come back.
#[test]
fn slots_that_are_still_written_belong_to_nobody_until_the_writer_is_dead() {
    const AT_ONCE: u64 = 10;
    let dir = ShmDir::new("late");
    let ours = dir.pool("ours", POOL_BYTES);
    let ns = namespace(&ours);
    let tally = Tally::new("transport: completes after the deadline");
    let (first, folder) = (1_000_000, dir.0.to_str().unwrap());
    for wave in (0..cases()).step_by(AT_ONCE as usize) {
        let writers: Vec<Worker> = (wave..cases().min(wave + AT_ONCE))
            .map(|case| {
                let started = Instant::now();
                let key = (case * WANTED).to_string();
                let writer = Worker::start_with(&[], &["late", folder, &key, &WANTED.to_string()]);
                tally.add(0, WANTED, started.elapsed());
                writer
            })
            .collect();
        let given_up = writers.len() as u64 * WANTED;
        assert_eq!(crate::hosts::quarantined(&ours), given_up);
        // More than there is room for: every slot that can be had is used.
        let blocks = 2 * POOL_BYTES / crate::common::BLOCK_BYTES;
        for number in (first..first + blocks).step_by(100) {
            store(&ours, ns, number..number + 100);
        }
        assert!(check(&ours, ns, first..first + blocks + 100) > 0);
        assert_eq!(crate::hosts::quarantined(&ours), given_up, "as long as they live");
        drop(writers);
        nothing_is_left(&ours);
        assert!(check(&ours, ns, first..first + blocks + 100) > 0);
        ours.reset(ns).unwrap();
    }
    // All of the pool can be filled again: a block takes two pages.
    let slots = POOL_BYTES / 8192;
    assert_eq!(store(&ours, ns, first..first + slots), slots as usize);
    assert_eq!(check(&ours, ns, first..first + slots), slots as usize);
    tally.end();
}
