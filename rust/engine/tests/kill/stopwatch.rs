//! Time that an operation took, less the time for which this thread was ready to run but the host had no CPU for it:
//! that much is the scheduler's doing and not the pool's. Nothing is measured across a SIGSTOP.
//!
//! SIGCONT has to come to the measuring thread, which then knows before its next instruction: threads are to be started
//! through [`Stopwatch::start_threads`].

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::Pid;

/// Of one operation: it waits for a lock once, for 20 ms in steps of at least 50 us, and now and then for a thread of
/// its own process. Unlike a time, this holds however slow or busy the host is.
pub const SLEEPS_MAX: u64 = 450;

static CONTINUED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_continue(_signal: i32) {
    CONTINUED.fetch_add(1, SeqCst);
}

/// Measures one thread.
pub struct Stopwatch {
    schedstat: File,
    /// Of the threads of this process that may hold what this one waits for.
    beside: Vec<File>,
}

/// How long something took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Took {
    /// On its CPU, or waiting by its own choice.
    pub own: Duration,
    /// By the clock on the wall.
    pub wall: Duration,
    /// How often it gave its CPU away to wait for something.
    pub sleeps: u64,
}

impl Stopwatch {
    pub fn of_this_thread() -> Self {
        let action = SigAction::new(SigHandler::Handler(on_continue), SaFlags::SA_RESTART, SigSet::empty());
        // SAFETY: the handler only raises an atomic counter.
        unsafe { sigaction(Signal::SIGCONT, &action) }.unwrap();
        Self { schedstat: File::open("/proc/thread-self/schedstat").unwrap(), beside: Vec::new() }
    }

    /// As long as this thread waits for another one, it is without a CPU whenever that one is.
    pub fn waits_for(&mut self, thread: Pid) {
        self.beside.extend(File::open(format!("/proc/self/task/{thread}/schedstat")));
    }

    /// Do something that starts threads, which will never be the ones that are told of a SIGCONT.
    pub fn start_threads<T>(work: impl FnOnce() -> T) -> T {
        let mut blocked = SigSet::empty();
        blocked.add(Signal::SIGCONT);
        blocked.thread_block().unwrap();
        let result = work();
        blocked.thread_unblock().unwrap();
        result
    }

    /// Do something and say how long it took; `None` if this process was stopped meanwhile.
    pub fn time_unless_stopped<T>(&self, work: impl FnOnce() -> T) -> (T, Option<Took>) {
        let continued = CONTINUED.load(SeqCst);
        let beside: Vec<Duration> = self.beside.iter().map(run_delay_of).collect();
        let (delay, sleeps, started) = (run_delay_of(&self.schedstat), sleeps(), Instant::now());
        let result = work();
        let (wall, sleeps) = (started.elapsed(), self::sleeps() - sleeps);
        if CONTINUED.load(SeqCst) != continued {
            return (result, None);
        }
        let with_cpu = wall.saturating_sub(run_delay_of(&self.schedstat) - delay);
        let others = self.beside.iter().zip(beside).map(|(file, before)| run_delay_of(file).saturating_sub(before));
        (result, Some(Took { own: with_cpu.saturating_sub(others.max().unwrap_or_default()), wall, sleeps }))
    }

    /// Do something and say how long it took.
    pub fn time<T>(&self, work: impl FnOnce() -> T) -> (T, Took) {
        let (result, took) = self.time_unless_stopped(work);
        (result, took.unwrap_or_default())
    }
}

/// How often this thread has slept so far.
fn sleeps() -> u64 {
    // SAFETY: all zeros are numbers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: fills what it is given.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) }, 0);
    usage.ru_nvcsw as u64
}

/// For how long a thread has waited for a CPU so far; nothing once it is gone.
fn run_delay_of(schedstat: &File) -> Duration {
    let mut text = [0u8; 96];
    let bytes = schedstat.read_at(&mut text, 0).unwrap_or(0);
    let text = std::str::from_utf8(&text[..bytes]).unwrap();
    Duration::from_nanos(text.split_whitespace().nth(1).map_or(0, |word| word.parse().unwrap()))
}
