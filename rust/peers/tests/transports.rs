//! What every transport has to do, over each that this machine has.
#![allow(missing_docs)]

mod parts;

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

use parts::rig::{after, over_each, soon, stay_as_they_are, until, usual};
use pegaflow_peers::transport::{PartRead, Ticket};

#[test]
fn parts_of_all_sizes_arrive_as_they_are() {
    over_each(usual(), |rig| {
        let (_, reads) = rig.blocks(6);
        let mut channel = rig.open();
        // Twice: a channel is used again.
        for _ in 0..2 {
            let outcome = channel.read(&reads, soon());
            assert!(outcome.quiet && outcome.broken.is_none(), "{:?}", outcome.broken);
            assert_eq!(rig.check(0, &reads, &outcome), reads.len());
        }
    });
}

#[test]
fn thousands_of_small_parts_arrive_in_one_read() {
    over_each(&[1, 2, 3, 64, 300, 5], |rig| {
        let (_, reads) = rig.blocks(400);
        let outcome = rig.open().read(&reads, soon());
        assert!(outcome.quiet && outcome.broken.is_none(), "{:?}", outcome.broken);
        assert_eq!(rig.check(0, &reads, &outcome), reads.len());
    });
}

#[test]
fn reading_nothing_is_nothing() {
    over_each(usual(), |rig| {
        let outcome = rig.open().read(&[], soon());
        assert!(outcome.quiet && outcome.broken.is_none() && outcome.arrived.is_empty());
    });
}

#[test]
fn two_channels_to_one_peer_do_not_mix() {
    over_each(usual(), |rig| {
        let (_, reads) = rig.blocks(8);
        let (first, second) = reads.split_at(reads.len() / 2);
        std::thread::scope(|scope| {
            for half in [first, second] {
                scope.spawn(move || {
                    let mut channel = rig.open();
                    for _ in 0..3 {
                        let outcome = channel.read(half, soon());
                        assert_eq!(rig.check(0, half, &outcome), half.len());
                    }
                });
            }
        });
    });
}

#[test]
fn a_slot_that_is_not_reserved_is_left_alone() {
    over_each(usual(), |rig| {
        let (_, reads) = rig.blocks(3);
        let gone = reads[0].target;
        rig.client.pool.abort(&[gone]).unwrap();
        let outcome = rig.open().read(&reads, soon());
        assert!(outcome.quiet && outcome.broken.is_none(), "{:?}", outcome.broken);
        for (read, arrived) in reads.iter().zip(&outcome.arrived) {
            assert_eq!(arrived.is_some(), read.target != gone);
        }
    });
}

#[test]
fn a_part_of_another_length_does_not_arrive() {
    over_each(usual(), |rig| {
        let (_, mut reads) = rig.blocks(2);
        reads[1].bytes += 1;
        let outcome = rig.open().read(&reads, soon());
        assert!(outcome.quiet && outcome.arrived[1].is_none());
        assert!(outcome.arrived[0].is_some());
    });
}

#[test]
fn a_refused_lease_leaves_the_channel_usable() {
    over_each(usual(), |rig| {
        let (ticket, reads) = rig.blocks(2);
        let mut channel = rig.open();
        let wrong = [Ticket { lease: ticket.lease + 999, ..ticket }, Ticket { secret: [0; 16], ..ticket }];
        for wrong in wrong.into_iter().filter(|_| rig.asks_leases) {
            let refused: Vec<PartRead> = reads.iter().map(|read| PartRead { ticket: wrong, ..*read }).collect();
            let outcome = channel.read(&refused, soon());
            assert!(outcome.quiet && outcome.broken.is_none(), "{:?}", outcome.broken);
            assert!(outcome.arrived.iter().all(Option::is_none));
        }
        // Good and bad ones in one read.
        let mut mixed = reads.clone();
        if rig.asks_leases {
            mixed[1].ticket = wrong[0];
        }
        let outcome = channel.read(&mixed, soon());
        assert!(outcome.broken.is_none(), "{:?}", outcome.broken);
        assert_eq!(rig.check(0, &mixed, &outcome), mixed.len() - usize::from(rig.asks_leases));
    });
}

#[test]
fn a_peer_that_goes_away_ends_the_read_and_the_slots_are_ours() {
    over_each(usual(), |rig| {
        let (_, reads) = rig.blocks(8);
        let mut channel = rig.open();
        assert_eq!(rig.check(0, &reads, &channel.read(&reads, soon())), reads.len());
        let outcome = std::thread::scope(|scope| {
            let gone = scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                rig.stop_server();
            });
            // Again and again until it fails: the server goes somewhere in the middle.
            let outcome = loop {
                let outcome = channel.read(&reads, after(10_000));
                if outcome.broken.is_some() {
                    break outcome;
                }
            };
            gone.join().unwrap();
            outcome
        });
        assert!(outcome.quiet);
        rig.check(0, &reads, &outcome);
        stay_as_they_are(&rig.client, &reads);
        let again = channel.read(&reads, after(500));
        assert!(again.quiet && again.arrived.iter().all(Option::is_none), "a broken channel reads nothing");
    });
}

#[test]
fn a_deadline_that_has_passed_ends_the_read_and_the_slots_are_ours() {
    over_each(usual(), |rig| {
        let (_, reads) = rig.blocks(8);
        for milliseconds in [0, 1, 3, 10] {
            let mut channel = rig.open();
            let outcome = channel.read(&reads, after(milliseconds));
            assert!(outcome.quiet);
            rig.check(0, &reads, &outcome);
            assert!(outcome.broken.is_some() || outcome.arrived.iter().all(Option::is_some));
            stay_as_they_are(&rig.client, &reads);
        }
    });
}

#[test]
fn a_lease_that_ends_stops_the_sender() {
    over_each(&[3_000_000], |rig| {
        let (ticket, reads) = rig.blocks(8);
        let (mut channel, is_over) = (rig.open(), AtomicBool::new(false));
        let outcome = std::thread::scope(|scope| {
            let (leases, asks, is_over) = (&rig.leases, rig.asks_leases, &is_over);
            let ender = scope.spawn(move || {
                // All may have come before this thread has a look.
                until("sending begins", || leases.sending() > 0 || !asks || is_over.load(Acquire));
                leases.end(ticket.lease);
            });
            let outcome = channel.read(&reads, soon());
            is_over.store(true, Release);
            ender.join().unwrap();
            outcome
        });
        assert!(outcome.quiet);
        let outcome = rig.asked_again(&reads, outcome);
        rig.check(0, &reads, &outcome);
        until("the sender lets go", || rig.leases.sending() == 0);
        stay_as_they_are(&rig.client, &reads);
    });
}
