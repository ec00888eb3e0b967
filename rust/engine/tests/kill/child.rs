//! Child processes of the helper program `pool-worker`.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// Longer than anything takes, on whatever host; what it asks a process of its own, too (`PATIENCE`).
const HANGS: Duration = Duration::from_secs(240);

/// A running `pool-worker`; killed when dropped.
pub struct Worker {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    /// It was waited for: its number may belong to another process now.
    gone: bool,
}

impl Worker {
    /// Start `pool-worker ROLE DIR ARGS...`.
    pub fn start(role: &str, shm_dir: &Path, args: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_pool-worker"))
            .arg(role)
            .arg(shm_dir)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { stdin: child.stdin.take(), stdout, child, gone: false }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    /// Wait for the line that says so.
    pub fn expect(&mut self, line: &str) {
        assert_eq!(self.line(), line);
    }

    /// The next line that the worker prints.
    pub fn line(&mut self) -> String {
        let mut text = String::new();
        self.stdout.read_line(&mut text).unwrap();
        text.trim_end().to_owned()
    }

    /// The next line, which has to come in time; `what` says what the worker is at.
    pub fn line_in_time(&mut self, what: &str) -> String {
        let ready = |worker: &Self| {
            let mut output = [PollFd::new(worker.stdout.get_ref().as_fd(), PollFlags::POLLIN)];
            poll(&mut output, PollTimeout::try_from(HANGS).unwrap()).unwrap() > 0
        };
        assert!(!self.stdout.buffer().is_empty() || ready(self), "the worker hangs at {what}");
        self.line()
    }

    /// Write a line to the worker.
    pub fn tell(&mut self, line: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Write a line to the worker; `false` if it does not read any more.
    pub fn try_tell(&mut self, line: &str) -> bool {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").is_ok()
    }

    /// Whether kill -9 was its end.
    pub fn died_of_a_kill(&mut self) -> bool {
        matches!(self.end(), WaitStatus::Signaled(_, Signal::SIGKILL, _))
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// Kill -9 and wait.
    pub fn kill(mut self) {
        self.signal(Signal::SIGKILL);
        assert_eq!(self.end(), WaitStatus::Signaled(self.pid(), Signal::SIGKILL, false));
    }

    /// Kill -9 and wait, leaving alone what it has forked.
    pub fn kill_alone(&mut self) {
        self.signal(Signal::SIGKILL);
        let status = self.wait(WaitPidFlag::empty(), HANGS);
        assert_eq!(status, WaitStatus::Signaled(self.pid(), Signal::SIGKILL, false));
    }

    /// Close the input that a killed worker's children have inherited, and wait until they have closed their output.
    pub fn finish_orphans(mut self) {
        drop(self.stdin.take());
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
    }

    /// Close its input and wait for a good end.
    pub fn finish(mut self) {
        let status = self.end();
        assert_eq!(status, WaitStatus::Exited(self.pid(), 0), "the worker failed");
    }

    /// How it ends, in time.
    pub fn end(&mut self) -> WaitStatus {
        drop(self.stdin.take());
        self.wait(WaitPidFlag::empty(), HANGS)
    }

    /// Whether it is stopped by its crash point (else how it ended).
    pub fn stopped_or_ended(&mut self) -> WaitStatus {
        self.wait(WaitPidFlag::WUNTRACED, HANGS)
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<WaitStatus> {
        self.look(WaitPidFlag::empty())
    }

    /// How it ended or that it stopped, if one of them happened since the last look.
    pub fn changed(&mut self) -> Option<WaitStatus> {
        self.look(WaitPidFlag::WUNTRACED)
    }

    fn look(&mut self, flags: WaitPidFlag) -> Option<WaitStatus> {
        let status = waitpid(self.pid(), Some(flags | WaitPidFlag::WNOHANG)).unwrap();
        self.gone |= matches!(status, WaitStatus::Exited(..) | WaitStatus::Signaled(..));
        (status != WaitStatus::StillAlive).then_some(status)
    }

    fn wait(&mut self, flags: WaitPidFlag, limit: Duration) -> WaitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.look(flags) {
                return status;
            }
            assert!(started.elapsed() < limit, "the worker hangs");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if !self.gone {
            self.signal(Signal::SIGKILL);
            let _dead = waitpid(self.pid(), None);
        }
    }
}
