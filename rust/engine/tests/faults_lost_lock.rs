//! A process that lost its liveness lock looks dead and is reaped while it lives, or stands still. It finds out, and
//! touches the pool no more.
#![allow(missing_docs)]

mod common;
mod kill;

use common::ShmDir;
use kill::blocks::{CONTESTED, MAIN, check_chain, keys, namespace, open, store_all};
use kill::child::Worker;
use kill::settled::{assert_nothing_lost, assert_settled, stat};
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;

#[test]
fn a_process_reaped_while_it_stood_still_finds_its_place_gone_and_harms_nobody() {
    let dir = ShmDir::new("lost-lock");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    store_all(&pool, ns, &keys(0..1), 1);
    let mut lost = Worker::start("lose-lock", &dir.0, &[]);
    let row = lost.line();
    lost.signal(Signal::SIGSTOP);
    assert!(matches!(lost.stopped_or_ended(), WaitStatus::Stopped(..)));
    assert_settled(&pool);
    assert_eq!(stat(&pool.namespace_stats(ns).unwrap(), "blocks_reserved"), 0, "it was reaped");
    // Its row goes to another, who leases blocks and holds them while the first one finds out.
    let mut heir = Worker::start("lead", &dir.0, &[]);
    assert_eq!(heir.line().split(' ').next().unwrap(), row);
    lost.signal(Signal::SIGCONT);
    lost.tell("go on");
    lost.finish();
    let facts: serde_json::Value =
        serde_json::from_str(&pegaflow_engine::admin::inspect(pool.path()).unwrap()).unwrap();
    let holders: Vec<u64> =
        facts["processes"].as_array().unwrap().iter().filter_map(|p| p["leases"].as_u64()).collect();
    assert_eq!(holders.iter().sum::<u64>(), 1, "the heir's lease is still there: {holders:?}");
    heir.finish();
    assert_eq!(check_chain(&pool, ns, &keys(CONTESTED..CONTESTED + 3)), 3);
    assert_nothing_lost(&pool, &[ns]);
}

#[test]
fn a_process_reaped_within_an_operation_changes_no_state_of_a_slot_afterwards() {
    for point in ["lease.marked", "reserve.unhinted", "reserve.claimed", "reserve.keyed", "part.copied", "part.written"]
    {
        let dir = ShmDir::new("lost-within");
        let pool = open(&dir.0);
        let ns = namespace(&pool, MAIN);
        let mut lost = Worker::start("lose-lock-within", &dir.0, &[point]);
        assert!(matches!(lost.stopped_or_ended(), WaitStatus::Stopped(..)), "{point}");
        assert_settled(&pool);
        lost.signal(Signal::SIGCONT);
        lost.finish();
        assert_settled(&pool);
        assert_nothing_lost(&pool, &[ns]);
    }
}

#[test]
fn a_stopped_process_is_never_reaped_and_keeps_what_it_holds() {
    let dir = ShmDir::new("stopped-alive");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    let mut stopped = Worker::start("hold", &dir.0, &["lease"]);
    stopped.expect("holding");
    stopped.signal(Signal::SIGSTOP);
    assert!(matches!(stopped.stopped_or_ended(), WaitStatus::Stopped(..)));
    for _ in 0..50 {
        assert_eq!(pool.reap().unwrap(), 0);
    }
    assert_eq!(pegaflow_engine::admin::reap(pool.path()).unwrap(), 0, "nor from outside");
    let held = kill::settled::FRESH;
    store_all(&pool, ns, &(held..held + 600).map(kill::blocks::key).collect::<Vec<_>>(), 1);
    stopped.signal(Signal::SIGCONT);
    stopped.tell("go on");
    stopped.finish();
    assert_nothing_lost(&pool, &[ns]);
}
