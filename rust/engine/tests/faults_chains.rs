//! A prefix never loses its head while its tail stays: whatever takes blocks away takes tails before heads, or tails
//! too.
#![allow(missing_docs)]

mod common;
mod kill;

use std::sync::Arc;

use common::ShmDir;
use kill::blocks::{MAIN, check_chain, keys, namespace, open, store_all, store_chain, wrong_block};
use kill::child::Worker;
use kill::settled::{assert_nothing_lost, assert_settled, stat};
use nix::sys::wait::WaitStatus;
use pegaflow_engine::{Namespace, Pool};

#[test]
fn an_extent_taken_from_a_namespace_takes_the_tails_of_its_blocks_with_it() {
    let dir = ShmDir::new("retire-chain");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    // The first extent is full of the chain's head; its tail shares the second with blocks that are used later.
    let chain = keys(0..90);
    while check_chain(&pool, ns, &chain) < 90 {
        store_chain(&pool, ns, &chain, 1);
    }
    store_all(&pool, ns, &keys(1000..1160), 1);
    store_all(&pool, namespace(&pool, MAIN + 1), &keys(0..1), 1);
    assert_eq!(stat(&pool.stats(), "extents_retired"), 1);
    let left = check_chain(&pool, ns, &chain);
    let present = pool.contains(ns, &chain).unwrap().iter().filter(|present| **present).count();
    assert_eq!(present, left, "what is not reached any more is not kept");
    assert_settled(&pool);
    assert_nothing_lost(&pool, &[ns]);
}

#[test]
fn a_block_sealed_right_before_its_publisher_died_does_not_lose_its_parent_to_an_eviction_begun_before() {
    let dir = ShmDir::new("sealed-child");
    let options = pegaflow_engine::OpenOptions {
        pool_bytes: Some(2 * kill::blocks::SEGMENT_BYTES),
        ..kill::blocks::options(&dir.0)
    };
    let creator = Pool::open(kill::blocks::POOL_NAME, &options).unwrap();
    let ns = namespace(&creator, MAIN);
    let chain = keys(kill::blocks::CONTESTED..kill::blocks::CONTESTED + 2);
    evict(&creator, ns, 1000, 63);
    store_all(&creator, ns, &chain[..1], 1);
    assert_eq!(stat(&creator.namespace_stats(ns).unwrap(), "slots_free"), 0);
    drop(creator);
    let pool = open(&dir.0);
    // Stopped when it has looked at the horizon and touched the parent, before the child has its stamp.
    let mut dying = Worker::start("hold", &dir.0, &["child-stopped-then-killed"]);
    assert!(matches!(dying.stopped_or_ended(), WaitStatus::Stopped(..)));
    // This lists every block, the parent last.
    evict(&pool, ns, 2000, 1);
    dying.signal(nix::sys::signal::Signal::SIGCONT);
    assert!(matches!(dying.end(), WaitStatus::Signaled(_, nix::sys::signal::Signal::SIGKILL, _)));
    assert_settled(&pool);
    assert_eq!(pool.contains(ns, &chain).unwrap(), [true, true], "a child in time");
    for number in 3000..3070 {
        evict(&pool, ns, number, 1);
        let present = pool.contains(ns, &chain).unwrap();
        assert!(present[0] || !present[1], "no head went before its tail");
    }
    assert_nothing_lost(&pool, &[ns]);
}

#[test]
fn touching_some_blocks_of_a_chain_touches_those_between() {
    let dir = ShmDir::new("touch-holes");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    let chain = keys(0..12);
    store_all(&pool, ns, &chain[..1], 1);
    store_chain(&pool, ns, &chain, 1);
    for some in [vec![0, 5, 11], vec![7], vec![1, 2, 9]] {
        let some: Vec<_> = some.into_iter().map(|index| chain[index]).collect();
        assert_eq!(pool.touch(ns, &some).unwrap(), some.len());
        assert_settled(&pool);
        let leased = pool.lease(ns, &some, some.len() - 1, some.len()).unwrap();
        pool.release(&leased).unwrap();
        assert_settled(&pool);
    }
    evict(&pool, ns, 1000, 250);
    let left = check_chain(&pool, ns, &chain);
    let present = pool.contains(ns, &chain).unwrap().iter().filter(|present| **present).count();
    assert_eq!(present, left, "no head went before its tail");
    assert_nothing_lost(&pool, &[ns]);
}

#[test]
fn a_block_touched_while_a_rebuild_takes_the_block_before_it_does_not_outlive_the_new_one() {
    let dir = ShmDir::new("rebuild-touch");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    let mut rebuilding = Worker::start("hold", &dir.0, &["rebuild-stopped"]);
    assert!(matches!(rebuilding.stopped_or_ended(), WaitStatus::Stopped(..)));
    // Whoever wants to evict finds every lock taken, and keeps its candidates: all blocks, in the order of their age.
    pool.reserve(ns, &keys(5000..5100), None, true).unwrap();
    rebuilding.signal(nix::sys::signal::Signal::SIGCONT);
    rebuilding.finish();
    let chain = keys(kill::blocks::CONTESTED..kill::blocks::CONTESTED + 2);
    assert_eq!(check_chain(&pool, ns, &chain), 2);
    drop(pool);
    assert_nothing_lost(&open(&dir.0), &[ns]);
}

/// Store `count` other blocks, so that as many have to go once the pool is full.
fn evict(pool: &Arc<Pool>, ns: Namespace, first: u64, count: u64) {
    for number in first..first + count {
        store_all(pool, ns, &keys(number..number + 1), number);
    }
}

#[test]
fn a_reset_leaves_the_order_of_what_is_stored_after_it_alone() {
    let dir = ShmDir::new("reset-order");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN + 1);
    // Stopped between raising the epoch and looking through the stamps.
    let mut resetting = Worker::start("point", &dir.0, &["reset.bumped", "stop"]);
    assert!(matches!(resetting.stopped_or_ended(), WaitStatus::Stopped(..)));
    let chain = keys(0..40);
    store_all(&pool, ns, &chain[..1], 1);
    store_chain(&pool, ns, &chain, 1);
    resetting.signal(nix::sys::signal::Signal::SIGCONT);
    resetting.finish();
    assert_settled(&pool);
    assert_eq!(check_chain(&pool, ns, &chain), 40);
    // New blocks fill what is free; then stale ones go, then the tail of the chain.
    evict(&pool, ns, 1000, 230);
    let left = check_chain(&pool, ns, &chain);
    let present = pool.contains(ns, &chain).unwrap().iter().filter(|present| **present).count();
    assert_eq!(present, left, "no head went before its tail");
    assert_nothing_lost(&pool, &[ns]);
}

#[test]
fn blocks_stored_again_while_the_index_is_gone_keep_their_children() {
    let dir = ShmDir::new("rebuild-again");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    let chain = keys(0..20);
    store_all(&pool, ns, &chain[..1], 1);
    store_chain(&pool, ns, &chain, 1);
    for round in 0..5 {
        let mut dying = Worker::start("point", &dir.0, &["rebuild.cleared", "kill"]);
        assert!(matches!(dying.end(), WaitStatus::Signaled(..)));
        // Until somebody rebuilds, nothing is found: the head of the chain is stored a second time.
        store_chain(&pool, ns, &chain[..10], 2 + round);
        pool.reap().unwrap();
        pool.rebuild_index().unwrap();
        assert_eq!(check_chain(&pool, ns, &chain), 20);
        assert_settled(&pool);
    }
    evict(&pool, ns, 1000, 250);
    assert_settled(&pool);
    let left = check_chain(&pool, ns, &chain);
    let present = pool.contains(ns, &chain).unwrap().iter().filter(|present| **present).count();
    assert_eq!(present, left, "no head went before its tail");
    assert_nothing_lost(&pool, &[ns]);
}

#[test]
fn an_evictor_that_dies_with_a_block_in_its_hands_loses_no_parent() {
    let dir = ShmDir::new("evictor-dies");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    let chain = keys(0..30);
    for (round, point) in ["evict.locked", "evict.claimed", "evict.unlinked", "evict.freeing"].iter().enumerate() {
        store_all(&pool, ns, &chain[..1], round as u64);
        store_chain(&pool, ns, &chain, round as u64);
        let length = check_chain(&pool, ns, &chain);
        let mut dying = Worker::start("point", &dir.0, &[point, "kill"]);
        assert!(matches!(dying.end(), WaitStatus::Signaled(..)), "{point}");
        // The dead one's candidate still is a candidate of ours.
        evict(&pool, ns, 1000 * (round as u64 + 1), 100);
        assert_settled(&pool);
        let left = check_chain(&pool, ns, &chain);
        assert!(left <= length);
        let present = pool.contains(ns, &chain).unwrap().iter().filter(|present| **present).count();
        assert_eq!(present, left, "no head went before its tail ({point})");
    }
    assert_nothing_lost(&pool, &[ns]);
}

#[test]
fn a_candidate_that_an_evictor_has_to_give_back_keeps_the_chain_before_it() {
    let dir = ShmDir::new("evictor-stopped");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    let chain = keys(0..2);
    store_all(&pool, ns, &chain[..1], 1);
    store_chain(&pool, ns, &chain, 1);
    let leased = pool.lease(ns, &chain, 1, 2).unwrap();
    assert_eq!(leased.len(), 1);
    // Everything else is younger, and there is no free slot.
    evict(&pool, ns, 1000, 254);
    assert_eq!(stat(&pool.namespace_stats(ns).unwrap(), "slots_free"), 0);
    // Stopped between marking the leased tail and looking at its leases.
    let mut evicting = Worker::start("hold", &dir.0, &["evict-stopped"]);
    assert!(matches!(evicting.stopped_or_ended(), WaitStatus::Stopped(..)));
    assert_eq!(wrong_block(&pool, leased[0], &chain[1]), None, "a leased block is readable all the time");
    evict(&pool, ns, 5000, 8);
    evicting.signal(nix::sys::signal::Signal::SIGCONT);
    evicting.finish();
    assert_eq!(pool.contains(ns, &chain).unwrap(), [true, true], "the tail is leased, so its head stays");
    pool.release(&leased).unwrap();
    assert_nothing_lost(&pool, &[ns]);
}

#[test]
fn a_block_that_got_a_child_before_its_evictor_died_stays_with_its_child() {
    let dir = ShmDir::new("child-in-time");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    let chain = keys(0..2);
    store_all(&pool, ns, &chain[..1], 1);
    evict(&pool, ns, 1000, 255);
    assert_eq!(stat(&pool.namespace_stats(ns).unwrap(), "slots_free"), 0);
    // Stopped with the oldest block chosen; once it goes on, it dies right after marking it.
    let mut evicting = Worker::start("hold", &dir.0, &["evict-stopped-then-killed"]);
    assert!(matches!(evicting.stopped_or_ended(), WaitStatus::Stopped(..)));
    assert_eq!(store_chain(&pool, ns, &chain, 2), 1, "a child in time");
    evicting.signal(nix::sys::signal::Signal::SIGCONT);
    assert!(matches!(evicting.end(), WaitStatus::Signaled(_, nix::sys::signal::Signal::SIGKILL, _)));
    assert_settled(&pool);
    assert_eq!(pool.contains(ns, &chain).unwrap(), [true, true]);
    assert_eq!(check_chain(&pool, ns, &chain), 2);
    assert_nothing_lost(&pool, &[ns]);
}
