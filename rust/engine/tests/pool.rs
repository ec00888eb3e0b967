//! What a pool does for one process: store, find, lease, evict, reset.
#![allow(missing_docs)]

mod common;

use common::{ShmDir, bytes, key, keys, namespace, reserve, store};
use pegaflow_engine::{ErrorKind, Key, OpenOptions, Pool};

const MIB: u64 = 1 << 20;

#[test]
fn bytes_that_come_back_equal_bytes_that_went_in() {
    let dir = ShmDir::new("roundtrip");
    let pool = Pool::open("p", &dir.options(8 * MIB, MIB)).unwrap();
    let ns = namespace(&pool, &[4096, 8192]);
    assert_eq!(pool.lookup(ns, &keys(0..10), 0).unwrap(), 0);
    assert_eq!(store(&pool, ns, 0..10), 10);
    assert_eq!(pool.lookup(ns, &keys(0..20), 0).unwrap(), 10);
    assert_eq!(pool.lookup(ns, &keys(0..20), 4).unwrap(), 6);
    let leased = pool.lease(ns, &keys(0..20), 3, 20).unwrap();
    assert_eq!(leased.len(), 7);
    for (position, block) in leased.iter().enumerate() {
        assert_eq!(bytes(&pool, *block, 0), vec![position as u8 + 3; 4096]);
        assert_eq!(bytes(&pool, *block, 1), vec![(position as u8 + 3) ^ 1; 8192]);
    }
    pool.release(&leased).unwrap();
    assert_eq!(pool.release(&leased[..1]).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn an_unpublished_block_is_invisible_and_an_incomplete_one_stays_so() {
    let dir = ShmDir::new("invisible");
    let pool = Pool::open("p", &dir.options(4 * MIB, MIB)).unwrap();
    let ns = namespace(&pool, &[4096, 4096]);
    let reserved = reserve(&pool, ns, &keys(0..2));
    let blocks: Vec<_> = reserved.iter().map(|(_, block)| *block).collect();
    assert_eq!(pool.lookup(ns, &keys(0..2), 0).unwrap(), 0);
    assert_eq!(pool.mark_written(0, &blocks, None).unwrap(), 2);
    assert_eq!(pool.publish(&blocks).unwrap(), 0, "part 1 was never written");
    assert_eq!(pool.lookup(ns, &keys(0..2), 0).unwrap(), 0);
    let stats = pool.namespace_stats(ns).unwrap();
    assert!(stats.contains(&("blocks_reserved", 0)), "{stats:?}");
}

#[test]
fn a_full_pool_evicts_tails_before_their_heads() {
    let dir = ShmDir::new("evict");
    let pool = Pool::open("p", &dir.options(MIB, MIB)).unwrap();
    let ns = namespace(&pool, &[16384]);
    assert_eq!(store(&pool, ns, 0..64), 64);
    assert_eq!(store(&pool, ns, 1000..1010), 10);
    let left = pool.lookup(ns, &keys(0..64), 0).unwrap();
    assert_eq!(left, 54, "the ten oldest are the tail of the older chain");
    let present = pool.contains(ns, &keys(0..64)).unwrap();
    assert_eq!(present.iter().filter(|present| **present).count(), left, "no hole");
    assert_eq!(pool.lookup(ns, &keys(1000..1010), 0).unwrap(), 10);
}

#[test]
fn leased_blocks_are_never_evicted() {
    let dir = ShmDir::new("leased");
    let pool = Pool::open("p", &dir.options(MIB, MIB)).unwrap();
    let ns = namespace(&pool, &[16384]);
    store(&pool, ns, 0..64);
    let leased = pool.lease(ns, &keys(0..64), 0, 64).unwrap();
    assert_eq!(leased.len(), 64);
    assert!(pool.reserve(ns, &keys(100..110), None, true).unwrap().is_empty());
    assert_eq!(bytes(&pool, leased[63], 0), vec![63; 16384]);
    pool.release(&leased).unwrap();
    assert_eq!(pool.reserve(ns, &keys(100..110), None, true).unwrap().len(), 10);
}

#[test]
fn a_key_is_stored_once() {
    let dir = ShmDir::new("once");
    let pool = Pool::open("p", &dir.options(4 * MIB, MIB)).unwrap();
    let ns = namespace(&pool, &[4096]);
    let first = reserve(&pool, ns, &keys(0..1));
    let second = reserve(&pool, ns, &keys(0..1));
    for reserved in [&first, &second] {
        pool.mark_written(0, &[reserved[0].1], None).unwrap();
    }
    assert_eq!(pool.publish(&[first[0].1]).unwrap(), 1);
    assert_eq!(pool.publish(&[second[0].1]).unwrap(), 0);
    assert!(pool.reserve(ns, &keys(0..1), None, true).unwrap().is_empty());
}

#[test]
fn a_block_without_the_one_before_it_is_not_kept() {
    let dir = ShmDir::new("orphan");
    let pool = Pool::open("p", &dir.options(4 * MIB, MIB)).unwrap();
    let ns = namespace(&pool, &[4096]);
    store(&pool, ns, 0..3);
    let reserved = pool.reserve(ns, &[key(50)], Some(&[Some(key(49))]), true).unwrap();
    pool.mark_written(0, &[reserved[0].1], None).unwrap();
    assert_eq!(pool.publish(&[reserved[0].1]).unwrap(), 0);
    let reserved = pool.reserve(ns, &[key(3)], Some(&[Some(key(2))]), true).unwrap();
    pool.mark_written(0, &[reserved[0].1], None).unwrap();
    assert_eq!(pool.publish(&[reserved[0].1]).unwrap(), 1);
    assert_eq!(pool.lookup(ns, &keys(0..4), 0).unwrap(), 4);
}

#[test]
fn a_reset_hides_everything_and_what_was_reserved_before_never_appears() {
    let dir = ShmDir::new("reset");
    let pool = Pool::open("p", &dir.options(4 * MIB, MIB)).unwrap();
    let ns = namespace(&pool, &[4096]);
    store(&pool, ns, 0..5);
    let reserved = reserve(&pool, ns, &keys(5..6));
    pool.mark_written(0, &[reserved[0].1], None).unwrap();
    pool.reset(ns).unwrap();
    assert_eq!(pool.contains(ns, &keys(0..6)).unwrap(), vec![false; 6]);
    assert_eq!(pool.publish(&[reserved[0].1]).unwrap(), 0);
    assert_eq!(store(&pool, ns, 0..5), 5);
    assert_eq!(pool.lookup(ns, &keys(0..6), 0).unwrap(), 5);
}

#[test]
fn namespaces_never_exchange_blocks() {
    let dir = ShmDir::new("namespaces");
    let pool = Pool::open("p", &dir.options(8 * MIB, MIB)).unwrap();
    let ns = namespace(&pool, &[4096]);
    store(&pool, ns, 0..5);
    for (fingerprint, group) in [([8; 32], 0), ([9; 32], 1)] {
        let other = pool.namespace(&fingerprint, group, &[4096], "other").unwrap();
        assert_eq!(pool.contains(other, &keys(0..5)).unwrap(), vec![false; 5]);
    }
    assert_eq!(pool.namespace(&[9; 32], 0, &[8192], "t").unwrap_err().kind(), ErrorKind::Refused);
    assert_eq!(pool.namespace(&[9; 32], 2, &[2 * MIB], "t").unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_rebuilt_index_finds_every_block() {
    let dir = ShmDir::new("rebuild");
    let pool = Pool::open("p", &dir.options(8 * MIB, MIB)).unwrap();
    let ns = namespace(&pool, &[4096]);
    for start in (0..1000).step_by(50) {
        store(&pool, ns, start..start + 50);
    }
    assert_eq!(pool.rebuild_index().unwrap(), 1000);
    assert_eq!(pool.lookup(ns, &keys(0..1000), 0).unwrap(), 1000);
}

#[test]
fn a_pool_keeps_its_blocks_when_everybody_leaves() {
    let dir = ShmDir::new("restart");
    {
        let pool = Pool::open("p", &dir.options(8 * MIB, MIB)).unwrap();
        assert!(pool.created());
        let ns = namespace(&pool, &[4096]);
        store(&pool, ns, 0..100);
    }
    let options = OpenOptions { create: false, ..dir.options(64 * MIB, MIB) };
    let pool = Pool::open("p", &options).unwrap();
    assert!(!pool.created());
    assert_eq!(pool.pool_bytes(), 8 * MIB, "an existing pool keeps its geometry");
    let ns = namespace(&pool, &[4096]);
    let leased = pool.lease(ns, &keys(0..100), 0, 100).unwrap();
    assert_eq!(leased.len(), 100);
    assert_eq!(bytes(&pool, leased[42], 0), vec![42; 4096]);
    pool.release(&leased).unwrap();
}

#[test]
fn a_starving_namespace_gets_the_coldest_extent_of_another() {
    let dir = ShmDir::new("starving");
    let pool = Pool::open("p", &dir.options(MIB, 256 << 10)).unwrap();
    let ns = namespace(&pool, &[4096]);
    for start in (0..256).step_by(16) {
        store(&pool, ns, start..start + 16);
    }
    let other = pool.namespace(&[1; 32], 0, &[8192], "other").unwrap();
    let reserved = reserve(&pool, other, &keys(0..4));
    assert_eq!(reserved.len(), 4);
    assert!(pool.lookup(ns, &keys(192..256), 0).unwrap() > 0, "only one segment was taken");
}

#[test]
fn bad_keys_and_names_are_refused() {
    assert!(Key::new(&[]).is_err());
    assert!(Key::new(&[0; 33]).is_err());
    let dir = ShmDir::new("names");
    assert_eq!(Pool::open("a/b", &dir.options(MIB, MIB)).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let absent = OpenOptions { create: false, ..dir.options(MIB, MIB) };
    assert_eq!(Pool::open("absent", &absent).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_block_leased_by_itself_does_not_outlive_the_blocks_before_it() {
    let dir = ShmDir::new("middle");
    let pool = Pool::open("p", &dir.options(MIB, MIB)).unwrap();
    let ns = namespace(&pool, &[16384]);
    store(&pool, ns, 0..32);
    store(&pool, ns, 100..132);
    for _ in 0..3 {
        let leased = pool.lease(ns, &[key(20)], 0, 1).unwrap();
        pool.release(&leased).unwrap();
    }
    assert_eq!(store(&pool, ns, 1000..1043), 43);
    assert_eq!(pool.lookup(ns, &keys(0..32), 0).unwrap(), 21, "the leased block and all before it, nothing behind it");
}

#[test]
fn of_large_extents_there_is_always_one_to_spare() {
    let dir = ShmDir::new("spare");
    let pool = Pool::open("p", &dir.options(768 * MIB, 256 * MIB)).unwrap();
    let ns = namespace(&pool, &[MIB]);
    assert!(!reserve(&pool, ns, &keys(0..20)).is_empty());
    let segments = || pool.stats().into_iter().find(|(name, _)| *name == "segments_created").unwrap().1;
    let started = std::time::Instant::now();
    while segments() < 2 {
        assert!(started.elapsed().as_secs() < 120, "no second extent, though most of the first is free");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn nodes_are_given_for_every_part_or_not_at_all() {
    let dir = ShmDir::new("nodes");
    let pool = Pool::open("p", &dir.options(4 * MIB, MIB)).unwrap();
    let ns = namespace(&pool, &[4096, 4096]);
    assert_eq!(pool.set_nodes(ns, vec![None]).unwrap_err().kind(), ErrorKind::InvalidArgument);
    // Nodes that are not there cost a line in the log.
    pool.set_nodes(ns, vec![Some(0), Some(900)]).unwrap();
    assert_eq!(store(&pool, ns, 0..10), 10);
}
