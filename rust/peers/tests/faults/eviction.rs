//! Pools that evict what somebody is about to read.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::{ShmDir, check, connect_by_tcp, fetch, keys, namespace, reserved, serve_by_tcp, store, until};
use crate::hosts::{nothing_is_left, unused_address};
use crate::numbers::Numbers;
use crate::report::{Tally, cases};

const WANTED: u64 = 40;
/// Of the pool that evicts; a block takes two pages.
const SLOTS: u64 = 256;

#[test]
fn a_pool_that_evicts_under_the_reader_gives_right_bytes_or_none() {
    let dir = ShmDir::new("evicting");
    let (theirs, ours) = (dir.pool("theirs", SLOTS * 8192), dir.pool("ours", 4 << 20));
    let (there, here) = (namespace(&theirs), namespace(&ours));
    let address = unused_address();
    let server = serve_by_tcp(&theirs, &address);
    until(|| server.facts().address);
    let peers = connect_by_tcp(&ours, std::slice::from_ref(&address));
    until(|| (peers.facts()[0].state == "up").then_some(()));
    let tally = Tally::new("pool evicting under the reader");
    let (done, stored) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut numbers = Numbers::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut next = 1_000;
            while !done.load(Ordering::Acquire) {
                store(&theirs, there, next..next + 10);
                next += 10;
                stored.fetch_add(10, Ordering::AcqRel);
                // All slots change hands while a few questions are asked.
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        for case in 0..cases() {
            let wanted = 1_000_000 + case * 1000..1_000_000 + case * 1000 + WANTED;
            store(&theirs, there, wanted.clone());
            // About when they go.
            let until_then = stored.load(Ordering::Acquire) + numbers.below(SLOTS * 3 / 2);
            until(|| (stored.load(Ordering::Acquire) >= until_then).then_some(()));
            let started = Instant::now();
            let (_fetch, found) = fetch(&peers, here, &keys(wanted.clone()));
            tally.add(found, WANTED, started.elapsed());
            assert!(check(&ours, here, wanted) >= found);
        }
        done.store(true, Ordering::Release);
    });
    until(|| (server.facts().leased_bytes == 0).then_some(()));
    assert_eq!(reserved(&theirs, there), 0);
    nothing_is_left(&ours);
    tally.end();
}
