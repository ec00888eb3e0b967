//! One process of the hammer: does everything that a pool can do, in random order and for ever, and checks every byte.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use pegaflow_engine::{BlockRef, ErrorKind, Key, Namespace, Pool, crash_point};

use crate::blocks::{MAIN, PART_BYTES, fill, key, open, wrong_block};
use crate::random::Random;
use crate::report::{CHECKED, OPERATION_COUNT, Report};
use crate::stopwatch::Stopwatch;

/// Chains of keys; those of one group have the same first blocks, as conversations with one system prompt have.
const CHAINS: u64 = 24;
const GROUP: u64 = 4;
const SHARED_LENGTH: u64 = 6;
const LENGTH: u64 = 20;
const HELD_MAX: usize = 6;

/// Namespaces, each with its share of the steps in percent: more than the pool has extents, so that one of them always
/// starves and has to take an extent from another.
const SHARES: [u64; 5] = [65, 20, 5, 5, 5];

const LOOKUP: usize = 0;
const LEASE: usize = 1;
const RELEASE: usize = 2;
const TOUCH: usize = 3;
const RESERVE: usize = 4;
const PUBLISH: usize = 5;
const ABORT: usize = 6;
const RESET: usize = 7;
const REAP: usize = 8;
const REBUILD: usize = 9;

/// Keys of chain `chain`, head first.
pub fn chain(chain: u64) -> Vec<Key> {
    let number = |position: u64| {
        if position < SHARED_LENGTH { 1_000_000 + chain / GROUP * 100 + position } else { chain * 100 + position }
    };
    (0..LENGTH).map(|position| key(number(position))).collect()
}

type Lease = (Vec<BlockRef>, Vec<Key>);

struct Hammer {
    dir: PathBuf,
    /// Always there but while it is opened anew.
    pool: Option<Arc<Pool>>,
    random: Random,
    watch: Stopwatch,
    report: Report,
    held: Vec<Lease>,
}

pub fn run(dir: &Path, seed: u64, report_file: &Path) {
    let mut hammer = Hammer {
        dir: dir.to_owned(),
        pool: Some(open(dir)),
        random: Random::new(seed),
        watch: Stopwatch::of_this_thread(),
        report: Report::default(),
        held: Vec::new(),
    };
    loop {
        for _ in 0..16 {
            hammer.step();
        }
        // Sooner or later this process kills itself, at a named point rather than from outside at any time.
        if hammer.random.chance(4) {
            let points: Vec<&str> = crash_point::names().to_vec();
            crash_point::arm(points[hammer.random.below(points.len() as u64) as usize], "kill").unwrap();
        }
        let mut report = hammer.report.clone();
        report.add_stats(&hammer.pool().stats());
        report.write(report_file);
    }
}

impl Hammer {
    fn pool(&self) -> &Pool {
        self.pool.as_ref().expect("open between steps")
    }

    fn time<T>(&mut self, operation: usize, work: impl FnOnce(&Pool) -> T) -> T {
        let (result, took) = self.watch.time(|| work(self.pool()));
        self.report.took(operation, took);
        self.report.count(OPERATION_COUNT, 1);
        result
    }

    fn choose_space(&mut self) -> u8 {
        let mut percent = self.random.below(100);
        for (space, share) in SHARES.iter().enumerate() {
            if percent < *share {
                return space as u8;
            }
            percent -= share;
        }
        unreachable!("the shares are 100 percent")
    }

    fn step(&mut self) {
        let which = MAIN + self.choose_space();
        let ns = match self.pool().namespace(&[which; 32], 0, &PART_BYTES, "hammer") {
            Ok(ns) => ns,
            // A sibling holds the lock over namespaces for too long: next time.
            Err(error) => return assert_eq!(error.kind(), ErrorKind::Busy, "{error}"),
        };
        match self.random.below(1000) {
            0..400 => self.store(ns),
            400..750 => self.read(ns, false),
            750..850 => self.read(ns, true),
            850..930 => self.release_one(),
            930..960 => self.touch(ns),
            960..970 if which != MAIN => {
                self.time(RESET, |pool| pool.reset(ns)).unwrap();
            }
            970..975 => {
                self.time(REAP, Pool::reap).unwrap();
            }
            975..980 => self.rebuild(),
            980..983 => self.reopen(),
            _ => {}
        }
    }

    fn store(&mut self, ns: Namespace) {
        let mut keys = chain(self.random.below(CHAINS));
        keys.truncate(1 + self.random.below(LENGTH) as usize);
        let present = self.time(LOOKUP, |pool| pool.lookup(ns, &keys, 0)).unwrap();
        let evict = self.random.chance(95);
        let parents: Vec<Option<Key>> = (present..keys.len()).map(|i| i.checked_sub(1).map(|i| keys[i])).collect();
        let absent = &keys[present..];
        let reserved = self.time(RESERVE, |pool| pool.reserve(ns, absent, Some(&parents), evict)).unwrap();
        let nonce = self.random.next();
        let blocks: Vec<BlockRef> = reserved.iter().map(|(_, block)| *block).collect();
        for (position, block) in &reserved {
            if self.random.chance(98) {
                assert!(fill(self.pool(), *block, &absent[*position], nonce), "a reserved block is there");
            }
        }
        if self.random.chance(4) {
            self.time(ABORT, |pool| pool.abort(&blocks)).unwrap();
        } else {
            self.time(PUBLISH, |pool| pool.publish(&blocks)).unwrap();
        }
    }

    fn check(&mut self, blocks: &[BlockRef], keys: &[Key]) {
        for (block, key) in blocks.iter().zip(keys) {
            if let Some(what) = wrong_block(self.pool(), *block, key) {
                panic!("wrong bytes: {what}");
            }
        }
        self.report.count(CHECKED, blocks.len() as u64);
    }

    fn read(&mut self, ns: Namespace, hold: bool) {
        let keys = chain(self.random.below(CHAINS));
        let start = if self.random.chance(50) { 0 } else { self.random.below(LENGTH) as usize };
        let stop = start + self.random.below(LENGTH) as usize;
        let leased = self.time(LEASE, |pool| pool.lease(ns, &keys, start, stop)).unwrap();
        let keys = keys[start..start + leased.len()].to_vec();
        self.check(&leased, &keys);
        if self.random.chance(30) {
            std::thread::yield_now();
            self.check(&leased, &keys);
        }
        if hold && self.held.len() < HELD_MAX {
            self.held.push((leased, keys));
        } else {
            self.time(RELEASE, |pool| pool.release(&leased)).unwrap();
        }
    }

    fn release_one(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let (leased, keys) = self.held.swap_remove(self.random.below(self.held.len() as u64) as usize);
        self.check(&leased, &keys);
        self.time(RELEASE, |pool| pool.release(&leased)).unwrap();
    }

    fn touch(&mut self, ns: Namespace) {
        let keys = chain(self.random.below(CHAINS));
        self.time(TOUCH, |pool| pool.touch(ns, &keys)).unwrap();
    }

    fn rebuild(&mut self) {
        if let Err(error) = self.time(REBUILD, Pool::rebuild_index) {
            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        }
    }

    /// Leave the pool and come back, with what we hold.
    fn reopen(&mut self) {
        self.held.clear();
        let stats = self.pool().stats();
        self.report.add_stats(&stats);
        self.pool = None;
        self.pool = Some(open(&self.dir));
    }
}
