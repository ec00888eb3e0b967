//! Helpers of the pool's tests: a pool in a directory of its own, and blocks whose bytes tell what they are.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "each test binary uses some of them")]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pegaflow_engine::{BlockRef, Key, Namespace, OpenOptions, Pool};

/// A directory below /dev/shm that goes away with its pools.
pub struct ShmDir(pub PathBuf);

impl ShmDir {
    pub fn new(test: &str) -> Self {
        let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
        let dir = PathBuf::from(format!("/dev/shm/pega-test-{test}-{}-{nanos}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        Self(dir)
    }

    pub fn options(&self, pool_bytes: u64, segment_bytes: u64) -> OpenOptions {
        OpenOptions {
            shm_dir: self.0.clone(),
            pool_bytes: Some(pool_bytes),
            segment_bytes: Some(segment_bytes),
            ..OpenOptions::default()
        }
    }
}

impl Drop for ShmDir {
    fn drop(&mut self) {
        let _best_effort = std::fs::remove_dir_all(&self.0);
    }
}

pub fn key(number: u64) -> Key {
    let mut bytes = [7u8; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Key::new(&bytes).unwrap()
}

pub fn keys(numbers: std::ops::Range<u64>) -> Vec<Key> {
    numbers.map(key).collect()
}

pub fn namespace(pool: &Pool, part_bytes: &[u64]) -> Namespace {
    pool.namespace(&[9; 32], 0, part_bytes, "test").unwrap()
}

/// Reserve, waiting for the background thread to grow the pool at first.
pub fn reserve(pool: &Pool, ns: Namespace, keys: &[Key]) -> Vec<(usize, BlockRef)> {
    let started = Instant::now();
    loop {
        let reserved = pool.reserve(ns, keys, None, true).unwrap();
        if !reserved.is_empty() || pool.lookup(ns, keys, 0).unwrap() == keys.len() {
            return reserved;
        }
        assert!(started.elapsed() < Duration::from_secs(120), "no slot: {:?}", pool.last_grow_error());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Store blocks whose every byte is the low byte of the key's number. Returns how many were published.
pub fn store(pool: &Arc<Pool>, ns: Namespace, numbers: std::ops::Range<u64>) -> usize {
    let keys = keys(numbers.clone());
    let space = pool.space();
    let mut published = 0;
    loop {
        let reserved = reserve(pool, ns, &keys);
        if reserved.is_empty() {
            return published;
        }
        let blocks: Vec<BlockRef> = reserved.iter().map(|(_, block)| *block).collect();
        for (position, block) in &reserved {
            for part in 0..pool.namespace_info(ns).unwrap().parts {
                let target = space.write_target(*block, part).unwrap();
                let byte = (numbers.start + *position as u64) as u8 ^ part as u8;
                // SAFETY: reserved by this process, so nobody reads it; address and length come from the pool.
                unsafe { std::ptr::write_bytes(target.address, byte, target.bytes) };
                assert!(space.mark_part(*block, part, None));
            }
        }
        published += pool.publish(&blocks).unwrap();
    }
}

/// Bytes of one part of a leased block.
pub fn bytes(pool: &Arc<Pool>, block: BlockRef, part: u32) -> Vec<u8> {
    let source = pool.space().read_source(block, part).unwrap();
    // SAFETY: leased by this process, so the bytes stay; address and length come from the pool.
    unsafe { std::slice::from_raw_parts(source.address, source.bytes) }.to_vec()
}
