//! Whether a pool that nobody else is using has lost anything: a slot, a lease, a block, a byte.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pegaflow_engine::{Namespace, Pool, admin};

use super::blocks::{check_chain, key, store_all};
use super::patience::PATIENCE;
use super::random::mix;

/// Keys from here on are used by nobody but [`assert_nothing_lost`].
pub const FRESH: u64 = 1 << 50;

pub fn stat(stats: &[(&'static str, u64)], name: &str) -> u64 {
    stats.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no counter {name}")).1
}

/// Every invariant and checksum of the files, as `pegaflow verify` sees them.
fn problems(pool: &Pool) -> Vec<serde_json::Value> {
    let report = admin::verify(pool.path(), true, &mut |_, _| {}).unwrap();
    let mut report: serde_json::Value = serde_json::from_str(&report).unwrap();
    std::mem::take(report["problems"].as_array_mut().unwrap())
}

fn dead_processes(pool: &Pool) -> usize {
    let facts: serde_json::Value = serde_json::from_str(&admin::inspect(pool.path()).unwrap()).unwrap();
    facts["processes"].as_array().unwrap().iter().filter(|process| process["alive"] == false).count()
}

/// Reap until nothing of the dead is left, then check everything. Background threads may still be at work (rebuilding
/// an index, taking an extent out of use), and a check is exact only while nobody is: what counts is what stays.
pub fn assert_settled(pool: &Pool) {
    let started = Instant::now();
    while pool.reap().unwrap() > 0 || dead_processes(pool) > 0 {
        assert!(started.elapsed() < PATIENCE, "dead processes are never reaped");
        std::thread::sleep(Duration::from_millis(5));
    }
    let started = Instant::now();
    loop {
        let problems = problems(pool);
        if problems.is_empty() {
            return;
        }
        assert!(started.elapsed() < PATIENCE, "pegaflow verify: {problems:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The caller is the only process, and there is no file but the pool's own.
pub fn assert_nobody_left(pool: &Pool) {
    let facts: serde_json::Value = serde_json::from_str(&admin::inspect(pool.path()).unwrap()).unwrap();
    let me = pool.member().unwrap();
    let rows: Vec<_> = facts["processes"].as_array().unwrap().iter().map(|process| &process["row"]).collect();
    assert_eq!(rows, [&serde_json::json!(me.row)], "process rows in use");
    assert_eq!(facts["locks_held"], 0);
    assert_eq!(facts["processes"][0]["leases"], 0);
    let files = std::fs::read_dir(pool.path()).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let known = |name: &str| ["control", "gone-v1", "traffic-v2"].contains(&name) || name.starts_with("segment-");
    let foreign: Vec<_> = files.filter(|name| !known(name)).collect();
    assert!(foreign.is_empty(), "files that nobody needs: {foreign:?}");
}

/// What a device of a dead process may still write comes back after five seconds.
fn stats_without_quarantine(pool: &Pool, ns: Namespace) -> Vec<(&'static str, u64)> {
    let started = Instant::now();
    loop {
        let stats = pool.namespace_stats(ns).unwrap();
        let settled = stat(&stats, "slots_free") + stat(&stats, "blocks_sealed") == stat(&stats, "slots");
        if settled || started.elapsed() > PATIENCE {
            return stats;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Fill the whole pool anew through one namespace after another: a slot or a lease that was lost would show as a
/// block that is not there. The caller is the only process and holds no lease.
pub fn assert_nothing_lost(pool: &Arc<Pool>, spaces: &[Namespace]) {
    assert_settled(pool);
    for ns in spaces {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let first = FRESH | mix(now.as_nanos() as u64) >> 16;
        let mut stored = 0;
        loop {
            let stats = stats_without_quarantine(pool, *ns);
            let (slots, free, sealed) =
                (stat(&stats, "slots"), stat(&stats, "slots_free"), stat(&stats, "blocks_sealed"));
            assert_eq!(slots, free + sealed, "every slot is free or holds a block: {stats:?}");
            if stored > 0 && stored >= slots && free == 0 {
                break;
            }
            for number in first + stored..first + stored + 16 {
                // Used twice, so that no later one makes it go.
                store_all(pool, *ns, &[key(number)], first);
                pool.touch(*ns, &[key(number)]).unwrap();
            }
            stored += 16;
        }
        let slots = stat(&pool.namespace_stats(*ns).unwrap(), "slots");
        for number in first + stored - slots..first + stored {
            assert_eq!(check_chain(pool, *ns, &[key(number)]), 1, "fresh block {number} of {slots} found no slot");
        }
    }
    pool.rebuild_index().unwrap();
    assert_settled(pool);
}
