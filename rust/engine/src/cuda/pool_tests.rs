//! The copier over a fake driver and a real pool.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::OpenOptions;
use crate::key::{BlockRef, Key};
use crate::shm::namespace::Namespace;
use crate::shm::pool::Pool;

use super::CudaCopier;
use super::copier_tests::{only, small_options, until};
use super::fake_driver::{FakeDriver, Random};
use super::fake_space::Cache;

const BLOCK_BYTES: usize = 8192;

fn pool() -> Arc<Pool> {
    let options = OpenOptions {
        private: true,
        pool_bytes: Some(512 << 10),
        segment_bytes: Some(256 << 10),
        ..OpenOptions::default()
    };
    Pool::open("cuda", &options).unwrap()
}

fn key(number: u64) -> Key {
    Key::new(&number.to_le_bytes()).unwrap()
}

/// A slot for each number; the pool grows in the background meanwhile.
fn reserve(pool: &Pool, namespace: Namespace, numbers: std::ops::Range<u64>) -> Vec<BlockRef> {
    let mut blocks = Vec::new();
    for number in numbers {
        let parents = Some(&[None][..]);
        let started = Instant::now();
        while let reserved = pool.reserve(namespace, &[key(number)], parents, true).unwrap()
            && reserved.iter().map(|(_, block)| blocks.push(*block)).count() == 0
        {
            assert!(started.elapsed() < Duration::from_secs(120), "the pool has no room");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    blocks
}

#[test]
fn blocks_go_to_a_pool_and_come_back_from_locked_segments() {
    let (mut random, driver, pool) = (Random(1), Arc::new(FakeDriver::new(1)), pool());
    let namespace = pool.namespace(&[1; 32], 0, &[BLOCK_BYTES as u64], "").unwrap();
    let shapes = [(8192, 4096), (4096, 4096)];
    let [source, target] = [(); 2].map(|()| Cache::new(&driver, &shapes, 40, &mut random));
    let copier = CudaCopier::with_driver(Arc::clone(&driver) as _, Arc::clone(&pool) as _, small_options()).unwrap();
    copier.register(namespace, 0).unwrap();
    let blocks = reserve(&pool, namespace, 0..40);
    assert_eq!(blocks.len(), 40);
    until("both segments are page-locked", || copier.registration().bytes_registered == 512 << 10);
    let job = copier.save(0, &source.layout, blocks.clone(), (0..40).collect(), None).unwrap();
    assert!(only(&copier, job).ok());
    assert_eq!(pool.publish(&blocks).unwrap(), 40);
    let keys: Vec<Key> = (0..40).map(key).collect();
    let leased = pool.lease(namespace, &keys, 0, 40).unwrap();
    let job = copier.load(0, &target.layout, leased.clone(), (0..40).rev().collect(), None).unwrap();
    assert!(only(&copier, job).ok());
    pool.release(&leased).unwrap();
    (0..40).for_each(|id| assert_eq!(target.block(39 - id), source.block(id)));
    assert_eq!(copier.stats().iter().find(|(name, _)| *name == "bytes_bounced").unwrap().1, 0);
    drop(copier);
    driver.assert_nothing_is_left();
    assert_eq!(Arc::strong_count(&pool), 1, "a closed copier lets go of the pool");
}

#[test]
fn segments_that_another_namespace_takes_over_are_unlocked() {
    let (driver, pool) = (Arc::new(FakeDriver::new(2)), pool());
    let old = pool.namespace(&[1; 32], 0, &[BLOCK_BYTES as u64], "").unwrap();
    let copier = CudaCopier::with_driver(Arc::clone(&driver) as _, Arc::clone(&pool) as _, small_options()).unwrap();
    copier.register(old, 0).unwrap();
    let blocks = reserve(&pool, old, 0..40);
    until("both segments are page-locked", || copier.registration().bytes_registered == 512 << 10);
    pool.abort(&blocks).unwrap();
    let new = pool.namespace(&[2; 32], 0, &[4096], "").unwrap();
    assert_eq!(reserve(&pool, new, 0..1).len(), 1);
    until("the lost segments are unlocked", || {
        let left = pool.namespace_stats(old).unwrap()[0].1 as usize * BLOCK_BYTES;
        left < 512 << 10 && driver.lock().registered.values().sum::<usize>() == left
    });
}
