//! One process of the soak that keeps values by name in the pool in which others keep blocks.

use std::path::Path;
use std::time::{Duration, Instant};

use pegaflow_engine::objects::{ObjectStore, Value, ValueKind};
use pegaflow_engine::{ErrorKind, Result, crash_point};

use crate::plan::Plan;
use crate::random::Random;
use crate::report::{BYTES_READ, BYTES_WRITTEN, CHECKED, OPERATIONS, Report, WRONG};
use crate::stopwatch::Stopwatch;
use crate::values::{content, name, open_store, wrong_value};

const VALUES: u64 = 300;
const HELD_MAX: usize = 4;
const REPORT_PAUSE: Duration = Duration::from_millis(20);

struct Keeper<'a> {
    plan: &'a Plan,
    store: ObjectStore,
    random: Random,
    watch: Stopwatch,
    report: Report,
    report_file: &'a Path,
    /// Values that were got, with their numbers.
    held: Vec<(u64, Value)>,
}

/// Put, get and remove values until the file `leave` is there.
pub fn run(dir: &Path, plan: &Plan, seed: u64, report_file: &Path) {
    let watch = Stopwatch::of_this_thread();
    // The pool has the shape that the plan says, whoever creates it.
    let store = Stopwatch::start_threads(|| {
        let _pool = plan.open(dir);
        open_store(dir)
    });
    let (random, report, held) = (Random::new(seed), Report::default(), Vec::new());
    let mut keeper = Keeper { plan, store, random, watch, report, report_file, held };
    let mut reported = Instant::now();
    loop {
        keeper.step();
        if reported.elapsed() >= REPORT_PAUSE {
            reported = Instant::now();
            keeper.write_report();
            if dir.join("leave").exists() {
                return;
            }
            if keeper.random.chance(2 * plan.arming_percent) {
                let points = crash_point::names();
                let point = points[keeper.random.below(points.len() as u64) as usize];
                crash_point::arm(point, if plan.stops && keeper.random.chance(50) { "stop" } else { "kill" }).unwrap();
            }
        }
    }
}

impl Keeper<'_> {
    /// What the operation gave; `None` if somebody was in the way for too long, or the pool is full of what is in use.
    fn time<T>(&mut self, operation: &str, work: impl FnOnce(&ObjectStore) -> Result<T>) -> Option<T> {
        let (result, took) = self.watch.time_unless_stopped(|| work(&self.store));
        let number = OPERATIONS.iter().position(|known| *known == operation).unwrap();
        self.report.took(number, took);
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                let expected = matches!(error.kind(), ErrorKind::Busy | ErrorKind::Full);
                assert!(expected, "{operation}: {error}");
                None
            }
        }
    }

    fn step(&mut self) {
        let number = self.random.below(VALUES);
        match self.random.below(1000) {
            0..450 => self.put(number),
            450..850 => self.get(number),
            850..920 => {
                if let Some(Some(value)) = self.time("remove", |store| store.remove(&name(number))) {
                    self.check(number, &value);
                }
            }
            920..998 => {
                if !self.held.is_empty() {
                    let (number, value) = self.held.swap_remove(0);
                    self.check(number, &value);
                }
            }
            _ => {
                let keys = self.time("keys", ObjectStore::keys).unwrap_or_default();
                assert!(keys.len() <= VALUES as usize, "a key is named twice");
            }
        }
    }

    fn put(&mut self, number: u64) {
        let largest = [100, 5000, 200_000][self.random.below(3) as usize].min(self.plan.pool_bytes / 8);
        let bytes = self.random.below(largest) as usize;
        let value = content(number, self.random.next(), bytes);
        if self.time("put", |store| store.put(&name(number), ValueKind::Bytes, &value)).is_some() {
            self.report.count(BYTES_WRITTEN, bytes as u64);
        }
    }

    fn get(&mut self, number: u64) {
        let Some(Some(value)) = self.time("get", |store| store.get(&name(number))) else { return };
        self.check(number, &value);
        if self.held.len() < HELD_MAX && self.random.chance(20) {
            self.held.push((number, value));
        }
    }

    fn check(&mut self, number: u64, value: &Value) {
        let wrong = match value.to_vec() {
            Ok(bytes) => wrong_value(number, &bytes),
            Err(error) => Some(error.to_string()),
        };
        if let Some(what) = wrong {
            self.report.count(WRONG, 1);
            self.write_report();
            panic!("wrong bytes: {what}");
        }
        self.report.count(BYTES_READ, value.bytes() as u64);
        self.report.count(CHECKED, 1);
    }

    fn write_report(&self) {
        let mut report = self.report.clone();
        report.add_stats(&self.store.stats().unwrap());
        report.write(self.report_file);
    }
}
