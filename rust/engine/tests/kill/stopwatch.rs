//! Time that an operation took, less the time for which this thread was ready to run but the host had no CPU for it:
//! that much is the scheduler's doing and not the pool's.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

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
        Self { schedstat: File::open("/proc/thread-self/schedstat").unwrap() }
    }

    /// Do something and say how long it took.
    pub fn time<T>(&self, work: impl FnOnce() -> T) -> (T, Took) {
        let (delay, started) = (self.run_delay(), Instant::now());
        let result = work();
        let wall = started.elapsed();
        (result, Took { own: wall.saturating_sub(self.run_delay() - delay), wall })
    }

    /// For how long this thread has waited for a CPU so far.
    fn run_delay(&self) -> Duration {
        let mut text = [0u8; 96];
        let bytes = self.schedstat.read_at(&mut text, 0).unwrap();
        let text = std::str::from_utf8(&text[..bytes]).unwrap();
        Duration::from_nanos(text.split_whitespace().nth(1).unwrap().parse().unwrap())
    }
}
