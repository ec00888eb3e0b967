//! Eviction policies: what a flood of blocks that are used once takes, and what it leaves.
#![allow(missing_docs)]

mod common;

use std::os::unix::fs::symlink;
use std::sync::Arc;

use common::{ShmDir, keys, store};
use pegaflow_engine::{ErrorKind, Namespace, OpenOptions, Pool, admin};

const POOL_BYTES: u64 = 1 << 20;
const BLOCK_BYTES: u64 = 512;
/// Blocks that fit.
const BLOCKS: u64 = POOL_BYTES / BLOCK_BYTES;
const FLOOD: u64 = 1 << 40;

/// A pool of one segment that processes of several policies share; each comes through a name of its own.
struct Host {
    dir: ShmDir,
    count: usize,
}

impl Host {
    fn new(test: &str) -> Self {
        Self { dir: ShmDir::new(test), count: 0 }
    }

    fn instance(&mut self, policy: &str) -> (Arc<Pool>, Namespace) {
        let alias = self.dir.0.join(format!("instance-{}", self.count));
        symlink(&self.dir.0, &alias).unwrap();
        self.count += 1;
        let options = self.dir.options(POOL_BYTES, POOL_BYTES);
        let pool =
            Pool::open("p", &OpenOptions { shm_dir: alias, policy: Some(policy.to_owned()), ..options }).unwrap();
        let ns = pool.namespace(&[1; 32], 0, &[BLOCK_BYTES], "model").unwrap();
        (pool, ns)
    }
}

/// Store chains of eight blocks that nobody asks for again.
fn flood(pool: &Arc<Pool>, ns: Namespace, first: u64, blocks: u64) {
    for chain in 0..blocks / 8 {
        let start = FLOOD + first + 8 * chain;
        assert_eq!(store(pool, ns, start..start + 8), 8);
    }
}

/// Blocks that are there of a chain, from its head on.
fn found(pool: &Pool, ns: Namespace, numbers: std::ops::Range<u64>) -> usize {
    pool.lookup(ns, &keys(numbers), 0).unwrap()
}

fn assert_clean(pool: &Pool) {
    let report: serde_json::Value =
        serde_json::from_str(&admin::verify(pool.path(), true, &mut |_, _| {}).unwrap()).unwrap();
    assert_eq!(report["problems"].as_array().unwrap(), &[] as &[serde_json::Value]);
}

/// Of a chain of 100 blocks used twice, and one used once, what a flood twice as large as the pool leaves.
fn left_of_used_twice_and_once(policy: &str) -> (usize, usize) {
    let mut host = Host::new(&format!("flood-{policy}"));
    let (pool, ns) = host.instance(policy);
    flood(&pool, ns, 0, 2 * BLOCKS);
    assert_eq!((store(&pool, ns, 0..100), store(&pool, ns, 1000..1100)), (100, 100));
    assert_eq!(pool.touch(ns, &keys(0..100)).unwrap(), 100);
    flood(&pool, ns, 4 * BLOCKS, 2 * BLOCKS);
    assert_clean(&pool);
    (found(&pool, ns, 0..100), found(&pool, ns, 1000..1100))
}

#[test]
fn a_flood_takes_what_was_used_once_and_leaves_what_was_used_again() {
    assert_eq!(left_of_used_twice_and_once("probation"), (100, 0));
}

#[test]
fn by_last_use_a_flood_takes_all() {
    assert_eq!(left_of_used_twice_and_once("lru"), (0, 0));
}

#[test]
fn what_comes_back_starts_young_whoever_evicted_it() {
    let mut host = Host::new("comes-back");
    let (pool, ns) = host.instance("probation");
    flood(&pool, ns, 0, 2 * BLOCKS);
    assert_eq!(store(&pool, ns, 0..100), 100);
    // One at a time, so that no share is in the way.
    drop(pool);
    let (pool, _) = host.instance("lru");
    flood(&pool, ns, 4 * BLOCKS, 2 * BLOCKS);
    drop(pool);
    let (one, _) = host.instance("probation");
    assert_eq!(found(&one, ns, 0..100), 0, "evicted by another");
    assert_eq!((store(&one, ns, 0..100), store(&one, ns, 1000..1100)), (100, 100));
    flood(&one, ns, 8 * BLOCKS, BLOCKS / 2);
    assert_eq!((found(&one, ns, 0..100), found(&one, ns, 1000..1100)), (100, 0));
    assert_clean(&one);
}

#[test]
fn a_reset_forgets_what_went() {
    let mut host = Host::new("reset-gone");
    let (pool, ns) = host.instance("probation");
    flood(&pool, ns, 0, 2 * BLOCKS);
    assert_eq!(store(&pool, ns, 0..100), 100);
    flood(&pool, ns, 4 * BLOCKS, 2 * BLOCKS);
    pool.reset(ns).unwrap();
    flood(&pool, ns, 8 * BLOCKS, 2 * BLOCKS);
    assert_eq!(store(&pool, ns, 0..100), 100);
    flood(&pool, ns, 16 * BLOCKS, BLOCKS);
    assert_eq!(found(&pool, ns, 0..100), 0, "used once since the reset");
}

#[test]
fn a_chain_longer_than_the_way_from_the_oldest_to_where_it_starts_is_stored_whole() {
    let mut host = Host::new("long-chain");
    let (pool, ns) = host.instance("probation");
    flood(&pool, ns, 0, 3 * BLOCKS);
    assert_eq!(store(&pool, ns, 0..BLOCKS / 2), BLOCKS as usize / 2);
    assert_eq!(found(&pool, ns, 0..BLOCKS / 2), BLOCKS as usize / 2);
    assert_clean(&pool);
}

#[test]
fn a_policy_that_there_is_not_is_refused_with_those_that_there_are() {
    let dir = ShmDir::new("no-policy");
    let options = OpenOptions { policy: Some("fifo".into()), ..dir.options(POOL_BYTES, POOL_BYTES) };
    let error = Pool::open("p", &options).expect_err("no such policy");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("probation, lru"), "{error}");
    assert_eq!(std::fs::read_dir(&dir.0).unwrap().count(), 0, "and no pool is made");
}

#[test]
fn opening_the_pool_again_changes_the_policy() {
    let dir = ShmDir::new("change-policy");
    let open = |policy: &str| {
        let options = OpenOptions { policy: Some(policy.into()), ..dir.options(POOL_BYTES, POOL_BYTES) };
        let pool = Pool::open("p", &options).unwrap();
        let ns = pool.namespace(&[1; 32], 0, &[BLOCK_BYTES], "model").unwrap();
        (pool, ns)
    };
    let (pool, ns) = open("lru");
    flood(&pool, ns, 0, 2 * BLOCKS);
    assert_eq!(store(&pool, ns, 0..100), 100);
    let _again = open("probation");
    assert_eq!(store(&pool, ns, 1000..1100), 100);
    flood(&pool, ns, 4 * BLOCKS, BLOCKS / 2);
    assert_eq!((found(&pool, ns, 0..100), found(&pool, ns, 1000..1100)), (100, 0));
}

#[test]
fn without_its_file_or_with_a_damaged_one_a_pool_only_forgets_what_went() {
    let dir = ShmDir::new("gone-file");
    let options = dir.options(POOL_BYTES, POOL_BYTES);
    let path = Pool::open("p", &options).unwrap().path().to_owned();
    let file = path.join("gone-v1");
    let whole = std::fs::read(&file).unwrap();
    let mut lies = whole.clone();
    lies[16..24].fill(0xFF);
    for content in [Vec::new(), whole[1..].to_vec(), vec![0; whole.len()], vec![0xFF; whole.len()], lies] {
        std::fs::write(&file, content).unwrap();
        let pool = Pool::open("p", &options).unwrap();
        let ns = pool.namespace(&[1; 32], 0, &[BLOCK_BYTES], "model").unwrap();
        flood(&pool, ns, 0, 2 * BLOCKS);
        assert_clean(&pool);
    }
    std::fs::remove_file(&file).unwrap();
    drop(Pool::open("p", &options).unwrap());
    assert_eq!(std::fs::read(&file).unwrap().len(), whole.len(), "it is made anew");
    admin::remove(&path, false).unwrap();
    assert_eq!(std::fs::read_dir(&dir.0).unwrap().count(), 0);
}
