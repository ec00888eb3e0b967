//! The process that serves a pool's SSD tier is killed (kill -9) again and again while others use it: the next one goes
//! on, no byte is wrong, what was reset stays away, and nothing of the dead is left.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "shared with the processes to kill")]

mod common;
mod kill;

use std::time::{Duration, Instant};

use common::ShmDir;
use kill::blocks::{check_chain, keys, namespace, open, store_chain};
use kill::child::Worker;
use kill::random::{Random, seed};
use kill::tier::{count, fetch, on_ssd, serve, ssd_dir, state, until};
use pegaflow_engine::tier::TierState;
use pegaflow_engine::{ErrorKind, Pool, admin};

const SPACE: u8 = 77;
/// Deaths of a leader.
const KILLS: u64 = 12;

struct Files(std::path::PathBuf);

impl Drop for Files {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

fn problems(pool: &Pool) -> Vec<String> {
    let report: serde_json::Value =
        serde_json::from_str(&admin::verify(pool.path(), true, &mut |_, _| {}).unwrap()).unwrap();
    report["problems"].as_array().unwrap().iter().map(ToString::to_string).collect()
}

fn leases_and_reservations(pool: &Pool) -> u64 {
    let facts: serde_json::Value = serde_json::from_str(&admin::inspect(pool.path()).unwrap()).unwrap();
    let of = |row: &serde_json::Value| row["leases"].as_u64().unwrap() + row["blocks_reserved"].as_u64().unwrap();
    facts["namespaces"].as_array().unwrap().iter().map(of).sum()
}

#[test]
fn leaders_are_killed_and_the_next_one_goes_on() {
    let mut random = Random::new(seed("tier_kill"));
    let kills = std::env::var("PEGAFLOW_TEST_KILLS").map_or(KILLS, |text| text.parse().unwrap());
    let dir = ShmDir::new("tier-kill");
    let _files = Files(ssd_dir(&dir.0));
    let pool = open(&dir.0);
    let ns = namespace(&pool, SPACE);
    let start = |random: &mut Random| Worker::start("tier", &dir.0, &[&(random.next() >> 1).to_string()]);
    let mut leader = start(&mut random);
    for round in 0..kills {
        leader.line_in_time("leading");
        let next = start(&mut random);
        until("serving", || state(&pool) == TierState::Serving);
        pool.use_ssd(ns).unwrap();
        let used_for = Duration::from_millis(20 + random.below(150));
        let started = Instant::now();
        while started.elapsed() < used_for {
            let first = (1 << 45) + random.below(60) * 100;
            let chain = keys(first..first + 6);
            fetch(&pool, ns, &chain, Duration::from_millis(random.below(10)));
            check_chain(&pool, ns, &chain);
        }
        leader.kill();
        let died = Instant::now();
        // Without a leader nobody waits.
        let fresh = keys((1 << 47) + round * 10..(1 << 47) + round * 10 + 4);
        store_chain(&pool, ns, &fresh[..1], 1);
        until("a successor", || state(&pool) == TierState::Serving);
        println!("nobody served for {:?}", died.elapsed());
        leader = next;
    }
    let mut number = 1 << 49;
    until("blocks are written and asked for", || {
        number += 1;
        store_chain(&pool, ns, &keys(number..number + 1), 1);
        fetch(&pool, ns, &keys(number..number + 2), Duration::from_millis(10));
        count(&pool, "spilled_blocks") > 0 && count(&pool, "requests") > 0
    });
    println!("{:?}", pool.ssd().unwrap().unwrap().numbers);
    leader.kill();
    pool.reap().unwrap();
    until("an end of what the dead held", || {
        pool.reap().unwrap();
        leases_and_reservations(&pool) == 0
    });
    assert_eq!(problems(&pool), Vec::<String>::new());
    // The last one serves, and what is reset now stays away even from a pool that is made anew.
    serve(&pool, &dir.0);
    until("serving", || state(&pool) == TierState::Serving);
    let kept = keys(1 << 48..(1 << 48) + 6);
    until("a chain on disk", || {
        store_chain(&pool, ns, &kept, 5);
        pool.lookup(ns, &kept, 0).unwrap() == kept.len() && count(&pool, "records") >= 6
    });
    // Busy: the files are slow to forget.
    until("a reset", || pool.reset(ns).is_ok());
    let path = pool.path().to_owned();
    drop(pool);
    admin::remove(&path, false).unwrap();
    let pool = open(&dir.0);
    serve(&pool, &dir.0);
    let ns = namespace(&pool, SPACE);
    pool.use_ssd(ns).unwrap();
    until("serving", || state(&pool) == TierState::Serving);
    assert_eq!(fetch(&pool, ns, &kept, Duration::from_secs(1)), 0);
}

#[test]
fn the_whole_pool_is_removed_and_the_next_one_finds_its_blocks_on_disk() {
    let dir = ShmDir::new("tier-reboot");
    let _files = Files(ssd_dir(&dir.0));
    let chain = keys(0..30);
    for life in 0..2 {
        let pool = open(&dir.0);
        serve(&pool, &dir.0);
        let ns = namespace(&pool, SPACE);
        pool.use_ssd(ns).unwrap();
        until("serving", || state(&pool) == TierState::Serving);
        if life == 0 {
            until("a chain on disk", || {
                store_chain(&pool, ns, &chain, 1);
                count(&pool, "records") as usize == chain.len()
            });
        } else {
            until("the namespace", || on_ssd(&pool, ns, &chain) == chain.len());
            until("all blocks", || fetch(&pool, ns, &chain, Duration::from_secs(5)) == chain.len());
            assert_eq!(check_chain(&pool, ns, &chain), chain.len());
            assert_eq!(count(&pool, "read_blocks"), chain.len() as u64);
        }
        let path = pool.path().to_owned();
        drop(pool);
        admin::remove(&path, false).unwrap();
        assert!(!path.exists(), "no file of the pool is left");
    }
}

#[test]
fn files_that_another_pool_has_leave_the_tier_off_until_they_are_free() {
    let (first_dir, second_dir) = (ShmDir::new("tier-first"), ShmDir::new("tier-second"));
    let _files = Files(ssd_dir(&first_dir.0));
    let (first, second) = (open(&first_dir.0), open(&second_dir.0));
    serve(&first, &first_dir.0);
    until("serving", || state(&first) == TierState::Serving);
    serve(&second, &first_dir.0);
    let facts = || second.ssd().unwrap().unwrap();
    until("a reason", || facts().problem.is_some_and(|problem| problem.contains("in use by another process")));
    assert_ne!(state(&second), TierState::Serving);
    drop(first);
    until("serving of the other pool", || state(&second) == TierState::Serving);
    assert_eq!(facts().problem, None);
    let error = second.serve_ssd(pegaflow_engine::tier::TierOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
}
