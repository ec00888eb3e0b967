//! Workloads that pass each crash point of the pool: arm it, do what leads there, end well if it was not reached.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pegaflow_engine::{Member, Namespace, Pool, crash_point};

use crate::blocks::{MAIN, PART_BYTES, check_chain, key, keys, namespace, open, store_all, store_chain};
use crate::random::mix;

/// Keys of this process alone.
fn own_keys(count: u64) -> Vec<pegaflow_engine::Key> {
    let first = (1 << 41) + (u64::from(std::process::id()) << 20);
    keys(first..first + count)
}

fn in_time(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(15), "{what} takes too long");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub fn run(dir: &Path, name: &str, action: &str, args: &[&str]) {
    let arm = || crash_point::arm(name, action).unwrap();
    let family = name.split('.').next().unwrap();
    if family == "create" || ["process.locked", "process.registered"].contains(&name) {
        arm();
    }
    let pool = open(dir);
    match family {
        "create" => {}
        "process" if name != "process.joined" => {}
        "process" => {
            let leader = Member { row: args[0].parse().unwrap(), epoch: args[1].parse().unwrap() };
            arm();
            pool.join(leader).unwrap();
        }
        "namespace" => {
            arm();
            pool.namespace(&[mix(u64::from(std::process::id())) as u8; 32], 1, &PART_BYTES, "new").unwrap();
        }
        "grow" => grow(&pool, arm),
        "reserve" | "part" | "publish" => {
            let ns = namespace(&pool, MAIN);
            store_all(&pool, ns, &own_keys(1), 1);
            arm();
            store_chain(&pool, ns, &own_keys(4), 2);
        }
        "lease" => {
            let ns = namespace(&pool, MAIN);
            store_all(&pool, ns, &own_keys(4), 1);
            arm();
            assert_eq!(check_chain(&pool, ns, &own_keys(4)), 4);
        }
        "evict" => {
            let ns = namespace(&pool, MAIN);
            evict_something(&pool, ns);
            arm();
            evict_something(&pool, ns);
            let reserved = pool.reserve(ns, &own_keys(1), None, true).unwrap();
            pool.abort(&[reserved[0].1]).unwrap();
        }
        "quarantine" => {
            let ns = namespace(&pool, MAIN);
            pool.set_device_writes().unwrap();
            store_all(&pool, ns, &own_keys(1), 1);
            // One slot only: no other one brings a background thread to look.
            assert_eq!(pool.reserve(ns, &own_keys(2), None, true).unwrap().len(), 1);
            arm();
        }
        "reap" => reap(dir, &pool, arm),
        "retire" => retire(&pool, arm),
        "reset" => {
            let ns = namespace(&pool, MAIN + 1);
            store_all(&pool, ns, &own_keys(4), 1);
            arm();
            pool.reset(ns).unwrap();
        }
        "rebuild" => {
            store_all(&pool, namespace(&pool, MAIN), &own_keys(4), 1);
            arm();
            pool.rebuild_index().unwrap();
        }
        other => panic!("no workload for the crash points of {other}"),
    }
}

fn evicted(pool: &Pool) -> u64 {
    pool.stats().iter().find(|(name, _)| *name == "blocks_evicted").unwrap().1
}

fn evict_something(pool: &Arc<Pool>, ns: Namespace) {
    let before = evicted(pool);
    let mut number = (1 << 42) + mix(before ^ u64::from(std::process::id())) % (1 << 40);
    in_time("evicting", || {
        store_all(pool, ns, &[key(number)], 1);
        number += 1;
        evicted(pool) > before
    });
}

fn grow(pool: &Arc<Pool>, arm: impl Fn()) {
    let ns = namespace(pool, MAIN + 1);
    arm();
    pool.grow_ahead(ns).unwrap();
    in_time("growing", || pool.namespace_stats(ns).unwrap()[0].1 > 0);
}

/// Another namespace takes everything, then the main one starves until it is given an extent.
fn retire(pool: &Arc<Pool>, arm: impl Fn()) {
    let (full, starving) = (namespace(pool, MAIN + 2), namespace(pool, MAIN + 3));
    // A chain whose head fills the extent that will be taken, and whose tail lies in another.
    let chain = own_keys(90);
    in_time("storing a chain", || {
        store_chain(pool, full, &chain, 1);
        check_chain(pool, full, &chain) == chain.len()
    });
    let first = (1 << 44) + (u64::from(std::process::id()) << 20);
    store_all(pool, full, &keys(first..first + 160), 1);
    arm();
    store_all(pool, starving, &own_keys(1), 1);
}

/// Somebody dies with a reservation, and we are there first. A sibling may be faster, so try again.
fn reap(dir: &Path, pool: &Arc<Pool>, arm: impl Fn()) {
    arm();
    for _ in 0..20 {
        let program = std::env::current_exe().unwrap();
        let mut child = Command::new(program)
            .args(["point", dir.to_str().unwrap(), "publish.linked", "kill"])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        child.wait().unwrap();
        pool.reap().unwrap();
    }
}
