//! One pool of a soak: processes that hammer it, are killed and stopped and replaced, and a check of what is left.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use pegaflow_engine::names::pool_dir;

use super::coroner::Coroner;
use super::outcome::Outcome;
use crate::common::ShmDir;
use crate::kill::blocks::POOL_NAME;
use crate::kill::child::Worker;
use crate::kill::plan::Plan;
use crate::kill::random::Random;
use crate::kill::report::{OPERATION_COUNT, Report};
use crate::kill::settled::{assert_nobody_left, assert_nothing_lost, assert_settled};
use crate::kill::values::{assert_values_right_and_remove, open_store};

const TICK: Duration = Duration::from_millis(3);
/// A process that is not stopped does something within this time, on whatever host.
const PROGRESS_MAX: Duration = Duration::from_secs(120);
/// Each process that is stopped with a lock costs the others one wait.
const STOPPED_MAX: usize = 2;

/// One process and what is known of it.
struct Victim {
    worker: Worker,
    report_file: PathBuf,
    /// Until when it is stopped, and since when.
    stopped: Option<(Instant, Instant)>,
    progress: (u64, Instant),
}

impl Victim {
    fn report_files(&self) -> [PathBuf; 2] {
        [self.report_file.clone(), self.report_file.with_extension("1")]
    }

    /// What it has done until now, in all its threads.
    fn report(&self) -> Report {
        let [mut report, other] = self.report_files().map(|file| Report::read(&file));
        report.add(&other);
        report
    }

    fn last_report(self) -> Report {
        let report = self.report();
        self.report_files().iter().for_each(|file| drop(std::fs::remove_file(file)));
        report
    }
}

/// How often processes are killed and stopped: mean pauses in milliseconds.
struct Pace {
    workers: u64,
    kill_ms: u64,
    stop_ms: u64,
    /// Until a dead process is replaced.
    replace_ms: u64,
}

pub struct Round<'a> {
    outcome: &'a mut Outcome,
    seed: u64,
    plan: Plan,
    pace: Pace,
    random: Random,
    dir: Option<ShmDir>,
    victims: Vec<Victim>,
    started: u64,
    coroner: Option<Coroner>,
}

impl<'a> Round<'a> {
    pub fn new(seed: u64, outcome: &'a mut Outcome) -> Self {
        let mut random = Random::new(seed);
        let pace = Pace {
            workers: 2 + random.below(6),
            kill_ms: [30, 100, 400][random.below(3) as usize],
            stop_ms: [50, 200, 1000][random.below(3) as usize],
            replace_ms: [1, 300, 2000][random.below(3) as usize],
        };
        let dir = Some(ShmDir::new("soak"));
        let plan = Plan::random(seed);
        Self { outcome, seed, plan, pace, random, dir, victims: Vec::new(), started: 0, coroner: None }
    }

    /// Hammer the pool `legs` times for so long each; in between nobody is attached, and all is checked.
    pub fn run(mut self, legs: u64, length: Duration, mut tell: impl FnMut(&Outcome, &Report)) {
        self.outcome.rounds += 1;
        for _ in 0..legs {
            self.hammer(length, &mut tell);
            let (threads, processes) = (self.plan.threads, self.pace.workers);
            let what = format!("round {}: {processes} processes of {threads} threads", self.seed);
            self.outcome.remember_worst(&what);
            if self.outcome.failures.is_empty() {
                self.check();
            }
            if !self.outcome.failures.is_empty() {
                self.keep_files();
                return;
            }
        }
    }

    fn path(&self) -> &std::path::Path {
        &self.dir.as_ref().unwrap().0
    }

    fn fail(&mut self, what: &str) {
        self.outcome.failures.push(format!("round {}: {what}; {:?}", self.seed, self.plan));
    }

    fn keep_files(&mut self) {
        let dir = self.dir.take().unwrap();
        self.outcome.failures.push(format!("the pool is left in {}", dir.0.display()));
        std::mem::forget(dir);
    }

    fn start_one(&mut self) {
        let report_file = self.path().join(format!("report-{}", self.started));
        self.started += 1;
        let (seed, plan_seed) = (self.random.next().to_string(), self.seed.to_string());
        let args = [seed.as_str(), report_file.to_str().unwrap(), plan_seed.as_str()];
        let role = if self.random.chance(self.plan.keepers_percent) { "keep" } else { "soak" };
        let worker = Worker::start(role, self.path(), &args);
        if self.victims.is_empty() {
            self.coroner().revived();
        }
        self.victims.push(Victim { worker, report_file, stopped: None, progress: (0, Instant::now()) });
    }

    fn hammer(&mut self, length: Duration, tell: &mut impl FnMut(&Outcome, &Report)) {
        let uid = nix::unistd::geteuid().as_raw();
        self.coroner = Some(Coroner::start(pool_dir(self.path(), uid, POOL_NAME), self.plan.followers_of.is_some()));
        let started = Instant::now();
        let (mut next_kill, mut next_stop, mut next_look) = (started, started, started);
        (0..self.pace.workers).for_each(|_| self.start_one());
        let mut next_start = started;
        while started.elapsed() < length && self.outcome.failures.is_empty() {
            std::thread::sleep(TICK);
            self.attend_all();
            let now = Instant::now();
            if now >= next_start && self.victims.len() < self.pace.workers as usize {
                next_start = now + self.about(self.pace.replace_ms);
                self.start_one();
            }
            if now >= next_kill {
                next_kill = now + self.about(self.pace.kill_ms);
                if self.random.chance(3) { self.kill_all() } else { self.kill_any() }
            }
            if now >= next_stop {
                next_stop = now + self.about(self.pace.stop_ms);
                self.stop_any();
            }
            if now >= next_look {
                next_look = now + Duration::from_secs(1);
                let running = self.look_at_progress();
                tell(self.outcome, &running);
            }
        }
        self.end();
        let (reaped, fills, stalls) = self.coroner.take().unwrap().finish();
        self.outcome.reaped.extend(reaped);
        self.outcome.fills.extend(fills);
        self.outcome.stalls.extend(stalls);
    }

    /// Anything up to twice the mean.
    fn about(&mut self, mean_ms: u64) -> Duration {
        Duration::from_millis(self.random.below(2 * mean_ms))
    }

    fn coroner(&self) -> &Coroner {
        self.coroner.as_ref().unwrap()
    }

    fn count_stopped(&self) {
        self.coroner().stopped(self.victims.iter().filter(|victim| victim.stopped.is_some()).count());
    }

    /// Take note of who has died or stopped by itself, and end the stops whose time is over.
    fn attend_all(&mut self) {
        let now = Instant::now();
        for index in (0..self.victims.len()).rev() {
            match self.victims[index].worker.changed() {
                Some(WaitStatus::Stopped(..)) if self.victims[index].stopped.is_none() => {
                    self.outcome.stops_at_points += 1;
                    self.mark_stopped(index);
                }
                Some(WaitStatus::Stopped(..)) | None => {}
                Some(status) => {
                    self.bury(index, status);
                    continue;
                }
            }
            if self.victims[index].stopped.is_some_and(|(until, _)| now >= until) {
                if self.random.chance(30) {
                    self.kill(index);
                } else {
                    self.go_on(index);
                }
            }
        }
        while self.victims.iter().filter(|victim| victim.stopped.is_some()).count() > STOPPED_MAX {
            let first = self.victims.iter().position(|victim| victim.stopped.is_some()).unwrap();
            self.go_on(first);
        }
    }

    fn mark_stopped(&mut self, index: usize) {
        let longest_ms = [60, 60, 60, 500, 3000][self.random.below(5) as usize];
        let now = Instant::now();
        self.victims[index].stopped = Some((now + Duration::from_millis(self.random.below(longest_ms)), now));
        self.count_stopped();
    }

    fn go_on(&mut self, index: usize) {
        let victim = &mut self.victims[index];
        if let Some((_, since)) = victim.stopped.take() {
            self.outcome.stopped_ms += since.elapsed().as_millis() as u64;
        }
        victim.worker.signal(Signal::SIGCONT);
        victim.progress.1 = Instant::now();
        self.count_stopped();
    }

    fn stop_any(&mut self) {
        if self.victims.is_empty() || self.victims.iter().filter(|v| v.stopped.is_some()).count() >= STOPPED_MAX {
            return;
        }
        let index = self.random.below(self.victims.len() as u64) as usize;
        if self.victims[index].stopped.is_none() {
            self.victims[index].worker.signal(Signal::SIGSTOP);
            self.outcome.stops += 1;
            self.mark_stopped(index);
        }
    }

    fn kill_any(&mut self) {
        if !self.victims.is_empty() {
            let index = self.random.below(self.victims.len() as u64) as usize;
            self.kill(index);
        }
    }

    fn kill_all(&mut self) {
        self.outcome.massacres += 1;
        self.victims.iter().for_each(|victim| victim.worker.signal(Signal::SIGKILL));
        for index in (0..self.victims.len()).rev() {
            self.kill(index);
        }
    }

    fn kill(&mut self, index: usize) {
        self.victims[index].worker.signal(Signal::SIGKILL);
        let status = self.victims[index].worker.end();
        match self.victims[index].stopped {
            Some((_, since)) => {
                self.outcome.kills_stopped += 1;
                self.outcome.stopped_ms += since.elapsed().as_millis() as u64;
            }
            None => self.outcome.kills += 1,
        }
        // It is counted as killed from outside.
        self.outcome.kills_at_points -= u64::from(self.bury(index, status));
    }

    /// Whether it was a kill.
    fn bury(&mut self, index: usize, status: WaitStatus) -> bool {
        let victim = self.victims.swap_remove(index);
        self.coroner().died(victim.worker.pid().as_raw());
        self.count_stopped();
        self.outcome.totals.add(&victim.last_report());
        let killed = matches!(status, WaitStatus::Signaled(_, Signal::SIGKILL, _));
        if killed {
            self.outcome.kills_at_points += 1;
        } else {
            self.fail(&format!("a process failed ({status:?}): see its message above"));
        }
        killed
    }

    /// Sum over the processes that live, having seen that each gets on.
    fn look_at_progress(&mut self) -> Report {
        let mut running = Report::default();
        let mut stuck = Vec::new();
        for victim in &mut self.victims {
            let report = victim.report();
            let done = report.counted(OPERATION_COUNT);
            if done != victim.progress.0 {
                victim.progress = (done, Instant::now());
            } else if victim.stopped.is_none() && victim.progress.1.elapsed() > PROGRESS_MAX {
                stuck.push(victim.worker.pid());
            }
            running.add(&report);
        }
        for pid in stuck {
            self.fail(&format!("process {pid} hangs"));
        }
        running
    }

    /// All are killed at once, or leave by themselves, or some do this and some do that.
    fn end(&mut self) {
        for index in 0..self.victims.len() {
            self.go_on(index);
        }
        let killed = [0, self.victims.len() / 2, self.victims.len()][self.random.below(3) as usize];
        self.victims.iter().take(killed).for_each(|victim| victim.worker.signal(Signal::SIGKILL));
        for index in (0..killed).rev() {
            self.kill(index);
        }
        let leave = self.path().join("leave");
        std::fs::write(&leave, []).unwrap();
        while !self.victims.is_empty() {
            let index = self.victims.len() - 1;
            // Stopped at a named point, it can not leave.
            match self.victims[index].worker.stopped_or_ended() {
                WaitStatus::Stopped(..) => self.go_on(index),
                WaitStatus::Exited(_, 0) => {
                    self.outcome.departures += 1;
                    let victim = self.victims.swap_remove(index);
                    self.outcome.totals.add(&victim.last_report());
                }
                status => {
                    self.bury(index, status);
                }
            }
        }
        std::fs::remove_file(&leave).unwrap();
        self.look_for_failures();
    }

    /// Followers, too, say so if something was wrong.
    fn look_for_failures(&mut self) {
        let files = std::fs::read_dir(self.path()).unwrap().map(|file| file.unwrap().path());
        let failed = |file: &PathBuf| file.file_name().unwrap().to_str().unwrap().starts_with("failed-");
        for file in files.filter(failed).collect::<Vec<_>>() {
            let text = std::fs::read_to_string(file).unwrap();
            self.fail(&text);
        }
    }

    /// Attach as the only process: every invariant and checksum holds, and every slot can be filled and read.
    fn check(&mut self) {
        let checked = catch_unwind(AssertUnwindSafe(|| {
            let pool = self.plan.open(self.path());
            if self.plan.keepers_percent > 0 {
                assert_settled(&pool);
                assert_values_right_and_remove(&open_store(self.path()));
            }
            let spaces: Vec<_> = self.plan.spaces.iter().map(|space| space.of(&pool).unwrap()).collect();
            assert_nothing_lost(&pool, &spaces);
            assert_nobody_left(&pool);
        }));
        self.outcome.checks += 1;
        if let Err(panic) = checked {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            self.fail(&text.unwrap_or_default());
        }
    }
}
