//! Processes in PID, IPC, user and mount namespaces of their own share a pool with each other and with the host.
#![allow(missing_docs)]

mod common;
mod kill;

use std::path::Path;
use std::time::{Duration, Instant};

use common::ShmDir;
use kill::blocks::{CONTESTED, MAIN, POOL_NAME, check_chain, key, keys, namespace, open, store_all, store_chain};
use kill::child::Worker;
use kill::patience::PATIENCE;
use kill::settled::{assert_nothing_lost, assert_settled, stat};
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use pegaflow_engine::{Pool, admin, names::pool_dir};

/// Number of the first key of what `hold` stores.
const HELD: u64 = 1 << 40;

fn contained(dir: &ShmDir, args: &[&str]) -> Worker {
    Worker::start("contained", &dir.0, args)
}

fn holding(dir: &ShmDir, what: &str) -> Worker {
    let mut worker = contained(dir, &["hold", what]);
    assert_eq!(worker.line_in_time(what), "holding");
    worker
}

/// What `pegaflow inspect` says, without attaching.
fn inspect(dir: &Path) -> serde_json::Value {
    let path = pool_dir(dir, nix::unistd::geteuid().as_raw(), POOL_NAME);
    serde_json::from_str(&admin::inspect(&path).unwrap()).unwrap()
}

/// `(pid, alive)` of each row in use.
fn processes(dir: &Path) -> Vec<(u64, bool)> {
    let report = inspect(dir);
    let rows = report["processes"].as_array().unwrap();
    rows.iter().map(|row| (row["pid"].as_u64().unwrap(), row["alive"].as_bool().unwrap())).collect()
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reap until this process is the only one left.
fn reap_all(pool: &Pool) {
    wait_for("a killed container is never reaped", || {
        pool.reap().unwrap();
        processes(pool.shm_dir()).len() == 1
    });
}

#[test]
fn a_contained_process_is_alive_and_its_blocks_are_found_and_leased() {
    let dir = ShmDir::new("contained");
    let inside = holding(&dir, "lease");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    assert!(!pool.created());
    assert_eq!(pool.reap().unwrap(), 0, "its number is nobody's here, and yet it is alive");
    let chain = keys(HELD..HELD + 4);
    assert_eq!(check_chain(&pool, ns, &chain), 4);
    store_all(&pool, ns, &keys(0..600), 1);
    assert!(stat(&pool.stats(), "blocks_evicted") > 0);
    assert_eq!(check_chain(&pool, ns, &chain), 4, "leased in there");
    inside.finish();
    assert_settled(&pool);
}

#[test]
fn a_killed_container_is_reaped_from_outside() {
    let dir = ShmDir::new("killed-inside");
    let inside = holding(&dir, "reservation");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    assert!(stat(&pool.namespace_stats(ns).unwrap(), "blocks_reserved") > 0);
    inside.kill();
    reap_all(&pool);
    assert_eq!(stat(&pool.namespace_stats(ns).unwrap(), "blocks_reserved"), 0);
    assert_nothing_lost(&pool, &[ns]);
}

#[test]
fn a_dead_process_of_the_host_is_reaped_from_within_a_container() {
    let dir = ShmDir::new("killed-outside");
    let mut outside = Worker::start("hold", &dir.0, &["reservation"]);
    outside.expect("holding");
    let inside = holding(&dir, "nothing");
    assert_eq!(processes(&dir.0).len(), 2);
    outside.kill();
    wait_for("nobody in the container reaps", || processes(&dir.0).len() == 1);
    assert!(processes(&dir.0)[0].1);
    inside.finish();
}

#[test]
fn processes_with_the_same_number_are_told_apart() {
    let dir = ShmDir::new("same-number");
    let (one, other) = (holding(&dir, "lease"), holding(&dir, "reservation"));
    let both = processes(&dir.0);
    assert_eq!(both.iter().map(|process| process.0).collect::<Vec<_>>(), [2, 2], "each the second of its container");
    assert!(both.iter().all(|process| process.1));
    other.kill();
    wait_for("one container does not reap another", || processes(&dir.0).len() == 1);
    assert!(processes(&dir.0)[0].1, "the other one lives");
    one.finish();
    let pool = open(&dir.0);
    assert_nothing_lost(&pool, &[namespace(&pool, MAIN)]);
}

#[test]
fn locks_of_a_contained_process_are_taken_over_when_it_dies_and_not_before() {
    let dir = ShmDir::new("lock-inside");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    store_all(&pool, ns, &keys(0..1), 1);
    let inside = contained(&dir, &["hold", "publish-stopped"]);
    let wanted = key(CONTESTED);
    // With a block reserved, it is the one behind which it stops.
    wait_for("the container gets no lock", || {
        let facts = inspect(&dir.0);
        facts["locks_held"] == 1 && facts["namespaces"][0]["blocks_reserved"] == 1
    });
    assert_eq!(store_chain(&pool, ns, &[wanted], 1), 0);
    assert_eq!(stat(&pool.stats(), "lock_timeouts"), 1);
    assert_eq!(stat(&pool.stats(), "locks_taken_over"), 0, "its holder is stopped, not dead");
    inside.kill();
    reap_all(&pool);
    assert_eq!(stat(&pool.stats(), "locks_taken_over"), 1);
    store_all(&pool, ns, &[wanted], 1);
    assert_eq!(check_chain(&pool, ns, &[wanted]), 1);
    assert_nothing_lost(&pool, &[ns]);
}

#[test]
fn a_container_that_dies_in_the_middle_of_a_change_loses_nothing() {
    for point in ["grow.segment_created", "publish.odd", "evict.unlinked", "lease.marked", "retire.dropping"] {
        let dir = ShmDir::new("point-inside");
        let pool = open(&dir.0);
        let ns = namespace(&pool, MAIN);
        store_all(&pool, ns, &keys(0..4), 1);
        let mut inside = contained(&dir, &["point", point, "kill"]);
        assert!(matches!(inside.end(), WaitStatus::Exited(_, 137)), "{point} was never reached");
        assert_nothing_lost(&pool, &[ns]);
    }
}

#[test]
fn a_container_may_create_the_pool_and_be_gone_before_anybody_else_comes() {
    let dir = ShmDir::new("created-inside");
    let inside = holding(&dir, "lease");
    inside.signal(Signal::SIGKILL);
    drop(inside);
    wait_for("the container does not die", || processes(&dir.0).iter().all(|(_, alive)| !alive));
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    assert_eq!(check_chain(&pool, ns, &keys(HELD..HELD + 4)), 4);
    assert_nothing_lost(&pool, &[ns]);
}
