//! Shares: a busy instance takes what nobody needs, and no more.
#![allow(missing_docs)]

mod common;
mod kill;

use std::os::unix::fs::symlink;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{ShmDir, key, keys, store};
use kill::child::Worker;
use nix::sys::signal::Signal;
use pegaflow_engine::limits::RECOUNT_PAUSE;
use pegaflow_engine::objects::{ObjectStore, ObjectStoreOptions, ValueKind};
use pegaflow_engine::{Key, Namespace, OpenOptions, Pool, admin};

const SEGMENT_BYTES: u64 = 256 << 10;
const BLOCK_BYTES: u64 = 4096;
/// Blocks of one segment.
const SEGMENT_BLOCKS: u64 = SEGMENT_BYTES / BLOCK_BYTES;
/// Blocks of a hot set.
const HOT: u64 = 40;

/// A pool of `segments` segments, and instances of it in this process: each comes through a name of its own.
struct Host {
    dir: ShmDir,
    segments: u64,
    count: usize,
}

impl Host {
    fn new(test: &str, segments: u64) -> Self {
        Self { dir: ShmDir::new(test), segments, count: 0 }
    }

    fn instance(&mut self, weight: Option<f64>) -> Arc<Pool> {
        let options = self.dir.options(self.segments * SEGMENT_BYTES, SEGMENT_BYTES);
        let alias = self.dir.0.join(format!("instance-{}", self.count));
        symlink(&self.dir.0, &alias).unwrap();
        self.count += 1;
        Pool::open("p", &OpenOptions { shm_dir: alias, weight, ..options }).unwrap()
    }
}

fn model(pool: &Pool, byte: u8) -> Namespace {
    pool.namespace(&[byte; 32], 0, &[BLOCK_BYTES], "model").unwrap()
}

/// Store single blocks that nobody ever asks for; each number is a new one.
fn flood(pool: &Arc<Pool>, ns: Namespace, numbers: std::ops::Range<u64>) {
    numbers.for_each(|number| assert_eq!(store(pool, ns, number..number + 1), 1));
}

fn present(pool: &Pool, ns: Namespace, numbers: std::ops::Range<u64>) -> u64 {
    pool.contains(ns, &keys(numbers)).unwrap().into_iter().filter(|present| *present).count() as u64
}

fn used_blocks(pool: &Pool) -> u64 {
    pool.share().unwrap().used_bytes / BLOCK_BYTES
}

fn stat(pool: &Pool, name: &str) -> u64 {
    pool.stats().iter().find(|(known, _)| *known == name).unwrap().1
}

fn assert_clean(pool: &Pool) {
    let report: serde_json::Value =
        serde_json::from_str(&admin::verify(pool.path(), true, &mut |_, _| {}).unwrap()).unwrap();
    assert_eq!(report["problems"].as_array().unwrap(), &[] as &[serde_json::Value]);
}

#[test]
fn a_flood_leaves_the_hot_set_of_another_instance_of_the_model() {
    let mut host = Host::new("flood-one", 4);
    let (quiet, busy) = (host.instance(None), host.instance(None));
    let (ns, also) = (model(&quiet, 1), model(&busy, 1));
    store(&quiet, ns, 0..HOT);
    flood(&busy, also, 1000..1000 + 12 * SEGMENT_BLOCKS);
    assert_eq!(quiet.lookup(ns, &keys(0..HOT), 0).unwrap() as u64, HOT, "the hot set was not even touched");
    assert_eq!(used_blocks(&busy), 4 * SEGMENT_BLOCKS - HOT, "what nobody else needs is in use");
    assert_clean(&quiet);
}

#[test]
fn a_flood_leaves_the_hot_set_of_another_model() {
    let mut host = Host::new("flood-two", 4);
    let (quiet, busy) = (host.instance(None), host.instance(None));
    let (ns, other) = (model(&quiet, 1), model(&busy, 2));
    store(&quiet, ns, 0..HOT);
    flood(&busy, other, 1000..1000 + 12 * SEGMENT_BLOCKS);
    assert_eq!(quiet.lookup(ns, &keys(0..HOT), 0).unwrap() as u64, HOT);
    // Who asks for room once more while it is being made gets twice as much.
    let theirs = quiet.namespace_stats(ns).unwrap()[0].1;
    assert_eq!(used_blocks(&busy), 4 * SEGMENT_BLOCKS - theirs);
    assert_eq!(stat(&busy, "extents_retired"), 0);
    assert_clean(&quiet);
}

#[test]
fn without_another_instance_the_oldest_blocks_go() {
    let mut host = Host::new("alone", 2);
    let busy = host.instance(None);
    let ns = model(&busy, 1);
    store(&busy, ns, 0..HOT);
    flood(&busy, ns, 1000..1000 + 4 * SEGMENT_BLOCKS);
    assert_eq!(present(&busy, ns, 0..HOT), 0);
}

#[test]
fn two_floods_share_by_weight_whoever_was_there_first() {
    for heavy_first in [true, false] {
        let mut host = Host::new("weights", 4);
        let (light, heavy) = (host.instance(Some(1.0)), host.instance(Some(3.0)));
        let (ns, also) = (model(&light, 1), model(&heavy, 1));
        let (first, second) = if heavy_first { (&heavy, &light) } else { (&light, &heavy) };
        flood(first, ns, 10_000..10_000 + 5 * SEGMENT_BLOCKS);
        assert_eq!(used_blocks(first), 4 * SEGMENT_BLOCKS, "alone, it uses everything");
        for round in 0..8 * SEGMENT_BLOCKS {
            flood(second, also, 20_000 + round..20_001 + round);
            flood(first, ns, 30_000 + round..30_001 + round);
        }
        assert_eq!((used_blocks(&light), used_blocks(&heavy)), (SEGMENT_BLOCKS, 3 * SEGMENT_BLOCKS));
        assert_eq!(light.share().unwrap().bytes, SEGMENT_BYTES);
        assert_eq!(stat(&heavy, "share_bytes"), 3 * SEGMENT_BYTES);
        assert_eq!(stat(&heavy, "share_used_bytes"), 3 * SEGMENT_BYTES);
        assert_clean(&light);
    }
}

#[test]
fn models_share_by_weight_whoever_was_there_first() {
    let mut host = Host::new("models", 8);
    let first = host.instance(Some(1.0));
    let ns = model(&first, 1);
    flood(&first, ns, 10_000..10_000 + 9 * SEGMENT_BLOCKS);
    assert_eq!(used_blocks(&first), 8 * SEGMENT_BLOCKS);
    let second = host.instance(Some(3.0));
    let other = model(&second, 2);
    let started = Instant::now();
    let mut round = 0;
    while used_blocks(&second) < 6 * SEGMENT_BLOCKS {
        flood(&second, other, 20_000 + round..20_001 + round);
        flood(&first, ns, 30_000 + round..30_001 + round);
        round += 1;
        assert!(started.elapsed() < Duration::from_secs(120), "{} after {round}", used_blocks(&second));
    }
    for _ in 0..4 * SEGMENT_BLOCKS {
        flood(&second, other, 20_000 + round..20_001 + round);
        flood(&first, ns, 30_000 + round..30_001 + round);
        round += 1;
    }
    assert_eq!((used_blocks(&first), used_blocks(&second)), (2 * SEGMENT_BLOCKS, 6 * SEGMENT_BLOCKS));
    assert_clean(&first);
}

#[test]
fn instances_of_one_model_keep_two_shares_between_them() {
    let mut host = Host::new("add-up", 6);
    let pools = [host.instance(None), host.instance(None), host.instance(None)];
    let spaces = [model(&pools[0], 1), model(&pools[1], 1), model(&pools[2], 1)];
    for (instance, (pool, ns)) in pools.iter().zip(spaces).take(2).enumerate() {
        store(pool, ns, 1000 * instance as u64..1000 * instance as u64 + 2 * SEGMENT_BLOCKS);
    }
    flood(&pools[2], spaces[2], 10_000..10_000 + 12 * SEGMENT_BLOCKS);
    assert_eq!(present(&pools[0], spaces[0], 0..2 * SEGMENT_BLOCKS), 2 * SEGMENT_BLOCKS);
    assert_eq!(present(&pools[0], spaces[0], 1000..1000 + 2 * SEGMENT_BLOCKS), 2 * SEGMENT_BLOCKS);
}

#[test]
fn a_block_belongs_to_whoever_used_it_last() {
    let mut host = Host::new("last-user", 2);
    let (writer, reader, busy) = (host.instance(None), host.instance(None), host.instance(None));
    let spaces = [model(&writer, 1), model(&reader, 1), model(&busy, 1)];
    store(&writer, spaces[0], 0..HOT);
    let leased = reader.lease(spaces[1], &keys(0..HOT / 2), 0, 20).unwrap();
    reader.release(&leased).unwrap();
    assert_eq!((used_blocks(&writer), used_blocks(&reader)), (HOT / 2, HOT / 2));
    drop(writer);
    flood(&busy, spaces[2], 10_000..10_000 + 4 * SEGMENT_BLOCKS);
    assert_eq!(reader.lookup(spaces[1], &keys(0..HOT), 0).unwrap() as u64, HOT / 2);
    assert_clean(&busy);
}

#[test]
fn an_instance_that_leaves_has_no_share_but_its_blocks_stay_warm() {
    let mut host = Host::new("leaves", 4);
    let (gone, busy) = (host.instance(None), host.instance(None));
    let (ns, also) = (model(&gone, 1), model(&busy, 1));
    store(&gone, ns, 0..HOT);
    flood(&busy, also, 1000..1000 + 2 * SEGMENT_BLOCKS);
    drop(gone);
    assert_eq!(present(&busy, also, 0..HOT), HOT);
    flood(&busy, also, 2000..2000 + 2 * SEGMENT_BLOCKS - HOT);
    assert_eq!(present(&busy, also, 0..HOT), HOT, "there was room for all");
    assert_eq!(busy.share().unwrap().bytes, 4 * SEGMENT_BYTES);
    flood(&busy, also, 3000..3000 + HOT);
    assert_eq!(present(&busy, also, 0..HOT), 0, "the oldest go first");
    assert_clean(&busy);
}

/// Processes that have a share, each an equal one.
fn sharers(pool: &Pool) -> u64 {
    let report: serde_json::Value = serde_json::from_str(&admin::inspect(pool.path()).unwrap()).unwrap();
    let processes = report["processes"].as_array().unwrap();
    let shares: Vec<u64> = processes.iter().map(|process| process["share_bytes"].as_u64().unwrap()).collect();
    let having: Vec<u64> = shares.into_iter().filter(|share| *share > 0).collect();
    assert!(having.iter().all(|share| share.abs_diff(having[0]) < 2), "{report}");
    having.len() as u64
}

#[test]
fn the_share_of_a_killed_instance_lapses_and_that_of_a_stopped_one_does_not() {
    let dir = ShmDir::new("killed");
    let pool = kill::blocks::open(&dir.0);
    let ns = kill::blocks::namespace(&pool, kill::blocks::MAIN);
    let mut workers = [0, 1].map(|_| Worker::start("hold", &dir.0, &["lease"]));
    workers.iter_mut().for_each(|worker| worker.expect("holding"));
    kill::blocks::store_all(&pool, ns, &kill::blocks::keys(0..4), 1);
    assert_eq!(sharers(&pool), 3);
    let [killed, stopped] = workers;
    stopped.signal(Signal::SIGSTOP);
    killed.kill();
    assert_eq!(sharers(&pool), 2, "before anybody has reaped it, and after");
    pool.reap().unwrap();
    assert_eq!(sharers(&pool), 2);
    stopped.signal(Signal::SIGCONT);
    stopped.finish();
    assert_eq!(sharers(&pool), 1);
    kill::settled::assert_settled(&pool);
}

#[test]
fn a_process_without_a_namespace_and_one_that_follows_have_no_share() {
    let mut host = Host::new("followers", 2);
    let (leader, worker, looker) = (host.instance(None), host.instance(Some(9.0)), host.instance(None));
    let ns = model(&leader, 1);
    worker.join(leader.member().unwrap()).unwrap();
    model(&worker, 1);
    store(&leader, ns, 0..4);
    assert!(leader.share().unwrap().bytes >= SEGMENT_BYTES, "all that the pool has grown to");
    assert_eq!(sharers(&leader), 1);
    assert_eq!((worker.share().unwrap().bytes, looker.share().unwrap().bytes), (0, 0));
}

#[test]
fn a_weight_is_a_positive_number_and_may_change() {
    let mut host = Host::new("weight", 2);
    for weight in [0.0, -1.0, 0.0004, f64::NAN, f64::INFINITY, 1_000_001.0] {
        let error =
            Pool::open("p", &OpenOptions { weight: Some(weight), ..host.dir.options(SEGMENT_BYTES, SEGMENT_BYTES) });
        assert!(error.unwrap_err().to_string().contains("a weight is a number from 0.001 to 1000000"), "{weight}");
    }
    let (one, other) = (host.instance(Some(0.5)), host.instance(Some(0.5)));
    let ns = model(&one, 1);
    model(&other, 1);
    flood(&one, ns, 0..2 * SEGMENT_BLOCKS);
    assert_eq!(one.share().unwrap().bytes, SEGMENT_BYTES);
    let again =
        OpenOptions { shm_dir: one.shm_dir().to_owned(), weight: Some(1.5), create: false, ..OpenOptions::default() };
    assert!(Arc::ptr_eq(&one, &Pool::open("p", &again).unwrap()));
    assert_eq!(one.share().unwrap().bytes, SEGMENT_BYTES * 3 / 2);
}

#[test]
fn what_others_have_taken_of_an_excess_is_not_taken_twice() {
    let mut host = Host::new("twice", 4);
    let (much, other, third) = (host.instance(None), host.instance(None), host.instance(Some(2.0)));
    let spaces = [model(&much, 1), model(&other, 1), model(&third, 1)];
    flood(&much, spaces[0], 10_000..10_000 + 4 * SEGMENT_BLOCKS);
    // Lists what `much` has too much.
    flood(&other, spaces[1], 20_000..20_001);
    assert_eq!(used_blocks(&much), 4 * SEGMENT_BLOCKS - 1);
    // Not what is listed.
    for number in 10_000 + SEGMENT_BLOCKS..10_000 + 4 * SEGMENT_BLOCKS {
        assert_eq!(third.touch(spaces[2], &[key(number)]).unwrap(), 1);
    }
    assert_eq!(used_blocks(&much), SEGMENT_BLOCKS - 1, "less than its share");
    // Accounts of before are good for a while.
    std::thread::sleep(2 * RECOUNT_PAUSE);
    flood(&other, spaces[1], 21_000..21_010);
    assert_eq!(used_blocks(&much), SEGMENT_BLOCKS - 1);
    assert_clean(&much);
}

#[test]
fn a_process_that_keeps_values_only_has_no_share() {
    let mut host = Host::new("keeper", 8);
    let (one, keeper) = (host.instance(None), host.instance(None));
    let ns = model(&one, 1);
    let options = ObjectStoreOptions { shm_dir: keeper.shm_dir().to_owned(), ..ObjectStoreOptions::default() };
    let store_of_values = ObjectStore::open(Some("p"), &options).unwrap();
    store_of_values.put("name", ValueKind::Bytes, b"value").unwrap();
    store(&one, ns, 0..4);
    assert_eq!((sharers(&one), keeper.share().unwrap().bytes), (1, 0));
}

/// Chains that end up in many places: stored block by block in turns, evicted, and stored anew.
fn scattered(pool: &Arc<Pool>, ns: Namespace, chains: u64, length: u64) -> Vec<Vec<Key>> {
    let chain = |chain: u64| -> Vec<Key> { (0..length).map(|position| key(chain * 1000 + position)).collect() };
    let all: Vec<Vec<Key>> = (0..chains).map(chain).collect();
    for position in 0..length {
        for number in 0..chains {
            let first = number * 1000;
            let parents = [position.checked_sub(1).map(|before| key(first + before))];
            let own = [key(first + position)];
            let started = Instant::now();
            loop {
                let reserved = pool.reserve(ns, &own, Some(&parents), true).unwrap();
                if let Some((_, block)) = reserved.first() {
                    let target = pool.space().write_target(*block, 0).unwrap();
                    // SAFETY: reserved by this process; address and length come from the pool.
                    unsafe { std::ptr::write_bytes(target.address, (first + position) as u8, target.bytes) };
                    assert!(pool.space().mark_part(*block, 0, None));
                    assert_eq!(pool.publish(&[*block]).unwrap(), 1);
                    break;
                }
                assert!(started.elapsed() < Duration::from_secs(120), "no slot");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    all
}

#[test]
fn a_move_costs_no_more_blocks_than_an_extent_has_and_no_head_before_its_tail() {
    let mut host = Host::new("move", 4);
    let owner = host.instance(None);
    let ns = model(&owner, 1);
    let chains = scattered(&owner, ns, 16, 16);
    let before = 16 * 16;
    assert_eq!(used_blocks(&owner), before, "all is full");
    let newcomer = host.instance(None);
    let other = model(&newcomer, 2);
    store(&newcomer, other, 50_000..50_001);
    assert_eq!(stat(&newcomer, "extents_retired"), 1);
    let found: Vec<usize> = chains.iter().map(|chain| owner.lookup(ns, chain, 0).unwrap()).collect();
    assert_eq!(found.iter().sum::<usize>() as u64, before - SEGMENT_BLOCKS, "{found:?}: one extent's blocks, tails");
    assert!(stat(&newcomer, "blocks_moved") > 0);
    for (number, (chain, found)) in chains.iter().zip(&found).enumerate() {
        let leased = owner.lease(ns, chain, 0, chain.len()).unwrap();
        assert_eq!(leased.len(), *found);
        for (position, block) in leased.iter().enumerate() {
            let byte = (number as u64 * 1000 + position as u64) as u8;
            assert_eq!(common::bytes(&owner, *block, 0), vec![byte; BLOCK_BYTES as usize]);
        }
        owner.release(&leased).unwrap();
    }
    assert_clean(&owner);
}

#[test]
fn a_leased_block_stays_where_it_is() {
    let mut host = Host::new("leased", 2);
    let owner = host.instance(None);
    let ns = model(&owner, 1);
    flood(&owner, ns, 0..2 * SEGMENT_BLOCKS);
    // One block in each extent.
    let leased: Vec<_> = [0, 2 * SEGMENT_BLOCKS - 1]
        .into_iter()
        .flat_map(|number| owner.lease(ns, &[key(number)], 0, 1).unwrap())
        .collect();
    let newcomer = host.instance(None);
    let other = model(&newcomer, 2);
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(200) {
        assert!(newcomer.reserve(other, &keys(0..1), None, true).unwrap().is_empty());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(present(&owner, ns, 0..2 * SEGMENT_BLOCKS), 2 * SEGMENT_BLOCKS, "nothing was lost in vain");
    assert_eq!(common::bytes(&owner, leased[1], 0), vec![127; BLOCK_BYTES as usize]);
    owner.release(&leased[..1]).unwrap();
    store(&newcomer, other, 0..1);
    assert_eq!(common::bytes(&owner, leased[1], 0), vec![127; BLOCK_BYTES as usize]);
    owner.release(&leased[1..]).unwrap();
    assert_clean(&owner);
}
