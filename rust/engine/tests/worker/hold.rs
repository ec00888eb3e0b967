//! A process that holds something and waits to be killed or told to go on.

use std::path::Path;
use std::sync::Arc;

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use pegaflow_engine::{Pool, crash_point};

use crate::blocks::{CONTESTED, MAIN, fill, key, keys, namespace, open, store_all, store_chain, wrong_block};
use crate::forge::Forge;
use crate::patience::PATIENCE;
use crate::{say, wait_for_parent};

/// Number of the first key that holders use.
pub const HELD: u64 = 1 << 40;

extern "C" fn die_when_claimed(_signal: i32) {
    let _known = crash_point::arm("evict.claimed", "kill");
}

extern "C" fn die_when_sealed(_signal: i32) {
    let _known = crash_point::arm("publish.sealed", "kill");
}

fn on_continue(handler: extern "C" fn(i32)) {
    let action = SigAction::new(SigHandler::Handler(handler), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handlers above look up a name in a table and store to an atomic.
    unsafe { sigaction(Signal::SIGCONT, &action) }.unwrap();
}

/// A leader with one lease and one reservation: "ROW EPOCH NUMBER", the number of the key that it leases.
pub fn lead(dir: &Path) {
    let pool = open(dir);
    let ns = namespace(&pool, MAIN);
    store_all(&pool, ns, &[key(HELD)], 1);
    assert_eq!(pool.lease(ns, &[key(HELD)], 0, 1).unwrap().len(), 1);
    assert_eq!(pool.reserve(ns, &[key(HELD + 1)], None, true).unwrap().len(), 1);
    let me = pool.member().unwrap();
    say(&format!("{} {} {HELD}", me.row, me.epoch));
    wait_for_parent();
}

/// Save, but publish only when the parent says so; then say how many blocks became visible.
fn late_save(pool: &Arc<Pool>) {
    let ns = namespace(pool, MAIN);
    store_all(pool, ns, &keys(HELD..HELD + 1), 1);
    let reserved = pool.reserve(ns, &keys(HELD + 100..HELD + 104), None, true).unwrap();
    assert_eq!(reserved.len(), 4);
    let copied = reserved.iter().all(|(at, block)| fill(pool, *block, &key(HELD + 100 + *at as u64), 2));
    assert!(copied);
    say("holding");
    wait_for_parent();
    let blocks: Vec<_> = reserved.iter().map(|(_, block)| *block).collect();
    say(&pool.publish(&blocks).unwrap().to_string());
    wait_for_parent();
}

pub fn run(dir: &Path, what: &str) {
    let pool = open(dir);
    match what {
        "nothing" => {
            say("holding");
            wait_for_parent();
        }
        "reservation" => {
            let ns = namespace(&pool, MAIN);
            store_all(&pool, ns, &keys(HELD..HELD + 4), 1);
            let reserved = pool.reserve(ns, &keys(HELD + 100..HELD + 110), None, true).unwrap();
            assert!(!reserved.is_empty());
            assert!(fill(&pool, reserved[0].1, &key(HELD + 100), 2));
            say("holding");
            wait_for_parent();
        }
        "device-writes" => {
            let ns = namespace(&pool, MAIN);
            store_all(&pool, ns, &keys(HELD..HELD + 1), 1);
            pool.set_device_writes().unwrap();
            assert_eq!(pool.reserve(ns, &keys(HELD + 1..HELD + 4), None, true).unwrap().len(), 3);
            say("holding");
            wait_for_parent();
        }
        "lease" => {
            let ns = namespace(&pool, MAIN);
            let chain = keys(HELD..HELD + 4);
            store_all(&pool, ns, &chain, 1);
            let leased = pool.lease(ns, &chain, 0, 4).unwrap();
            assert_eq!(leased.len(), 4);
            say("holding");
            wait_for_parent();
            for (block, key) in leased.iter().zip(&chain) {
                assert_eq!(wrong_block(&pool, *block, key), None);
            }
            pool.release(&leased).unwrap();
        }
        "late-save" => late_save(&pool),
        "one-reservation" => {
            let ns = namespace(&pool, MAIN);
            let started = std::time::Instant::now();
            while pool.reserve(ns, &keys(CONTESTED..CONTESTED + 1), None, true).unwrap().is_empty() {
                assert!(started.elapsed() < PATIENCE, "nothing to reserve: {:?}", pool.last_grow_error());
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            say("holding");
            wait_for_parent();
        }
        "leave-stopped" => {
            let ns = namespace(&pool, MAIN);
            assert_eq!(pool.reserve(ns, &keys(CONTESTED..CONTESTED + 1), None, true).unwrap().len(), 1);
            crash_point::arm("reap.locked", "stop").unwrap();
        }
        other => stop(dir, &pool, other),
    }
}

/// Stop within an operation.
fn stop(dir: &Path, pool: &Pool, what: &str) {
    let ns = namespace(pool, MAIN);
    match what {
        "publish-stopped" => {
            crash_point::arm("publish.locked", "stop").unwrap();
            store_all(pool, ns, &keys(CONTESTED..CONTESTED + 1), 1);
        }
        "child-stopped-then-killed" => {
            let chain = keys(CONTESTED..CONTESTED + 2);
            on_continue(die_when_sealed);
            let reserved = pool.reserve(ns, &chain, None, true).unwrap();
            assert_eq!(reserved.len(), 1, "the parent is there, a slot is evicted for its child");
            assert!(fill(pool, reserved[0].1, &chain[1], 2));
            crash_point::arm("touch.stamped", "stop").unwrap();
            pool.publish(&[reserved[0].1]).unwrap();
        }
        "rebuild-stopped" => {
            let chain = keys(CONTESTED..CONTESTED + 2);
            store_all(pool, ns, &chain[..1], 1);
            store_chain(pool, ns, &chain, 1);
            store_all(pool, ns, &keys(HELD..HELD + 253), 1);
            // Nobody finds the head, so it is stored again.
            Forge::open(dir).unwrap().empty_index();
            store_all(pool, ns, &chain[..1], 2);
            crash_point::arm("rebuild.doomed", "stop").unwrap();
            pool.rebuild_index().unwrap();
        }
        "evict-stopped" => {
            crash_point::arm("evict.claimed", "stop").unwrap();
            store_all(pool, ns, &keys(CONTESTED..CONTESTED + 1), 1);
        }
        "evict-stopped-then-killed" => {
            on_continue(die_when_claimed);
            crash_point::arm("evict.locked", "stop").unwrap();
            store_all(pool, ns, &keys(CONTESTED..CONTESTED + 1), 1);
        }
        other => panic!("cannot hold {other}"),
    }
}
