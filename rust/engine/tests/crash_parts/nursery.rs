//! Processes to kill, forked by a helper that stays small (`worker/nursery.rs`).

use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::kill::child::Worker;

/// Longer than any try to get to a point takes.
const HANGS: Duration = Duration::from_secs(150);

/// What a process is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Killed,
    Stopped,
    /// It did all it had to do.
    Ended,
    Running,
}

pub struct Nursery(Worker);

impl Nursery {
    pub fn new(dir: &Path) -> Self {
        Self(Worker::start("nursery", dir, &[]))
    }

    fn ask(&mut self, question: &str) -> String {
        self.0.tell(question);
        self.0.line_in_time(question)
    }

    /// A process on its way to `point`, where `action` happens to it.
    pub fn start(&mut self, dir: &Path, point: &str, action: &str, seed: u64) -> Pid {
        Pid::from_raw(self.ask(&format!("start {point} {action} {seed} {}", dir.display())).parse().unwrap())
    }

    /// What it is at once it is no longer running, or after `limit`.
    pub fn wait(&mut self, pid: Pid, limit: Duration) -> State {
        match self.ask(&format!("wait {pid} {}", limit.as_micros())).as_str() {
            "killed" => State::Killed,
            "stopped" => State::Stopped,
            "ended" => State::Ended,
            "running" => State::Running,
            other => panic!("a process failed: {other}"),
        }
    }

    /// What becomes of it.
    pub fn wait_long(&mut self, pid: Pid) -> State {
        let state = self.wait(pid, HANGS);
        assert_ne!(state, State::Running, "a process hangs");
        state
    }

    /// Kill it wherever it is. It may come to its end just before.
    pub fn kill(&mut self, pid: Pid) {
        kill(pid, Signal::SIGKILL).unwrap();
        let state = self.wait_long(pid);
        assert!(matches!(state, State::Killed | State::Ended), "{state:?}");
    }
}
