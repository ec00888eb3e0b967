//! Members that leave, lead, follow, or are too many.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "shared with the processes to kill")]

mod common;
#[path = "worker/forge.rs"]
mod forge;
mod kill;

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::ShmDir;
use forge::Forge;
use kill::blocks::{
    self, MAIN, POOL_NAME, check_chain, fill, key, keys, namespace, open, options, store_all, store_chain,
};
use kill::child::Worker;
use kill::patience::PATIENCE;
use kill::settled::{FRESH, assert_nothing_lost, assert_settled, stat};
use pegaflow_engine::limits::QUARANTINE_GRACE;
use pegaflow_engine::{ErrorKind, Namespace, Pool};

/// The same directory by another name: opened through it, a pool gives this process a second row, as another process
/// would have.
fn alias(dir: &ShmDir, name: &str) -> PathBuf {
    let alias = dir.0.join(name);
    symlink(&dir.0, &alias).unwrap();
    alias
}

/// A thread of the pool may be at it at the same time.
fn until(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < PATIENCE, "{what}: it does not come about");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn reserved(pool: &Pool, ns: Namespace) -> u64 {
    stat(&pool.namespace_stats(ns).unwrap(), "blocks_reserved")
}

#[test]
fn a_process_leaves_only_when_its_last_copy_is_done() {
    let dir = ShmDir::new("copier-outlives");
    let observer = open(&dir.0);
    let ns = namespace(&observer, MAIN);
    store_all(&observer, ns, &keys(0..1), 1);
    let leaver = open(&alias(&dir, "leaver"));
    assert_ne!(observer.member().unwrap(), leaver.member().unwrap());
    let block = leaver.reserve(ns, &keys(1..2), None, true).unwrap()[0].1;
    let copier = leaver.space();
    drop(leaver);
    observer.reap().unwrap();
    assert_eq!(reserved(&observer, ns), 1, "somebody may still be writing it");
    let target = copier.write_target(block, 0).unwrap();
    // SAFETY: still reserved by the handle that the copier keeps; address and length come from the pool.
    unsafe { std::ptr::write_bytes(target.address, 7, target.bytes) };
    assert!(copier.mark_part(block, 0, None));
    drop(copier);
    until("the last one has left", || reserved(&observer, ns) == 0);
    assert_nothing_lost(&observer, &[ns]);
}

#[test]
fn slots_in_quarantine_wait_out_the_grace_period_after_a_clean_exit_too() {
    let dir = ShmDir::new("quarantine");
    let observer = open(&dir.0);
    let ns = namespace(&observer, MAIN);
    store_all(&observer, ns, &keys(0..1), 1);
    let leaver = open(&alias(&dir, "leaver"));
    let started = Instant::now();
    let blocks: Vec<_> = leaver.reserve(ns, &keys(10..14), None, true).unwrap().iter().map(|(_, b)| *b).collect();
    leaver.quarantine(&blocks).unwrap();
    drop(leaver);
    let in_use = || {
        let stats = observer.namespace_stats(ns).unwrap();
        stat(&stats, "slots") - stat(&stats, "slots_free") - stat(&stats, "blocks_sealed")
    };
    observer.reap().unwrap();
    loop {
        let (left, after) = (in_use(), started.elapsed());
        // Clocks that count milliseconds may differ by some.
        assert!(left == 4 || after + Duration::from_millis(10) >= QUARANTINE_GRACE, "{left} left after {after:?}");
        if left == 0 {
            break;
        }
        assert!(after < PATIENCE, "never freed");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_nothing_lost(&observer, &[ns]);
}

#[test]
fn what_a_dead_leader_leased_and_reserved_stays_until_its_follower_is_dead_too() {
    let dir = ShmDir::new("follower");
    let observer = open(&dir.0);
    let ns = namespace(&observer, MAIN);
    store_all(&observer, ns, &keys(0..1), 1);
    let mut leader = Worker::start("lead", &dir.0, &[]);
    let line = leader.line();
    let words: Vec<u64> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
    let follower = open(&alias(&dir, "follower"));
    let member = pegaflow_engine::Member { row: words[0] as u32, epoch: words[1] };
    follower.join(member).unwrap();
    leader.kill();
    observer.reap().unwrap();
    assert_eq!(reserved(&observer, ns), 1);
    // Everything that may be evicted is.
    let slots = stat(&observer.namespace_stats(ns).unwrap(), "slots");
    store_all(&observer, ns, &(FRESH..FRESH + 2 * slots).map(key).collect::<Vec<_>>(), 1);
    assert_eq!(check_chain(&observer, ns, &[key(words[2])]), 1, "a follower may be reading what its leader leased");
    drop(follower);
    until("nobody is left who follows", || {
        observer.reap().unwrap();
        reserved(&observer, ns) == 0
    });
    assert_nothing_lost(&observer, &[ns]);
    let late = open(&alias(&dir, "late"));
    assert_eq!(late.join(member).unwrap_err().kind(), ErrorKind::Refused);
}

#[test]
fn a_full_table_of_processes_is_a_sentence_and_a_table_full_of_dead_ones_is_not() {
    let dir = ShmDir::new("table");
    let mut workers: Vec<Worker> = (0..128).map(|_| Worker::start("hold", &dir.0, &["one-reservation"])).collect();
    workers.iter_mut().for_each(|worker| worker.expect("holding"));
    let error = Pool::open(POOL_NAME, &options(&dir.0)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains("all 128 process rows"), "{error}");
    // Nobody is left to reap.
    workers.iter().for_each(|worker| worker.signal(nix::sys::signal::Signal::SIGSTOP));
    workers.into_iter().for_each(Worker::kill);
    let pool = open(&dir.0);
    assert_settled(&pool);
    let ns = namespace(&pool, MAIN);
    assert_eq!(reserved(&pool, ns), 0);
    assert_nothing_lost(&pool, &[ns]);
}

/// Who has the row of a dead process whose devices may still write, for as long as the test likes.
fn heir_of_a_writer() -> Option<(ShmDir, Arc<Pool>)> {
    let dir = ShmDir::new("heir");
    let mut dead = Worker::start("hold", &dir.0, &["device-writes"]);
    dead.expect("holding");
    dead.kill();
    let forge = Forge::open(&dir.0).unwrap();
    forge.fill_process_table();
    let began = Instant::now();
    let heir = open(&dir.0);
    let waiting = forge.extend_grace_periods();
    let in_time = began.elapsed() < QUARANTINE_GRACE;
    assert!(waiting == 3 || !in_time, "{waiting} slots wait for the dead one's devices");
    (waiting == 3).then_some((dir, heir))
}

#[test]
fn who_inherits_the_row_of_a_dead_process_waits_for_its_devices() {
    // Who gets no CPU for as long as the grace period sees nothing of it.
    let (dir, heir) = (0..20).find_map(|_| heir_of_a_writer()).expect("an heir that looks in time");
    let ns = namespace(&heir, MAIN);
    let in_use = || {
        let stats = heir.namespace_stats(ns).unwrap();
        stat(&stats, "slots") - stat(&stats, "slots_free") - stat(&stats, "blocks_sealed")
    };
    assert_eq!((in_use(), reserved(&heir, ns)), (3, 0), "in quarantine, under nobody's name");
    store_all(&heir, ns, &keys(10..11), 1);
    let own = heir.reserve(ns, &keys(11..12), None, true).unwrap()[0].1;
    drop(heir);
    let late = open(&alias(&dir, "late"));
    let found = late.namespace_stats(ns).unwrap();
    let waiting = stat(&found, "slots") - stat(&found, "slots_free") - stat(&found, "blocks_sealed");
    assert_eq!(waiting, 3, "no device writes on behalf of the heir, whose {own:?} is free");
    Forge::open(&dir.0).unwrap().end_grace_periods();
    assert_nothing_lost(&late, &[ns]);
}

#[test]
fn leases_and_reservations_of_a_killed_process_come_back() {
    let dir = ShmDir::new("holders");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    for what in ["lease", "reservation"] {
        let mut holder = Worker::start("hold", &dir.0, &[what]);
        holder.expect("holding");
        holder.kill();
        assert_nothing_lost(&pool, &[ns]);
    }
    let mut holder = Worker::start("hold", &dir.0, &["lease"]);
    holder.expect("holding");
    // Every slot but the four leased ones is used anew, and they are as they were.
    let slots = stat(&pool.namespace_stats(ns).unwrap(), "slots");
    store_all(&pool, ns, &(FRESH..FRESH + 3 * slots).map(key).collect::<Vec<_>>(), 1);
    holder.tell("go on");
    holder.finish();
    assert_nothing_lost(&pool, &[ns]);
}

#[test]
fn small_blocks_that_use_up_the_slots_are_evicted_like_others() {
    let dir = ShmDir::new("small-blocks");
    let options = pegaflow_engine::OpenOptions {
        pool_bytes: Some(64 << 20),
        segment_bytes: Some(256 << 10),
        slots_max: Some(4096),
        ..options(&dir.0)
    };
    let pool = Pool::open(POOL_NAME, &options).unwrap();
    let ns = pool.namespace(&[1; 32], 0, &[64], "small").unwrap();
    let store = |number: u64| {
        let started = Instant::now();
        loop {
            let reserved = pool.reserve(ns, &[key(number)], None, true).unwrap();
            let blocks: Vec<_> = reserved.iter().map(|(_, block)| *block).collect();
            pool.mark_written(0, &blocks, None).unwrap();
            if pool.publish(&blocks).unwrap() == 1 {
                break;
            }
            assert!(started.elapsed() < PATIENCE, "block {number} finds no slot");
        }
    };
    (0..5000).for_each(store);
    assert_eq!(stat(&pool.namespace_stats(ns).unwrap(), "blocks_sealed"), 4096);
    assert!(pool.contains(ns, &keys(4000..5000)).unwrap().iter().all(|present| *present));
}

#[test]
fn a_block_larger_than_a_segment_is_refused_with_what_to_do() {
    let dir = ShmDir::new("large-blocks");
    let pool = open(&dir.0);
    for part_bytes in [kill::blocks::SEGMENT_BYTES + 1, 1 << 40, u64::MAX, u64::MAX - 4096, 0] {
        let error = pool.namespace(&[1; 32], 0, &[64, part_bytes], "large").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.to_string().contains("segment"), "{error}");
    }
    let error = pool.namespace(&[1; 32], 0, &[64; 9], "many parts").unwrap_err();
    assert!(error.to_string().contains("larger pool_size"), "{error}");
    assert_eq!(pool.namespace(&[1; 32], 0, &[64; 65], "parts").unwrap_err().kind(), ErrorKind::InvalidArgument);
    pool.namespace(&[1; 32], 0, &[kill::blocks::SEGMENT_BYTES], "exactly").unwrap();
}

#[test]
fn handles_of_one_pool_in_one_process_share_a_row_until_the_last_is_dropped() {
    let dir = ShmDir::new("handles");
    let one = open(&dir.0);
    let other = open(&dir.0);
    assert!(Arc::ptr_eq(&one, &other));
    let ns = namespace(&one, MAIN);
    store_all(&one, ns, &keys(0..1), 1);
    drop(one);
    let reserved = other.reserve(ns, &keys(1..2), None, true).unwrap();
    assert!(fill(&other, reserved[0].1, &key(1), 1));
    assert_eq!(other.publish(&[reserved[0].1]).unwrap(), 1);
    drop(other);
    let again = open(&dir.0);
    assert_eq!(store_chain(&again, ns, &keys(0..3), 2), 1);
    assert_nothing_lost(&again, &[ns]);
}
