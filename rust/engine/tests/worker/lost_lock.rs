//! A process that loses its liveness lock without knowing: something in it closes descriptors of others.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

use pegaflow_engine::{BlockRef, ErrorKind, Key, Member, Namespace, Pool, Result, crash_point};

use crate::blocks::{CONTESTED, MAIN, PART_BYTES, check_chain, fill, keys, namespace, open, store_all, store_chain};
use crate::{say, wait_for_parent};

/// Put something else in the place of every descriptor of a control file.
fn lose_the_lock() {
    replace_descriptors(|_| File::open("/dev/null").unwrap());
}

/// Put a file in their place that can be locked, too: locks that the process takes from now on are those of that file.
pub fn lose_all_locks() {
    replace_descriptors(|_| File::options().write(true).open("/dev/null").unwrap());
}

/// Open every control file anew in the place of its descriptors: the locks are gone, the files are there.
pub fn lose_only_the_lock() {
    replace_descriptors(|path| File::options().read(true).write(true).open(path).unwrap());
}

fn replace_descriptors(other: impl Fn(&Path) -> File) {
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let entry = entry.unwrap();
        let number: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
        if let Ok(target) = std::fs::read_link(entry.path())
            && target.ends_with("control")
        {
            let other = other(&target);
            // SAFETY: the descriptor stays open, for another file or description; its owner only locks and claims with
            // it.
            assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number);
        }
    }
}

struct Held {
    pool: Arc<Pool>,
    ns: Namespace,
    chain: Vec<Key>,
    leased: Vec<BlockRef>,
    reserved: BlockRef,
}

fn hold(dir: &Path) -> Held {
    let pool = open(dir);
    let (ns, chain) = (namespace(&pool, MAIN), keys(CONTESTED..CONTESTED + 4));
    store_all(&pool, ns, &chain[..1], 1);
    store_chain(&pool, ns, &chain[..3], 1);
    let leased = pool.lease(ns, &chain, 0, 3).unwrap();
    assert_eq!(leased.len(), 3);
    let reserved = pool.reserve(ns, &chain, None, true).unwrap()[0].1;
    Held { pool, ns, chain, leased, reserved }
}

/// Lose it between two operations: all are refused from then on, until the pool is opened again.
pub fn between(dir: &Path) {
    let held = hold(dir);
    lose_the_lock();
    say(&held.pool.member().unwrap().row.to_string());
    wait_for_parent();
    assert_refused(&held);
    let again = open(dir);
    assert!(!Arc::ptr_eq(&again, &held.pool));
    drop(held);
    assert_eq!(check_chain(&again, namespace(&again, MAIN), &keys(CONTESTED..CONTESTED + 3)), 3);
}

/// Lose it, and stand still at `point` of an operation.
pub fn within(dir: &Path, point: &str) {
    let held = hold(dir);
    lose_the_lock();
    crash_point::arm(point, "stop").unwrap();
    let (pool, ns) = (&held.pool, held.ns);
    // Whatever comes of these: from the one on in which it was reaped they are refused.
    let _used = pool.lease(ns, &held.chain, 0, 3);
    let new = keys(CONTESTED + 10..CONTESTED + 12);
    if let Ok(reserved) = pool.reserve(ns, &new, None, true) {
        let _filled = reserved.iter().filter(|(index, block)| fill(pool, *block, &new[*index], 1)).count();
        let blocks: Vec<BlockRef> = reserved.iter().map(|(_, block)| *block).collect();
        let _published = pool.publish(&blocks);
    }
    assert_refused(&held);
}

fn assert_refused(held: &Held) {
    let Held { pool, ns, chain, leased, reserved } = held;
    refused("lookup", pool.lookup(*ns, chain, 0));
    refused("contains", pool.contains(*ns, chain));
    refused("lease", pool.lease(*ns, chain, 0, 3));
    refused("touch", pool.touch(*ns, chain));
    refused("release", pool.release(leased));
    refused("reserve", pool.reserve(*ns, chain, None, true));
    refused("mark_written", pool.mark_written(0, &[*reserved], None));
    refused("publish", pool.publish(&[*reserved]));
    refused("abort", pool.abort(&[*reserved]));
    refused("quarantine", pool.quarantine(&[*reserved]));
    refused("locate", pool.locate(leased[0], 0));
    refused("reset", pool.reset(*ns));
    refused("reap", pool.reap());
    refused("rebuild_index", pool.rebuild_index());
    refused("grow_ahead", pool.grow_ahead(*ns));
    refused("set_device_writes", pool.set_device_writes());
    refused("join", pool.join(Member { row: 0, epoch: 1 }));
    refused("namespace", pool.namespace(&[1; 32], 0, &PART_BYTES, "late"));
    let space = pool.space();
    assert!(space.write_target(*reserved, 0).is_none() && space.read_source(leased[0], 0).is_none());
    assert!(!space.mark_part(*reserved, 0, None), "not its slot any more");
}

fn refused<T>(what: &str, outcome: Result<T>) {
    assert_eq!(outcome.err().map(|error| error.kind()), Some(ErrorKind::Closed), "{what}");
}
