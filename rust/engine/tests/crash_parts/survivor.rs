//! A process that lives on: it uses the pool, cleans up, and finds nothing amiss.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pegaflow_engine::{BlockRef, ErrorKind, Key, Namespace, Pool, admin};

use crate::kill::blocks::{MAIN, check_chain, fill, keys, namespace, open, store_all, store_chain, wrong_block};
use crate::kill::patience::PATIENCE;
use crate::kill::stopwatch::{SLEEPS_MAX, Stopwatch, Took};

/// Blocks that the survivor holds all the time.
const HELD: u64 = 8;
/// No operation may wait more often, whatever happens to siblings. What is aimed at is one wait of 20 ms for a lock;
/// the longest is printed.
const WAITS_MAX: u64 = 10;

pub struct Survivor {
    pub pool: Arc<Pool>,
    ns: Namespace,
    /// One whose blocks come and go.
    other: Namespace,
    held: Vec<BlockRef>,
    chain: Vec<Key>,
}

impl Survivor {
    /// Attach and hold a chain of blocks, so that deaths of others have something to spoil.
    pub fn new(dir: &Path) -> Self {
        let pool = open(dir);
        let ns = namespace(&pool, MAIN);
        let chain = keys(0..HELD);
        while check_chain(&pool, ns, &chain) < chain.len() {
            store_all(&pool, ns, &chain[..1], 1);
            store_chain(&pool, ns, &chain, 1);
        }
        let held = pool.lease(ns, &chain, 0, chain.len()).unwrap();
        assert_eq!(held.len(), chain.len());
        let other = namespace(&pool, MAIN + 1);
        Self { pool, ns, other, held, chain }
    }

    /// Attach and hold nothing, as who comes when all others are dead.
    pub fn latecomer(dir: &Path) -> Self {
        let pool = open(dir);
        let ns = namespace(&pool, MAIN);
        let other = namespace(&pool, MAIN + 1);
        Self { pool, ns, other, held: Vec::new(), chain: Vec::new() }
    }

    /// What is held has not changed.
    pub fn check_held(&self) {
        for (block, key) in self.held.iter().zip(&self.chain) {
            assert_eq!(wrong_block(&self.pool, *block, key), None);
        }
    }

    /// Everything that an engine does with a pool. Returns the longest time that one operation took.
    pub fn operate(&self, watch: &Stopwatch, seed: u64) -> Took {
        let (pool, ns) = (&self.pool, self.ns);
        let mut longest = Took::default();
        let mut time = |name: &str, work: &mut dyn FnMut()| {
            let (_, took) = watch.time(work);
            assert!(took.sleeps < WAITS_MAX * SLEEPS_MAX, "{name} took {took:?}");
            longest = longest.max(took);
        };
        let first = (1 << 48) + (seed << 8);
        let absent = keys(first..first + 100);
        time("contains", &mut || assert!(!pool.contains(ns, &absent).unwrap().contains(&true)));
        let wanted = &absent[..4];
        let mut reserved = Vec::new();
        time("reserve", &mut || reserved = pool.reserve(ns, wanted, None, true).unwrap());
        let blocks: Vec<_> = reserved.iter().map(|(_, block)| *block).collect();
        reserved.iter().for_each(|(index, block)| assert!(fill(pool, *block, &wanted[*index], seed)));
        time("publish", &mut || assert!(pool.publish(&blocks).unwrap() <= 4));
        let mut leased = Vec::new();
        time("lease", &mut || leased = pool.lease(ns, wanted, 0, 4).unwrap());
        for (block, key) in leased.iter().zip(wanted) {
            assert_eq!(wrong_block(pool, *block, key), None);
        }
        time("touch", &mut || assert!(pool.touch(ns, wanted).unwrap() <= 4));
        time("release", &mut || pool.release(&leased).unwrap());
        time("reset", &mut || assert!(pool.reset(self.other).is_ok()));
        time("namespace", &mut || {
            if let Err(error) = pool.namespace(&[MAIN; 32], 0, &crate::kill::blocks::PART_BYTES, "kill tests") {
                assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
            }
        });
        longest
    }

    /// Clean up after the dead. Returns how long it took.
    pub fn reap(&self, watch: &Stopwatch) -> Took {
        watch.time(|| self.pool.reap().unwrap()).1
    }

    /// What is amiss: dead processes, and what they leased, reserved or locked; every broken invariant.
    fn problems(&self, checksums: bool) -> Vec<String> {
        let facts: serde_json::Value = serde_json::from_str(&admin::inspect(self.pool.path()).unwrap()).unwrap();
        let report = admin::verify(self.pool.path(), checksums, &mut |_, _| {}).unwrap();
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        let listed = report["problems"].as_array().unwrap().iter();
        let mut problems: Vec<String> = listed.map(|problem| problem.as_str().unwrap().to_owned()).collect();
        let sum = |table: &str, field: &str| -> u64 {
            facts[table].as_array().unwrap().iter().map(|row| row[field].as_u64().unwrap()).sum()
        };
        let dead = facts["processes"].as_array().unwrap().iter().filter(|process| process["alive"] == false).count();
        for (what, count, expected) in [
            ("processes are dead", dead as u64, 0),
            ("slots are reserved", sum("namespaces", "blocks_reserved"), 0),
            ("leases are held", sum("namespaces", "leases"), self.held.len() as u64),
            ("locks are held", facts["locks_held"].as_u64().unwrap(), 0),
            ("segments are on their way", facts["segments"]["creating"].as_u64().unwrap(), 0),
        ] {
            if count != expected {
                problems.push(format!("{count} {what} instead of {expected}"));
            }
        }
        problems
    }

    /// Nothing of the dead is left, and every invariant holds, once all is settled.
    pub fn assert_sound(&self, checksums: bool, after: &str) {
        let started = Instant::now();
        loop {
            let problems = self.problems(checksums);
            if problems.is_empty() {
                return self.check_held();
            }
            // Background threads may still be at work; what counts is what stays.
            assert!(started.elapsed() < PATIENCE, "after {after}: {problems:?}");
            if problems.iter().any(|problem| problem.contains("waits to be rebuilt"))
                && let Err(error) = self.pool.rebuild_index()
            {
                assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
            }
            self.pool.reap().unwrap();
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Give back what is held, and leave.
    pub fn leave(self) {
        self.check_held();
        self.pool.release(&self.held).unwrap();
    }
}
