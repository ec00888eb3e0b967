//! A process that lost its liveness lock looks dead and is reaped while it lives, or stands still. It finds out, and
//! touches the pool no more.
#![allow(missing_docs)]

mod common;
mod kill;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use common::ShmDir;
use kill::blocks::{CONTESTED, MAIN, check_chain, keys, namespace, open, store_all};
use kill::child::Worker;
use kill::patience::PATIENCE;
use kill::settled::{assert_nothing_lost, assert_settled, stat};
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use pegaflow_engine::{Pool, crash_point};

/// Steps within a change of the index: who stands still there for so long finishes it (`docs/crash-model.md`).
const WITHIN_THE_INDEX: [&str; 7] = [
    "retire.moving",
    "retire.linked",
    "retire.sealed",
    "reap.locked",
    "reap.unlinked",
    "reap.restored",
    "reap.outdated",
];
/// Tries to get to one point; a thread of the process itself may be faster.
const TRIES_MAX: usize = 10;
/// Enough to take what others have of the pool of these tests, and to use it several times.
const BLOCKS: u64 = 1500;
/// Where the tables are, as in `docs/shm-format.md`.
const PROCESSES: u64 = 4096;
const EXTENTS: u64 = PROCESSES + 128 * 128 + 256 * 704;
const EXTENT_BYTES: usize = 320;

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

#[test]
fn a_process_reaped_while_it_made_or_removed_an_extent_goes_on_and_touches_none() {
    go_on_at_each("grow.");
    go_on_at_each("drop.");
}

#[test]
fn a_process_reaped_while_it_took_an_extent_goes_on_and_touches_none() {
    go_on_at_each("retire.");
}

#[test]
fn a_process_reaped_while_it_reaped_another_goes_on_and_touches_nobody() {
    go_on_at_each("reap.");
}

fn go_on_at_each(family: &str) {
    let outside = |name: &&&str| name.starts_with(family) && !WITHIN_THE_INDEX.contains(name);
    crash_point::names().iter().filter(outside).for_each(|point| go_on_at(point));
}

/// A process loses its lock and stands still at `point`; what it has is repaired, and goes to others; it goes on.
fn go_on_at(point: &str) {
    let (dir, mut lost) = stopped_without_lock(point);
    let pool = open(&dir.0);
    assert_settled(&pool);
    let (ns, keys) = (namespace(&pool, MAIN + 40), keys(0..BLOCKS));
    store_all(&pool, ns, &keys, 1);
    // Its row goes to another, and so does that of whomever it was reaping.
    let mut heirs = [(); 2].map(|()| Worker::start("lead", &dir.0, &[]));
    heirs.iter_mut().for_each(|heir| assert!(!heir.line().is_empty()));
    let (before, present) = (tables_at_rest(&pool), pool.contains(ns, &keys).unwrap());
    lost.signal(Signal::SIGCONT);
    let end = lost.end();
    // Whatever it wanted to do next was refused.
    assert!(matches!(end, WaitStatus::Exited(..)), "{point}: {end:?}");
    assert!(tables(&pool) == before, "{point}: it changed processes or extents that are not its own");
    assert_eq!(pool.contains(ns, &keys).unwrap(), present, "{point}: blocks are lost");
    for (key, _) in keys.iter().zip(present).filter(|(_, present)| *present) {
        assert_eq!(check_chain(&pool, ns, &[*key]), 1, "{point}");
    }
    let facts: serde_json::Value =
        serde_json::from_str(&pegaflow_engine::admin::inspect(pool.path()).unwrap()).unwrap();
    let held = |what: &str| -> u64 {
        facts["processes"].as_array().unwrap().iter().filter_map(|process| process[what].as_u64()).sum()
    };
    assert_eq!((held("leases"), held("reserved")), (2, 2), "{point}: of the heirs");
    heirs.into_iter().for_each(Worker::finish);
    assert_nothing_lost(&pool, &[ns]);
}

/// The only process of its pool, so that nobody has noticed yet.
fn stopped_without_lock(point: &str) -> (ShmDir, Worker) {
    for _ in 0..TRIES_MAX {
        let dir = ShmDir::new("lost-extent");
        let mut lost = Worker::start("lose-lock-at", &dir.0, &[point]);
        if matches!(lost.stopped_or_ended(), WaitStatus::Stopped(..)) {
            return (dir, lost);
        }
    }
    panic!("{point} was never reached");
}

/// Processes, extents, ranges and segments.
fn tables(pool: &Pool) -> (Vec<u8>, Vec<u8>, Vec<u8>, Vec<String>) {
    let control = File::open(pool.path().join("control")).unwrap();
    let read = |offset: u64, bytes: u64| {
        let mut table = vec![0; bytes as usize];
        control.read_exact_at(&mut table, offset).unwrap();
        table
    };
    let extents_bytes = pool.pool_bytes() / pool.segment_bytes() * EXTENT_BYTES as u64;
    let ranges = (EXTENTS + extents_bytes).next_multiple_of(4096) + 1024 * 64;
    let files = std::fs::read_dir(pool.path()).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut segments: Vec<String> = files.filter(|name| name.starts_with("segment-")).collect();
    segments.sort();
    (read(PROCESSES, 128 * 128), read(EXTENTS, extents_bytes), read(ranges, pool.slots_max() / 64 * 4), segments)
}

/// The tables once nobody makes or takes an extent any more.
fn tables_at_rest(pool: &Pool) -> (Vec<u8>, Vec<u8>, Vec<u8>, Vec<String>) {
    let started = Instant::now();
    let in_use = |extent: &[u8]| matches!(extent[0], 0 | 2);
    loop {
        let seen = tables(pool);
        std::thread::sleep(Duration::from_millis(100));
        if seen == tables(pool) && seen.1.chunks(EXTENT_BYTES).all(in_use) {
            return seen;
        }
        assert!(started.elapsed() < PATIENCE, "extents never come to rest");
    }
}
