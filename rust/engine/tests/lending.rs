//! Blocks that are lent to peers: held like leased ones, and nothing else is noted of it.
#![allow(missing_docs, reason = "tests")]

mod common;

use common::{ShmDir, key, keys, namespace, store};
use pegaflow_engine::checksum::part_checksum;
use pegaflow_engine::{OpenOptions, Pool};

#[test]
fn a_namespace_is_found_by_its_whole_name_only() {
    let dir = ShmDir::new("lend-name");
    let pool = Pool::open("p", &dir.options(1 << 20, 256 << 10)).unwrap();
    let ns = namespace(&pool, &[4096, 512]);
    assert_eq!(pool.find_namespace(&[9; 32], 0, &[4096, 512]).unwrap(), Some(ns));
    assert_eq!(pool.namespace_name(ns).unwrap(), ([9; 32], 0));
    assert_eq!(pool.find_namespace(&[9; 32], 1, &[4096, 512]).unwrap(), None, "another group");
    assert_eq!(pool.find_namespace(&[8; 32], 0, &[4096, 512]).unwrap(), None, "another fingerprint");
    assert_eq!(pool.find_namespace(&[9; 32], 0, &[4096, 576]).unwrap(), None, "other sizes");
}

#[test]
fn lent_blocks_have_the_bytes_and_places_of_their_parts() {
    let dir = ShmDir::new("lend-bytes");
    let pool = Pool::open("p", &dir.options(1 << 20, 256 << 10)).unwrap();
    let ns = namespace(&pool, &[4096, 512]);
    assert_eq!(store(&pool, ns, 0..5), 5);
    let lent = pool.lend(ns, &keys(0..7), true, u64::MAX).unwrap();
    assert_eq!(lent.iter().map(|(position, _)| *position).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    let segments = pool.data_segments().unwrap();
    for (position, block) in &lent {
        for (part, place) in block.places().enumerate() {
            let bytes = block.bytes(part as u32).unwrap();
            assert!(bytes.iter().all(|byte| *byte == *position as u8 ^ part as u8));
            assert_eq!(bytes.len() as u64, place.bytes);
            let segment = segments.iter().find(|segment| segment.segment == place.segment).unwrap();
            assert_eq!(segment.address + place.offset as usize, bytes.as_ptr().addr());
            assert_eq!((segment.namespace, segment.part), (ns, part as u32));
        }
        assert_eq!(block.bytes(2), None);
        assert_eq!(block.checksum(), None, "they were stored without");
    }
    let scattered = pool.lend(ns, &[key(9), key(2), key(8), key(4)], false, u64::MAX).unwrap();
    assert_eq!(scattered.iter().map(|(position, _)| *position).collect::<Vec<_>>(), [1, 3]);
    assert_eq!(pool.lend(ns, &keys(0..5), true, 2 * 4608).unwrap().len(), 2, "no more bytes than wanted");
    assert!(pool.lend(ns, &keys(7..9), true, u64::MAX).unwrap().is_empty());
}

#[test]
fn the_checksum_of_a_lent_block_is_the_sum_of_its_parts() {
    let dir = ShmDir::new("lend-sum");
    let pool = Pool::open("p", &dir.options(1 << 20, 256 << 10)).unwrap();
    let ns = namespace(&pool, &[512, 512]);
    let block = common::reserve(&pool, ns, &[key(1)])[0].1;
    let sums: Vec<u64> = [0, 1].map(|part| part_checksum(part, &[0; 512])).to_vec();
    for part in 0..2 {
        let target = pool.space().write_target(block, part).unwrap();
        // SAFETY: reserved by this process; address and length come from the pool.
        unsafe { std::ptr::write_bytes(target.address, 0, target.bytes) };
        pool.mark_written(part, &[block], Some(&[sums[part as usize]])).unwrap();
    }
    assert_eq!(pool.publish(&[block]).unwrap(), 1);
    let lent = pool.lend(ns, &[key(1)], true, u64::MAX).unwrap();
    assert_eq!(lent[0].1.checksum(), Some(sums[0].wrapping_add(sums[1])));
}

#[test]
fn what_is_lent_is_not_evicted_and_does_not_count_as_used() {
    let dir = ShmDir::new("lend-evict");
    let options = OpenOptions { policy: Some("lru".into()), ..dir.options(256 << 10, 64 << 10) };
    let pool = Pool::open("p", &options).unwrap();
    let ns = namespace(&pool, &[4096]);
    while pool.namespace_stats(ns).unwrap()[0].1 < 64 {
        pool.grow_ahead(ns).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // Each a chain of its own, so that none is kept for another.
    let put = |number: u64| assert_eq!(store(&pool, ns, number..number + 1), 1);
    (0..64).for_each(put);
    let lent = pool.lend(ns, &keys(0..2), false, u64::MAX).unwrap();
    let seen = pool.lend(ns, &keys(2..3), false, u64::MAX).unwrap();
    drop(seen);
    (100..110).for_each(put);
    assert_eq!(pool.contains(ns, &keys(0..3)).unwrap(), [true, true, false]);
    assert_eq!(lent[0].1.bytes(0).unwrap(), [0; 4096]);
    drop(lent);
    (200..263).for_each(put);
    assert_eq!(pool.contains(ns, &keys(0..2)).unwrap(), [false, false], "given back");
}

#[test]
fn a_lent_block_keeps_its_bytes_over_a_reset() {
    let dir = ShmDir::new("lend-reset");
    let pool = Pool::open("p", &dir.options(1 << 20, 256 << 10)).unwrap();
    let ns = namespace(&pool, &[4096]);
    store(&pool, ns, 3..4);
    let lent = pool.lend(ns, &[key(3)], true, u64::MAX).unwrap();
    pool.reset(ns).unwrap();
    assert!(pool.lend(ns, &[key(3)], true, u64::MAX).unwrap().is_empty());
    assert_eq!(lent[0].1.bytes(0).unwrap(), [3; 4096]);
}
