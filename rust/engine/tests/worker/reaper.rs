//! Cleaning up after a process that dies at the point where it leaves behind what is to be cleaned up.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use pegaflow_engine::Pool;

use crate::blocks::open;
use crate::nursery::fork_one;
use crate::points::{self, Try};

const REAPS_MAX: usize = 20;

/// Where a process has to die so that whoever cleans up gets to `step`.
fn victim_of(step: &str) -> &'static str {
    match step {
        "odd" | "even" => "publish.odd",
        "released" => "lease.marked",
        "restored" => "evict.claimed",
        "outdated" => "replace.superseded",
        "member_freeing" => "chain.linked",
        "reopened" => "retire.claimed",
        _ => "publish.linked",
    }
}

/// Have somebody stop there, be armed, kill him, reap him. A sibling may be faster.
pub fn run(this: &Try, step: &str) {
    let (dir, seed) = (this.dir.clone(), this.seed + (1 << 30));
    let victim = fork_one(|| points::run(&dir, victim_of(step), "stop", seed));
    let stopped = waitpid(victim, Some(WaitPidFlag::WUNTRACED)).unwrap();
    if !matches!(stopped, WaitStatus::Stopped(..)) {
        assert_eq!(stopped, WaitStatus::Exited(victim, 0), "the victim failed");
        return;
    }
    let victim = Victim(victim);
    if this.loses_lock {
        // Nobody else may be told that it is gone before it is.
        let pool = open(&this.dir);
        drop(victim);
        this.arm();
        return reap_often(&pool);
    }
    this.arm();
    let pool = open(&this.dir);
    drop(victim);
    reap_often(&pool);
}

fn reap_often(pool: &Pool) {
    for _ in 0..REAPS_MAX {
        pool.reap().unwrap();
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Killed when dropped.
struct Victim(Pid);

impl Drop for Victim {
    fn drop(&mut self) {
        kill(self.0, Signal::SIGKILL).unwrap();
        waitpid(self.0, None).unwrap();
    }
}
