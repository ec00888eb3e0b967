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

static CONTINUED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_continue(_signal: i32) {
    CONTINUED.fetch_add(1, SeqCst);
}

/// Measures one thread.
pub struct Stopwatch {
    schedstat: File,
}

/// How long something took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Took {
    /// On its CPU, or waiting by its own choice.
    pub own: Duration,
    /// By the clock on the wall.
    pub wall: Duration,
}

impl Stopwatch {
    pub fn of_this_thread() -> Self {
        let action = SigAction::new(SigHandler::Handler(on_continue), SaFlags::SA_RESTART, SigSet::empty());
        // SAFETY: the handler only raises an atomic counter.
        unsafe { sigaction(Signal::SIGCONT, &action) }.unwrap();
        Self { schedstat: File::open("/proc/thread-self/schedstat").unwrap() }
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
        let (delay, started) = (self.run_delay(), Instant::now());
        let result = work();
        let wall = started.elapsed();
        if CONTINUED.load(SeqCst) != continued {
            return (result, None);
        }
        (result, Some(Took { own: wall.saturating_sub(self.run_delay() - delay), wall }))
    }

    /// Do something and say how long it took.
    pub fn time<T>(&self, work: impl FnOnce() -> T) -> (T, Took) {
        let (result, took) = self.time_unless_stopped(work);
        (result, took.unwrap_or_default())
    }

    /// For how long this thread has waited for a CPU so far.
    fn run_delay(&self) -> Duration {
        let mut text = [0u8; 96];
        let bytes = self.schedstat.read_at(&mut text, 0).unwrap();
        let text = std::str::from_utf8(&text[..bytes]).unwrap();
        Duration::from_nanos(text.split_whitespace().nth(1).unwrap().parse().unwrap())
    }
}
