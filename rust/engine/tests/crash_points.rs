//! A process dies by kill -9 at every named point, one after the other. Whoever is left, or comes later, goes on with
//! right bytes, and nothing is lost.
#![allow(missing_docs)]

mod common;
mod kill;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::ShmDir;
use kill::blocks::{MAIN, check_chain, keys, namespace, open, store_all, store_chain};
use kill::child::Worker;
use kill::settled::assert_nothing_lost;
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use pegaflow_engine::{Key, Namespace, Pool, crash_point};

/// Points that only the object store passes; its own tests kill there.
const OF_THE_OBJECT_STORE: &[&str] = &["chain.linked", "replace.superseded"];

fn points_of_the_pool() -> impl Iterator<Item = &'static str> {
    crash_point::names().iter().copied().filter(|name| !OF_THE_OBJECT_STORE.contains(name))
}

/// A worker dies at `name`, or the test fails since it never got there.
fn die_at(dir: &Path, name: &str, leader: Option<&Pool>) {
    let member = leader.map(|pool| pool.member().unwrap());
    let member = member.map(|member| (member.row.to_string(), member.epoch.to_string()));
    let mut args = vec![name, "kill"];
    args.extend(member.iter().flat_map(|(row, epoch)| [row.as_str(), epoch.as_str()]));
    let mut worker = Worker::start("point", dir, &args);
    let status = worker.end();
    assert!(matches!(status, WaitStatus::Signaled(_, Signal::SIGKILL, _)), "{name} was never reached: {status:?}");
}

/// Lookups miss while the index waits to be rebuilt; a survivor's background thread does that within a second or two.
fn check_in_time(pool: &Pool, ns: Namespace, chain: &[Key]) -> usize {
    let started = Instant::now();
    loop {
        let found = check_chain(pool, ns, chain);
        if found == chain.len() || started.elapsed() > Duration::from_secs(5) {
            return found;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn assert_goes_on(pool: &Arc<Pool>) {
    let (ns, other) = (namespace(pool, MAIN), namespace(pool, MAIN + 1));
    let chain = keys(5000..5010);
    store_all(pool, ns, &keys(5000..5001), 3);
    store_chain(pool, ns, &chain, 3);
    assert_eq!(check_chain(pool, ns, &chain), 10);
    assert_nothing_lost(pool, &[ns, other]);
    assert_eq!(store_chain(pool, ns, &chain, 4), 10);
    assert_eq!(check_chain(pool, ns, &chain), 10);
}

#[test]
fn survivors_go_on_after_a_death_at_every_point() {
    for name in points_of_the_pool().filter(|name| !name.starts_with("create.")) {
        println!("{name}");
        let dir = ShmDir::new("survivor");
        let pool = open(&dir.0);
        let ns = namespace(&pool, MAIN);
        let before = keys(0..8);
        store_all(&pool, ns, &before[..1], 1);
        store_chain(&pool, ns, &before, 1);
        let leased = pool.lease(ns, &before, 0, 8).unwrap();
        assert_eq!(leased.len(), 8);
        die_at(&dir.0, name, Some(&pool));
        assert_eq!(check_in_time(&pool, ns, &before), 8, "what a survivor leases stays");
        pool.release(&leased).unwrap();
        assert_goes_on(&pool);
    }
}

#[test]
fn a_latecomer_finds_a_whole_pool_after_a_death_at_every_point() {
    for name in points_of_the_pool().filter(|name| *name != "process.joined") {
        println!("{name}");
        let dir = ShmDir::new("latecomer");
        die_at(&dir.0, name, None);
        assert_goes_on(&open(&dir.0));
    }
}
