//! A process is stopped (SIGSTOP) and holds whatever it holds there. Its siblings' operations return in bounded time
//! with a miss or a skipped save; after SIGCONT it finishes, and nothing is lost. `crash.rs` does this at every point
//! of an existing pool.
#![allow(missing_docs)]

mod common;
mod kill;

use std::sync::Arc;

use common::ShmDir;
use kill::blocks::{MAIN, check_chain, fill, key, keys, namespace, open, store_all, store_chain};
use kill::child::Worker;
use kill::settled::{assert_nothing_lost, assert_settled, stat};
use kill::stopwatch::{SLEEPS_MAX, Stopwatch, Took};
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use pegaflow_engine::{ErrorKind, Namespace, Pool, crash_point};

/// A worker that is stopped at `name`.
fn stop_at(dir: &ShmDir, name: &str) -> Worker {
    let mut worker = Worker::start("point", &dir.0, &[name, "stop"]);
    let status = worker.stopped_or_ended();
    assert!(matches!(status, WaitStatus::Stopped(_, Signal::SIGSTOP)), "{name} was never reached: {status:?}");
    worker
}

fn continue_to_the_end(worker: Worker) {
    worker.signal(Signal::SIGCONT);
    worker.finish();
}

/// Every operation of a sibling, each with how long it took.
fn operations(pool: &Arc<Pool>, ns: Namespace, round: u64) -> Vec<(&'static str, Took)> {
    let watch = Stopwatch::of_this_thread();
    let mut times = Vec::new();
    let mut time = |name, work: &mut dyn FnMut()| times.push((name, watch.time(work).1));
    let absent = keys(900_000 + round * 1000..900_000 + round * 1000 + 500);
    time("lookup", &mut || assert_eq!(pool.lookup(ns, &absent, 0).unwrap(), 0));
    time("contains", &mut || assert!(!pool.contains(ns, &absent).unwrap().contains(&true)));
    time("touch", &mut || assert_eq!(pool.touch(ns, &absent).unwrap(), 0));
    let mut reserved = Vec::new();
    time("reserve", &mut || reserved = pool.reserve(ns, &absent[..64], None, true).unwrap());
    let blocks: Vec<_> = reserved.iter().map(|(_, block)| *block).collect();
    reserved.iter().for_each(|(index, block)| assert!(fill(pool, *block, &absent[*index], round)));
    let mut published = 0;
    time("publish", &mut || published = pool.publish(&blocks).unwrap());
    let mut leased = Vec::new();
    time("lease", &mut || leased = pool.lease(ns, &absent, 0, 64).unwrap());
    time("release", &mut || pool.release(&leased).unwrap());
    time("namespace", &mut || {
        if let Err(error) = pool.namespace(&[MAIN; 32], 7, &[512], "asked for while a sibling is stopped") {
            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        }
    });
    time("reset", &mut || assert!(pool.reset(pool_of_resets(pool, ns)).is_ok()));
    times
}

/// Resets must not hit the namespace whose blocks are checked.
fn pool_of_resets(pool: &Pool, fallback: Namespace) -> Namespace {
    pool.namespace(&[MAIN + 1; 32], 0, &kill::blocks::PART_BYTES, "kill tests").unwrap_or(fallback)
}

#[test]
fn who_comes_while_the_creator_of_a_pool_stands_still_creates_it_and_never_waits_long() {
    let mut slowest = ("", "", Took::default());
    for point in crash_point::names().iter().filter(|name| name.starts_with("create.")) {
        let dir = ShmDir::new("frozen");
        let worker = stop_at(&dir, point);
        let pool = open(&dir.0);
        let ns = namespace(&pool, MAIN);
        namespace(&pool, MAIN + 1);
        let chain = keys(0..8);
        store_all(&pool, ns, &chain[..1], 1);
        store_chain(&pool, ns, &chain, 1);
        for round in 0..2 {
            for (operation, took) in operations(&pool, ns, round) {
                assert!(took.sleeps < SLEEPS_MAX, "{operation} took {took:?} with a sibling stopped at {point}");
                if took > slowest.2 {
                    slowest = (point, operation, took);
                }
            }
        }
        continue_to_the_end(worker);
        assert_settled(&pool);
        store_all(&pool, ns, &chain[..1], 1);
        store_chain(&pool, ns, &chain, 2);
        assert_eq!(check_chain(&pool, ns, &chain), 8);
        assert_nothing_lost(&pool, &[ns]);
    }
    println!("slowest: {} at {}: {:?}", slowest.1, slowest.0, slowest.2);
}

#[test]
fn a_reaper_that_cannot_get_a_lock_leaves_the_slot_to_the_next_try() {
    let dir = ShmDir::new("reap-blocked");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    store_all(&pool, ns, &keys(0..1), 1);
    // Both want to store the same key: the dead one's slot hangs on the lock that the stopped one holds.
    let mut dead = Worker::start("hold", &dir.0, &["one-reservation"]);
    dead.expect("holding");
    let stopped = Worker::start("hold", &dir.0, &["publish-stopped"]);
    let mut stopped = stopped;
    assert!(matches!(stopped.stopped_or_ended(), WaitStatus::Stopped(..)));
    dead.kill();
    pool.reap().unwrap();
    assert_eq!(stat(&pool.namespace_stats(ns).unwrap(), "blocks_reserved"), 2, "one of the dead, one of the stopped");
    continue_to_the_end(stopped);
    assert_nothing_lost(&pool, &[ns]);
}

#[test]
fn a_reset_that_stood_still_leaves_blocks_of_later_epochs_in_their_order() {
    let dir = ShmDir::new("reset-late");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN + 1);
    let stopped = stop_at(&dir, "reset.aged");
    pool.reset(ns).unwrap();
    let chain = keys(100..140);
    store_all(&pool, ns, &chain[..1], 1);
    store_chain(&pool, ns, &chain, 1);
    assert_eq!(check_chain(&pool, ns, &chain), chain.len());
    continue_to_the_end(stopped);
    assert_settled(&pool);
    assert_eq!(check_chain(&pool, ns, &chain), chain.len());
}

#[test]
fn nobody_takes_the_locks_of_a_process_that_is_leaving() {
    let dir = ShmDir::new("leaving");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    store_all(&pool, ns, &keys(0..1), 1);
    let mut leaving = Worker::start("hold", &dir.0, &["leave-stopped"]);
    assert!(matches!(leaving.stopped_or_ended(), WaitStatus::Stopped(..)));
    let wanted = key(kill::blocks::CONTESTED);
    assert_eq!(store_chain(&pool, ns, &[wanted], 1), 0, "the lock is held by a living process");
    assert_eq!(stat(&pool.stats(), "locks_taken_over"), 0);
    continue_to_the_end(leaving);
    store_all(&pool, ns, &[wanted], 1);
    assert_nothing_lost(&pool, &[ns]);
}

#[test]
fn several_stopped_siblings_cost_one_wait_together() {
    let dir = ShmDir::new("several-frozen");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    store_all(&pool, ns, &keys(0..1), 1);
    let points = ["publish.locked", "publish.odd", "publish.linked"];
    let stopped: Vec<Worker> = points.iter().map(|point| stop_at(&dir, point)).collect();
    let watch = Stopwatch::of_this_thread();
    // Enough to meet every lock of the index many times.
    let absent = keys(900_000..900_000 + 5_000);
    let (_, took) = watch.time(|| assert!(!pool.contains(ns, &absent).unwrap().contains(&true)));
    assert!(took.sleeps < SLEEPS_MAX, "{took:?}: one wait of 20 ms, not one per key or sibling");
    stopped.into_iter().for_each(continue_to_the_end);
    assert_nothing_lost(&pool, &[ns]);
}
