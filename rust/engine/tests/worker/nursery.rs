//! A process of one thread, which never opens a pool and forks children that each do: a fresh process of a pool costs a
//! fork and not a start of the program.
//!
//! Commands on standard input, one answer for each: `start POINT ACTION SEED DIR` forks a try to get to a point and
//! answers its process id; `wait PID LIMIT_US` answers `killed`, `stopped`, `ended` or `running`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};

use crate::points;

const LOOK_PAUSE: Duration = Duration::from_micros(100);

/// Fork a child that does `work` and ends; it does not outlive its parent.
pub fn fork_one(work: impl FnOnce()) -> Pid {
    let parent = Pid::this();
    // SAFETY: this process has one thread, so the child may do whatever the parent may.
    match unsafe { fork() }.unwrap() {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).unwrap();
            // It may have died before that was said.
            if Pid::parent() == parent {
                work();
            }
            std::process::exit(0);
        }
    }
}

pub fn run() {
    let mut line = String::new();
    loop {
        line.clear();
        if std::io::stdin().read_line(&mut line).unwrap() == 0 {
            return;
        }
        let words: Vec<&str> = line.trim_end().splitn(5, ' ').collect();
        let answer = match words[..] {
            ["start", point, action, seed, dir] => {
                let (seed, dir) = (seed.parse().unwrap(), PathBuf::from(dir));
                fork_one(|| child(&dir, point, action, seed)).to_string()
            }
            ["wait", pid, limit_us] => wait(pid.parse().unwrap(), Duration::from_micros(limit_us.parse().unwrap())),
            _ => panic!("no command {line}"),
        };
        println!("{answer}");
        std::io::stdout().flush().unwrap();
    }
}

fn child(dir: &Path, point: &str, action: &str, seed: u64) {
    // A panic ends the child here and does not unwind into the parent's loop.
    let tried = std::panic::catch_unwind(|| points::run(dir, point, action, seed));
    if tried.is_err() {
        eprintln!("on the way to {point} ({action}, seed {seed})");
        std::process::exit(101);
    }
}

fn wait(pid: i32, limit: Duration) -> String {
    let started = Instant::now();
    loop {
        let flags = WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED;
        match waitpid(Pid::from_raw(pid), Some(flags)).unwrap() {
            WaitStatus::Signaled(_, Signal::SIGKILL, _) => return "killed".into(),
            WaitStatus::Stopped(..) => return "stopped".into(),
            WaitStatus::Exited(_, 0) => return "ended".into(),
            WaitStatus::StillAlive if started.elapsed() >= limit => return "running".into(),
            WaitStatus::StillAlive => std::thread::sleep(LOOK_PAUSE),
            other => return format!("{other:?}"),
        }
    }
}
