//! Several processes hammer one small pool with everything that a pool can do, while one after the other is killed (-9)
//! from outside at a random moment, and others kill themselves at a random named point. No reader ever sees a wrong
//! byte, survivors never wait long, and after the last one is reaped nothing is lost.
//!
//! `PEGAFLOW_TEST_SEED` repeats the seeds of a run, `PEGAFLOW_TEST_KILLS` changes the number of kills.
#![allow(missing_docs)]

mod common;
mod kill;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::ShmDir;
use kill::blocks::{MAIN, namespace, open};
use kill::child::Worker;
use kill::patience::PATIENCE;
use kill::random::{Random, seed};
use kill::report::{CHECKED, OPERATION_COUNT, OPERATIONS, Report, SERVING};
use kill::settled::assert_nothing_lost;
use kill::stopwatch::SLEEPS_MAX;
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;

/// Two for each CPU of a small machine, and one more.
const WORKERS: usize = 5;
const KILLS: u64 = 240;
/// Blocks that have to be read and compared.
const CHECKED_MIN: u64 = 10_000;
/// Fresh pools, one after the other, so that growth is hammered too.
const POOLS: u64 = 8;
/// Until what a hammer has to move has moved: more pools, on a slow host.
const POOLS_MAX: u64 = 80;
/// Between two kills the workers get somewhere, however slow the host is: operations, on average.
const OPERATIONS_PER_KILL: u64 = 100;

struct Hammer {
    dir: ShmDir,
    random: Random,
    workers: Vec<(Worker, PathBuf)>,
    started: u64,
    kills: u64,
    self_kills: u64,
    totals: Report,
}

impl Hammer {
    fn new(random: Random) -> Self {
        let dir = ShmDir::new("hammer");
        let mut hammer =
            Self { dir, random, workers: Vec::new(), started: 0, kills: 0, self_kills: 0, totals: Report::default() };
        (0..WORKERS).for_each(|_| hammer.start_one());
        hammer
    }

    fn start_one(&mut self) {
        let report = self.dir.0.join(format!("report-{}", self.started));
        self.started += 1;
        let seed = self.random.next().to_string();
        let worker = Worker::start("hammer", &self.dir.0, &[&seed, report.to_str().unwrap()]);
        self.workers.push((worker, report));
    }

    /// Wait until all have done so many operations together, those of the dead included.
    fn work(&mut self, operations: u64) {
        let started = Instant::now();
        let of = |report: &Report| report.counted(OPERATION_COUNT);
        while of(&self.totals) + self.workers.iter().map(|(_, file)| of(&Report::read(file))).sum::<u64>() < operations
        {
            assert!(started.elapsed() < PATIENCE, "the workers hang");
            self.replace_the_dead();
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn kill_one(&mut self) {
        let victim = self.random.below(self.workers.len() as u64) as usize;
        let (worker, report) = self.workers.swap_remove(victim);
        worker.kill();
        self.kills += 1;
        self.totals.add(&Report::read(&report));
    }

    /// Replace workers that killed themselves at a named point; any other end of a worker is a failure.
    fn replace_the_dead(&mut self) {
        for index in (0..self.workers.len()).rev() {
            let Some(status) = self.workers[index].0.ended() else { continue };
            assert!(matches!(status, WaitStatus::Signaled(_, Signal::SIGKILL, _)), "a worker failed: {status:?}");
            let (_, report) = self.workers.swap_remove(index);
            self.totals.add(&Report::read(&report));
            self.self_kills += 1;
            self.start_one();
        }
    }

    /// A sibling that stands still for a moment at a random place, as one without a CPU does.
    fn freeze_one(&mut self) {
        let victim = self.random.below(self.workers.len() as u64) as usize;
        let worker = &self.workers[victim].0;
        worker.signal(Signal::SIGSTOP);
        std::thread::sleep(Duration::from_millis(self.random.below(60)));
        worker.signal(Signal::SIGCONT);
    }

    fn run(&mut self, kills: u64) {
        for kill in 0..kills {
            std::thread::sleep(Duration::from_micros(self.random.below(200_000)));
            self.work(kill * OPERATIONS_PER_KILL);
            if self.random.chance(10) {
                self.freeze_one();
            }
            self.replace_the_dead();
            self.kill_one();
            self.start_one();
        }
        self.replace_the_dead();
        while !self.workers.is_empty() {
            self.kill_one();
        }
    }
}

#[test]
fn kills_at_random_moments_cost_no_byte_no_slot_and_no_lease() {
    let mut random = Random::new(seed("hammer"));
    let kills = std::env::var("PEGAFLOW_TEST_KILLS").map_or(KILLS, |text| text.parse().unwrap());
    let (started, mut totals, mut killed) = (Instant::now(), Report::default(), (0, 0));
    let misses_something = |totals: &Report| {
        let unmoved = |(name, count): (&str, u64)| count == 0 && name != "lock_timeouts";
        totals.pool_counters().any(unmoved) || totals.counted(CHECKED) <= CHECKED_MIN
    };
    for round in 0..POOLS_MAX {
        if round >= POOLS && !misses_something(&totals) {
            break;
        }
        let mut hammer = Hammer::new(Random::new(random.next()));
        // In every other pool a bystander is attached all the time, and reaps with the others.
        let bystander = round.is_multiple_of(2).then(|| open(&hammer.dir.0));
        hammer.run(kills.div_ceil(POOLS));
        let pool = bystander.unwrap_or_else(|| open(&hammer.dir.0));
        let spaces = [0, 1, 2, 3, 4].map(|space| MAIN + space).map(|byte| namespace(&pool, byte));
        assert_nothing_lost(&pool, &spaces);
        totals.add(&hammer.totals);
        killed = (killed.0 + hammer.kills, killed.1 + hammer.self_kills);
    }
    println!(
        "{} kills from outside, {} at named points in {:?}: {} operations, {} blocks checked, longest lock wait {:?}",
        killed.0,
        killed.1,
        started.elapsed(),
        totals.counted(OPERATION_COUNT),
        totals.counted(CHECKED),
        totals.lock_wait()
    );
    totals.pool_counters().for_each(|(name, count)| println!("{name:>20}: {count}"));
    for (operation, name) in OPERATIONS.iter().enumerate() {
        println!("{name:>20}: longest {:?}", totals.longest(operation));
    }
    for (name, count) in totals.pool_counters().filter(|(name, _)| *name != "lock_timeouts") {
        assert!(count > 0, "a hammer that leaves {name} at 0 misses something");
    }
    assert!(totals.counted(CHECKED) > CHECKED_MIN);
    for (operation, name) in OPERATIONS.iter().enumerate().take(SERVING) {
        let longest = totals.longest(operation);
        assert!(longest.sleeps <= SLEEPS_MAX, "{name} took {longest:?}");
    }
}
