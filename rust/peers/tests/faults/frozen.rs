//! Servers that stand still in the middle of a read, and go on when nobody waits for them any more.

use std::sync::{Arc, mpsc};
use std::time::Instant;

use crate::common::{ShmDir, check, connect_by_tcp, namespace, store};
use crate::hosts::{BLOCKS, POOL_BYTES, Worker, fetch_all, forget, nothing_is_left, request_through, unused_address};
use crate::middleman::{Lane, Middleman};
use crate::numbers::Numbers;
use crate::report::{Tally, in_lanes};

const READ: Lane = Lane { data: true, answers: true };
/// Keys of blocks that nobody fetches.
const OTHERS: std::ops::Range<u64> = 1_000_000..1_001_500;

#[test]
fn a_server_that_stands_still_costs_a_bounded_wait_and_what_it_sends_later_harms_nobody() {
    let tally = Tally::new("server frozen in the middle of a read");
    in_lanes(8, |lane| {
        let dir = ShmDir::new("stop-server");
        let ours = dir.pool("ours", POOL_BYTES);
        let address = unused_address();
        let server = Arc::new(Worker::start("serve", &dir, &address));
        let middleman = Middleman::before(&address);
        let peers = connect_by_tcp(&ours, std::slice::from_ref(&middleman.address));
        let mut numbers = Numbers::new();
        for _ in lane {
            middleman.plan(|_| true);
            fetch_all(&peers, &ours);
            let threshold = 1 + numbers.below(middleman.passed(READ) - 1);
            let (tell, stopped) = mpsc::channel();
            let mut to_stop = Some(Arc::clone(&server));
            middleman.plan(move |piece| {
                let is_there = piece.lane == READ && piece.before + piece.bytes.len() as u64 >= threshold;
                if let Some(server) = to_stop.take_if(|_| is_there) {
                    server.signal("-STOP");
                    tell.send(Instant::now()).unwrap();
                }
                true
            });
            let (found, took) = request_through(&peers, &ours, &stopped);
            tally.add(found, BLOCKS, took);
            // The slots are somebody else's when it goes on.
            store(&ours, namespace(&ours), OTHERS);
            middleman.rest();
            server.signal("-CONT");
            check(&ours, namespace(&ours), 0..BLOCKS);
            assert_eq!(check(&ours, namespace(&ours), OTHERS), OTHERS.count());
            forget(&ours);
        }
        nothing_is_left(&ours);
    });
    tally.end();
}
