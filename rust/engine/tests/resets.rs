//! A reset is one step for all processes and all groups of a model, whatever they are doing.
#![allow(missing_docs)]

mod common;
mod kill;

use common::ShmDir;
use kill::blocks::{MAIN, PART_BYTES, check_chain, key, keys, namespace, open, store_all, store_chain};
use kill::child::Worker;
use kill::settled::{assert_nothing_lost, assert_settled, stat};

/// Number of the first key of what `hold` stores.
const HELD: u64 = 1 << 40;

#[test]
fn a_save_that_was_under_way_in_another_process_never_appears() {
    let dir = ShmDir::new("reset-save");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    let mut saver = Worker::start("hold", &dir.0, &["late-save"]);
    saver.expect("holding");
    assert_eq!(check_chain(&pool, ns, &keys(HELD..HELD + 1)), 1);
    pool.reset(ns).unwrap();
    saver.tell("go on");
    saver.expect("0");
    assert_eq!(pool.contains(ns, &keys(HELD..HELD + 104)).unwrap(), vec![false; 104]);
    assert_eq!(stat(&pool.namespace_stats(ns).unwrap(), "blocks_reserved"), 0, "and its slots are free");
    saver.finish();
    assert_nothing_lost(&pool, &[ns]);
}

#[test]
fn without_a_reset_the_same_save_appears() {
    let dir = ShmDir::new("no-reset-save");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    let mut saver = Worker::start("hold", &dir.0, &["late-save"]);
    saver.expect("holding");
    saver.tell("go on");
    saver.expect("4");
    assert_eq!(check_chain(&pool, ns, &keys(HELD + 100..HELD + 104)), 4);
    saver.finish();
}

#[test]
fn what_another_process_is_loading_keeps_its_bytes_until_it_is_released() {
    let dir = ShmDir::new("reset-load");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    let mut loader = Worker::start("hold", &dir.0, &["lease"]);
    loader.expect("holding");
    let chain = keys(HELD..HELD + 4);
    pool.reset(ns).unwrap();
    assert_eq!(pool.contains(ns, &chain).unwrap(), vec![false; 4]);
    // The same keys with other bytes, and enough to need every slot that is to be had.
    store_all(&pool, ns, &keys(0..600), 2);
    store_chain(&pool, ns, &chain[..1], 2);
    store_chain(&pool, ns, &chain, 2);
    assert!(stat(&pool.stats(), "blocks_evicted") > 0);
    // It compares every byte with what it has stored, and fails if one is another.
    loader.finish();
    assert_settled(&pool);
    assert_nothing_lost(&pool, &[ns]);
}

#[test]
fn all_groups_of_a_model_have_one_epoch_and_no_other_model_has_it() {
    let dir = ShmDir::new("reset-groups");
    let pool = open(&dir.0);
    let group = |byte, group| pool.namespace(&[byte; 32], group, &PART_BYTES, "groups").unwrap();
    let (first, second, other) = (group(1, 0), group(1, 1), group(2, 0));
    for ns in [first, second, other] {
        store_all(&pool, ns, &keys(0..4), 1);
    }
    assert_eq!(pool.reset(second).unwrap(), 2);
    for ns in [first, second] {
        assert_eq!(pool.lookup(ns, &keys(0..4), 0).unwrap(), 0);
    }
    assert_eq!(pool.lookup(other, &keys(0..4), 0).unwrap(), 4);
    // A group that comes later has had the same resets.
    let third = group(1, 2);
    assert_eq!(pool.reset(third).unwrap(), 3);
    store_all(&pool, third, &[key(1)], 1);
    assert_eq!(pool.reset(first).unwrap(), 4);
    assert_eq!(pool.lookup(third, &[key(1)], 0).unwrap(), 0);
    assert_nothing_lost(&pool, &[first]);
}

#[test]
fn blocks_of_before_a_reset_are_on_nobodys_account() {
    let dir = ShmDir::new("reset-account");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    store_all(&pool, ns, &keys(0..10), 1);
    assert_eq!(stat(&pool.stats(), "share_used_bytes"), 10 * PART_BYTES.iter().sum::<u64>());
    pool.reset(ns).unwrap();
    assert_eq!(stat(&pool.stats(), "share_used_bytes"), 0);
}
