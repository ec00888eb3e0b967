//! One sequence of deaths, alone and in pairs; several lanes run side by side, each with pools of its own.

use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::ShmDir;
use crate::kill::random::Random;
use crate::kill::stopwatch::Stopwatch;
use pegaflow_engine::crash_point;

use super::home::Home;
use super::nursery::{Nursery, State};
use super::tally::Tally;

/// Tries to get to a point; a sibling may be faster.
const TRIES_MAX: usize = 20;
/// How long one gets beside a stopped sibling, which may hold what it needs.
const BESIDE_STOPPED: Duration = Duration::from_millis(60);

/// In short runs, of pairs with files on SSD only one in so many is met.
const SLOW_PAIRS: u64 = 5;

/// How two deaths meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// The second comes when the first is dead, cleans up after it, and dies.
    After,
    /// The second is under way when the first, which had stopped at its point, is killed.
    During,
    /// The second dies, and is cleaned up after, while the first stands still; then the first goes on.
    BesideStopped,
}

pub struct Lane {
    root: ShmDir,
    nursery: Nursery,
    random: Random,
    watch: Stopwatch,
    homes: u64,
    seeds: u64,
    pub tally: Tally,
}

/// Only the first user of a pool comes to these.
const MAKES_STATISTICS: [&str; 2] = ["traffic.file_made", "traffic.linked"];

/// Before the first user of a pool has made the file of what went, it comes to these.
const BEFORE_GONE: [&str; 4] = ["process.locked", "process.filled", "process.registered", "gone.file_made"];

/// Points that take a pool of their own, and more time: in short runs they are met less often.
pub fn is_slow(point: &str) -> bool {
    ["ssd.", "gone."].iter().any(|family| point.starts_with(family)) || MAKES_STATISTICS.contains(&point)
}

/// Points at which a pool is made or removed, or for which it has to be almost full of blocks of one namespace, or that
/// have to do with files on SSD: each time in a directory of its own.
pub fn has_its_own_pool(point: &str) -> bool {
    let moves = ["retire.copied", "retire.moving", "retire.linked", "retire.sealed"];
    let own = ["create.", "remove.", "ssd.", "gone."];
    own.iter().any(|family| point.starts_with(family)) || moves.contains(&point) || MAKES_STATISTICS.contains(&point)
}

/// Of two creators only one gives the pool, or its tier's file, its name.
pub fn is_possible(first: &str, second: &str) -> bool {
    let makes_file = ["ssd.file_made", "ssd.linked"].contains(&second);
    let file_is_there = first.starts_with("ssd.") && first != "ssd.file_made";
    // But for these, who comes to a point has opened a namespace before.
    let opens_none = ["create.", "process.", "gone."].iter().any(|family| first.starts_with(family));
    let counted = !opens_none && first != "traffic.file_made";
    (first, second) != ("create.linked", "create.linked")
        && !(makes_file && file_is_there)
        && !(MAKES_STATISTICS.contains(&second) && counted)
        && !(second.starts_with("gone.") && !first.starts_with("create.") && !BEFORE_GONE.contains(&first))
}

impl Lane {
    pub fn new(name: &str, seed: u64) -> Self {
        let root = ShmDir::new(name);
        let nursery = Nursery::new(&root.0);
        let (random, watch, tally) = (Random::new(seed), Stopwatch::of_this_thread(), Tally::new());
        Self { root, nursery, random, watch, homes: 0, seeds: 0, tally }
    }

    fn home(&mut self) -> Home {
        self.homes += 1;
        Home::new(&self.root.0, &format!("home-{}", self.homes))
    }

    fn start(&mut self, dir: &Path, point: &str, action: &str) -> Pid {
        self.seeds += 1;
        self.nursery.start(dir, point, action, self.seeds)
    }

    /// Whether a process came to `point` and died there.
    fn die(&mut self, home: &Home, point: &str) -> bool {
        let pid = self.start(&home.dir, point, "kill");
        let died = self.nursery.wait_long(pid) == State::Killed;
        self.count(point, died)
    }

    fn count(&mut self, point: &str, came: bool) -> bool {
        self.tally.row(point).kills += u64::from(came);
        self.tally.missed += u64::from(!came);
        came
    }

    /// A process that stands still at `point`, if it came there.
    fn stop(&mut self, home: &Home, point: &str) -> Option<Pid> {
        let pid = self.start(&home.dir, point, "stop");
        let stopped = self.nursery.wait_long(pid) == State::Stopped;
        self.tally.row(point).stops += u64::from(stopped);
        self.tally.missed += u64::from(!stopped);
        stopped.then_some(pid)
    }

    /// The others go on, clean up, and find nothing amiss.
    fn check(&mut self, home: &mut Home, points: &[&str], after: &str) {
        let seed = self.random.next() >> 24;
        let survivor = home.survivor();
        let wait = survivor.operate(&self.watch, seed);
        let reap = survivor.reap(&self.watch);
        self.tally.took(points, wait, reap);
        survivor.assert_sound(false, after);
    }

    /// One death at every point.
    pub fn round(&mut self, is_wanted: impl Fn(&str) -> bool) {
        let mut home = self.home();
        let mut points: Vec<&str> = crash_point::names().iter().copied().filter(|point| is_wanted(point)).collect();
        for last in (1..points.len()).rev() {
            points.swap(last, self.random.below(last as u64 + 1) as usize);
        }
        for point in points {
            if has_its_own_pool(point) {
                self.alone_with_files(point);
            } else {
                self.alone(&mut home, point);
            }
        }
        home.finish();
    }

    fn alone(&mut self, home: &mut Home, point: &str) {
        let attended = self.random.chance(60);
        for _ in 0..TRIES_MAX {
            home.attend(attended);
            let died = self.die(home, point);
            self.check(home, &[point], point);
            if died {
                return;
            }
        }
        // Whether it was reached often enough all the same is seen in the end.
        self.tally.unmet.push(format!("{point}, alone"));
    }

    fn alone_with_files(&mut self, point: &str) {
        for _ in 0..TRIES_MAX {
            let mut home = self.home();
            let died = self.die(&home, point);
            if died {
                self.check(&mut home, &[point], point);
                home.check_tier(&[point]);
            }
            home.remove();
            if died {
                return;
            }
        }
        // Whether it was reached often enough all the same is seen in the end.
        self.tally.unmet.push(format!("{point}, alone"));
    }

    /// A death at `first` meets one at so many of all points; `round` decides how.
    pub fn pairs(&mut self, first: &str, round: usize, percent: u64) {
        let mut home = self.home();
        for (index, second) in crash_point::names().iter().enumerate().filter(|(_, name)| is_possible(first, name)) {
            let slow = percent < 100 && [first, *second].iter().any(|point| is_slow(point));
            if !self.random.chance(if slow { percent.div_ceil(SLOW_PAIRS) } else { percent }) {
                continue;
            }
            let meeting = [Meeting::After, Meeting::During, Meeting::BesideStopped][(index + round) % 3];
            if has_its_own_pool(first) || has_its_own_pool(second) {
                self.pair_with_files(first, second);
            } else {
                self.pair(&mut home, first, second, meeting);
            }
            self.tally.pairs += 1;
        }
        home.attend(true);
        home.finish();
    }

    fn pair(&mut self, home: &mut Home, first: &str, second: &str, meeting: Meeting) {
        let attended = meeting == Meeting::BesideStopped || self.random.chance(50);
        for _ in 0..TRIES_MAX {
            home.attend(attended);
            let met = match meeting {
                Meeting::After => self.die(home, first) && self.die(home, second),
                Meeting::During => self.meet_during(home, first, second),
                Meeting::BesideStopped => self.meet_beside_stopped(home, first, second),
            };
            self.check(home, &[first, second], &format!("{first}, {second}, {meeting:?}"));
            if met {
                return;
            }
        }
        self.tally.unmet.push(format!("{first}, {second}, {meeting:?}"));
    }

    fn meet_during(&mut self, home: &Home, first: &str, second: &str) -> bool {
        let Some(stopped) = self.stop(home, first) else { return false };
        let other = self.start(&home.dir, second, "kill");
        let soon = Duration::from_micros(self.random.below(2000));
        let state = self.nursery.wait(other, soon);
        self.nursery.kill(stopped);
        self.count(first, true);
        let state = if state == State::Running { self.nursery.wait_long(other) } else { state };
        self.count(second, state == State::Killed)
    }

    fn meet_beside_stopped(&mut self, home: &mut Home, first: &str, second: &str) -> bool {
        let Some(stopped) = self.stop(home, first) else { return false };
        let other = self.start(&home.dir, second, "kill");
        let seed = self.random.next() >> 24;
        let mut wait = home.survivor().operate(&self.watch, seed);
        match self.nursery.wait(other, BESIDE_STOPPED) {
            State::Killed => self.tally.row(second).kills += 1,
            // It waits for the stopped one, or did without what that holds.
            State::Running => self.nursery.kill(other),
            State::Ended | State::Stopped => {}
        }
        wait = wait.max(home.survivor().operate(&self.watch, seed + 1));
        let reap = home.survivor().reap(&self.watch);
        self.tally.took(&[first, second], wait, reap);
        home.survivor().check_held();
        kill(stopped, Signal::SIGCONT).unwrap();
        assert_eq!(self.nursery.wait_long(stopped), State::Ended, "after {first} it finishes");
        true
    }

    /// Two processes of which at least one makes or removes the pool.
    fn pair_with_files(&mut self, first: &str, second: &str) {
        for _ in 0..TRIES_MAX {
            let mut home = self.home();
            let creates = |point: &str| point.starts_with("create.");
            let met = if creates(second) && !(creates(first) && first != "create.linked") {
                self.meet_creator(&home, first, second)
            } else {
                self.die(&home, first) && self.die(&home, second)
            };
            if met {
                self.check(&mut home, &[first, second], &format!("{first}, {second}"));
                home.check_tier(&[first, second]);
                home.remove();
                return;
            }
        }
        self.tally.unmet.push(format!("{first}, {second}"));
    }

    /// The creator stands still before the pool has its name, and another is faster.
    fn meet_creator(&mut self, home: &Home, first: &str, second: &str) -> bool {
        let Some(creator) = self.stop(home, second) else { return false };
        let died = self.die(home, first);
        self.nursery.kill(creator);
        self.count(second, true);
        died
    }
}
