//! One process of the hammer: does everything that a pool can do, in random order and for ever, and checks every byte.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::unistd::gettid;
use pegaflow_engine::{BlockRef, ErrorKind, Key, Namespace, Pool, crash_point};

use crate::blocks::{fill_parts, nonce_of};
use crate::follower::{Follower, Task};
use crate::plan::Plan;
use crate::random::Random;
use crate::report::{BYTES_READ, BYTES_WRITTEN, CHECKED, OPERATIONS, Report, WRONG};
use crate::resets::{Resets, made_ns, nonce, now_ns};
use crate::stopwatch::{Stopwatch, Took};

const HELD_MAX: usize = 6;
const REPORT_PAUSE: Duration = Duration::from_millis(20);

/// Blocks that are leased, with their keys, and when the last reset before that began.
struct Held {
    space: usize,
    blocks: Vec<BlockRef>,
    keys: Vec<Key>,
    reset_ns: u64,
}

/// Blocks that are reserved, with their keys.
struct Open {
    space: usize,
    blocks: Vec<BlockRef>,
    keys: Vec<Key>,
    nonce: u64,
}

struct Hammer {
    dir: PathBuf,
    plan: Plan,
    /// Always there but while it is opened anew.
    pool: Option<Arc<Pool>>,
    random: Random,
    /// In one thread of the process: the one that is told when it was stopped.
    watch: Option<Stopwatch>,
    resets: Resets,
    report: Report,
    report_file: PathBuf,
    held: Vec<Held>,
    open: Vec<Open>,
    quarantines_left: u64,
    /// Behind the pool: it outlives our membership.
    follower: Option<Follower>,
}

/// Hammer the pool in `dir` until the file `leave` is there.
pub fn run(dir: &Path, plan: &Plan, seed: u64, report_file: &Path) {
    let mut watch = Stopwatch::of_this_thread();
    let (tell, told) = std::sync::mpsc::channel();
    let others: Vec<_> = (1..plan.threads)
        .map(|number| {
            let (dir, plan, file) = (dir.to_owned(), plan.clone(), report_file.with_extension(number.to_string()));
            let tell = tell.clone();
            let work = move || {
                tell.send(gettid()).unwrap();
                Hammer::new(&dir, plan, seed + number, &file, None).run();
            };
            Stopwatch::start_threads(|| std::thread::spawn(work))
        })
        .collect();
    told.iter().take(others.len()).for_each(|thread| watch.waits_for(thread));
    Hammer::new(dir, plan.clone(), seed, report_file, Some(watch)).run();
    others.into_iter().for_each(|thread| thread.join().unwrap());
}

impl Hammer {
    fn new(dir: &Path, plan: Plan, seed: u64, report_file: &Path, watch: Option<Stopwatch>) -> Self {
        let mut hammer = Self {
            dir: dir.to_owned(),
            pool: None,
            random: Random::new(seed),
            watch,
            resets: Resets::open(dir),
            report: Report::default(),
            report_file: report_file.to_owned(),
            held: Vec::new(),
            open: Vec::new(),
            quarantines_left: plan.quarantines,
            follower: None,
            plan,
        };
        hammer.attach();
        hammer
    }

    fn run(mut self) {
        let mut reported = Instant::now();
        loop {
            for _ in 0..16 {
                self.step();
            }
            // Sooner or later this process kills itself, at a named point rather than from outside at any time.
            if self.random.chance(self.plan.arming_percent) {
                self.arm();
            }
            if self.follower.is_none() && self.plan.followers_of.is_some() && self.random.chance(10) {
                self.start_follower();
            }
            if reported.elapsed() >= REPORT_PAUSE {
                reported = Instant::now();
                self.write_report();
                if self.dir.join("leave").exists() {
                    return;
                }
            }
        }
    }

    fn start_follower(&mut self) {
        let plan_seed = self.plan.followers_of.expect("asked for");
        let leader = self.pool().member().unwrap();
        self.follower = Follower::start(&self.dir, plan_seed, leader);
    }

    /// Whether our follower has done it; if it died meanwhile, it is buried.
    fn follower_has_done(&mut self, task: Task, space: usize, blocks: &[BlockRef], keys: &[Key]) -> Option<bool> {
        if self.random.chance(50) {
            return None;
        }
        let done = self.follower.as_mut()?.has_done(task, space, blocks, keys);
        if !done {
            self.follower = None;
        }
        Some(done)
    }

    fn pool(&self) -> &Pool {
        self.pool.as_ref().expect("open between steps")
    }

    fn attach(&mut self) {
        let open = || Stopwatch::start_threads(|| self.plan.open(&self.dir));
        let (pool, took) = time_with(self.watch.as_ref(), open);
        self.report.took(operation("open"), took);
        self.pool = Some(pool);
    }

    fn arm(&mut self) {
        let points = crash_point::names();
        let point = points[self.random.below(points.len() as u64) as usize];
        let action = if self.plan.stops && self.random.chance(50) { "stop" } else { "kill" };
        crash_point::arm(point, action).unwrap();
    }

    fn write_report(&self) {
        let mut report = self.report.clone();
        report.add_stats(&self.pool().stats());
        report.write(&self.report_file);
    }

    fn time<T>(&mut self, name: &str, work: impl FnOnce(&Pool) -> T) -> T {
        let (result, took) = time_with(self.watch.as_ref(), || work(self.pool()));
        self.report.took(operation(name), took);
        result
    }

    fn step(&mut self) {
        let space = self.plan.any_space(&mut self.random);
        let Some(ns) = self.plan.spaces[space].of(self.pool()) else { return };
        let meddling = self.plan.meddling_per_mille;
        if self.random.below(1000) < 4 * meddling {
            return self.meddle(space, ns);
        }
        match self.random.below(1000) {
            0..400 => self.store(space, ns),
            400..700 => self.read(space, ns, false),
            700..800 => self.read(space, ns, true),
            800..880 => self.release_one(),
            880..930 => self.finish_one(),
            930..950 => self.touch(ns),
            950..990 => self.ask(ns),
            _ => self.pool().grow_ahead(ns).unwrap(),
        }
    }

    fn meddle(&mut self, space: usize, ns: Namespace) {
        match self.random.below(4) {
            0 if self.plan.spaces[space].is_reset => self.reset(space, ns),
            1 => {
                self.time("reap", Pool::reap).unwrap();
            }
            2 => self.rebuild(),
            3 => self.reopen(),
            _ => {}
        }
    }

    fn store(&mut self, space: usize, ns: Namespace) {
        let mut keys = self.plan.any_chain(&mut self.random);
        keys.truncate(1 + self.random.below(keys.len() as u64) as usize);
        let present = self.time("lookup", |pool| pool.lookup(ns, &keys, 0)).unwrap();
        let evict = self.random.chance(95);
        let parents: Vec<Option<Key>> = (present..keys.len()).map(|i| i.checked_sub(1).map(|i| keys[i])).collect();
        let absent = &keys[present..];
        let reserved = self.time("reserve", |pool| pool.reserve(ns, absent, Some(&parents), evict)).unwrap();
        let keys = reserved.iter().map(|(position, _)| absent[*position]).collect();
        let blocks = reserved.into_iter().map(|(_, block)| block).collect();
        self.open.push(Open { space, blocks, keys, nonce: nonce(&mut self.random) });
        let open_blocks: usize = self.open.iter().map(|open| open.blocks.len()).sum();
        if open_blocks > self.plan.open_blocks_max || self.random.chance(85) {
            self.finish(self.open.len() - 1);
        }
    }

    fn finish_one(&mut self) {
        if !self.open.is_empty() {
            let number = self.random.below(self.open.len() as u64) as usize;
            self.finish(number);
        }
    }

    /// Fill and publish what was reserved, or give it up.
    fn finish(&mut self, number: usize) {
        let Open { space, blocks, keys, nonce } = self.open.swap_remove(number);
        let part_bytes = self.plan.spaces[space].part_bytes.clone();
        match self.follower_has_done(Task::Write(nonce), space, &blocks, &keys) {
            Some(true) => self.report.count(BYTES_WRITTEN, blocks.len() as u64 * part_bytes.iter().sum::<u64>()),
            Some(false) => return self.time("abort", |pool| pool.abort(&blocks)).unwrap(),
            None => self.fill_all(&blocks, &keys, nonce, &part_bytes),
        }
        if self.quarantines_left > 0 && self.random.chance(1) {
            self.quarantines_left -= 1;
            self.pool().quarantine(&blocks).unwrap();
        } else if self.random.chance(4) {
            self.time("abort", |pool| pool.abort(&blocks)).unwrap();
        } else {
            self.time("publish", |pool| pool.publish(&blocks)).unwrap();
        }
    }

    fn fill_all(&mut self, blocks: &[BlockRef], keys: &[Key], nonce: u64, part_bytes: &[u64]) {
        // Now and then a copy has failed.
        let failed = self.random.chance(5).then(|| self.random.below(1 + blocks.len() as u64) as usize);
        for (number, (block, key)) in blocks.iter().zip(keys).enumerate() {
            if failed != Some(number) {
                let filled = fill_parts(self.pool(), *block, key, nonce, part_bytes.len());
                assert!(filled, "a reserved block is there");
                self.report.count(BYTES_WRITTEN, part_bytes.iter().sum());
            }
        }
    }

    fn check(&mut self, held: &Held) {
        self.follower_has_done(Task::Read(held.reset_ns), held.space, &held.blocks, &held.keys);
        let part_bytes = &self.plan.spaces[held.space].part_bytes;
        for (block, key) in held.blocks.iter().zip(&held.keys) {
            let outcome = nonce_of(self.pool(), *block, key, part_bytes.len()).and_then(|nonce| {
                let stale = made_ns(nonce) < held.reset_ns;
                if stale { Err(format!("block {:#x} was reserved before a reset", block.0)) } else { Ok(()) }
            });
            if let Err(what) = outcome {
                self.report.count(WRONG, 1);
                self.write_report();
                panic!("wrong bytes: {what}");
            }
        }
        self.report.count(BYTES_READ, held.blocks.len() as u64 * part_bytes.iter().sum::<u64>());
        self.report.count(CHECKED, held.blocks.len() as u64);
    }

    fn read(&mut self, space: usize, ns: Namespace, hold: bool) {
        let reset_ns = self.resets.last_ns(space);
        let keys = self.plan.any_chain(&mut self.random);
        let length = keys.len() as u64;
        let start = if self.random.chance(50) { 0 } else { self.random.below(length) as usize };
        let stop = start + self.random.below(length) as usize;
        let blocks = self.time("lease", |pool| pool.lease(ns, &keys, start, stop)).unwrap();
        let keys = keys[start..start + blocks.len()].to_vec();
        let held = Held { space, blocks, keys, reset_ns };
        self.check(&held);
        if self.random.chance(30) {
            std::thread::yield_now();
            self.check(&held);
        }
        self.held.push(held);
        if !hold || self.held.len() > HELD_MAX {
            self.release(self.held.len() - 1);
        }
    }

    fn release_one(&mut self) {
        if !self.held.is_empty() {
            let number = self.random.below(self.held.len() as u64) as usize;
            self.release(number);
        }
    }

    fn release(&mut self, number: usize) {
        let held = self.held.swap_remove(number);
        self.check(&held);
        self.time("release", |pool| pool.release(&held.blocks)).unwrap();
    }

    fn touch(&mut self, ns: Namespace) {
        let keys = self.plan.any_chain(&mut self.random);
        self.time("touch", |pool| pool.touch(ns, &keys)).unwrap();
    }

    fn ask(&mut self, ns: Namespace) {
        let keys = self.plan.any_chain(&mut self.random);
        let present = self.time("contains", |pool| pool.contains(ns, &keys)).unwrap();
        assert_eq!(present.len(), keys.len());
    }

    fn reset(&mut self, space: usize, ns: Namespace) {
        let began_ns = now_ns();
        self.time("reset", |pool| pool.reset(ns)).unwrap();
        self.resets.finished(space, began_ns);
    }

    fn rebuild(&mut self) {
        if let Err(error) = self.time("rebuild", Pool::rebuild_index) {
            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        }
    }

    /// Leave the pool and come back, with what we hold.
    fn reopen(&mut self) {
        self.held.clear();
        self.open.clear();
        let stats = self.pool().stats();
        self.report.add_stats(&stats);
        self.pool = None;
        self.follower = None;
        self.attach();
    }
}

fn time_with<T>(watch: Option<&Stopwatch>, work: impl FnOnce() -> T) -> (T, Option<Took>) {
    match watch {
        Some(watch) => watch.time_unless_stopped(work),
        None => (work(), None),
    }
}

fn operation(name: &str) -> usize {
    OPERATIONS.iter().position(|known| *known == name).unwrap_or_else(|| panic!("no operation {name}"))
}
