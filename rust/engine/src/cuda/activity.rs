//! Whether somebody would notice that the driver is busy with something else: steps of the model, and copies.

use std::time::{Duration, Instant};

use crate::sync::{Acquire, AtomicU32, AtomicU64, AtomicUsize, Relaxed, Release};

/// After a step, the engine counts as busy for so long: decoding steps follow each other much faster.
pub(super) const QUIET_AFTER_STEP: Duration = Duration::from_millis(100);

/// The engine counts as busy for so long after its copier was made, unless its first step is over before: it starts,
/// and thousands of calls of the driver follow each other, each of which would wait for a chunk to be locked.
pub(super) const STARTING: Duration = Duration::from_secs(5);

/// What goes on in this process besides page-locking.
pub(super) struct Activity {
    created: Instant,
    stepping: AtomicU32,
    /// Nanoseconds from `created` to when the engine becomes quiet.
    quiet_from: AtomicU64,
    jobs: AtomicUsize,
}

impl Default for Activity {
    fn default() -> Self {
        let quiet_from = (STARTING.as_nanos() as u64).into();
        Self { created: Instant::now(), stepping: 0.into(), quiet_from, jobs: 0.into() }
    }
}

impl Activity {
    /// A step of the model begins, or has ended as far as the CPU is concerned.
    pub(super) fn set_stepping(&self, stepping: bool) {
        let quiet_from = self.created.elapsed() + QUIET_AFTER_STEP;
        self.quiet_from.store(quiet_from.as_nanos() as u64, Relaxed);
        // Release: pairs with the load in `is_busy`, which then sees the time as well.
        self.stepping.store(u32::from(stepping), Release);
    }

    /// A copy job begins.
    pub(super) fn begin_job(&self) {
        self.jobs.fetch_add(1, Relaxed);
    }

    /// `count` copy jobs are over.
    pub(super) fn end_jobs(&self, count: usize) {
        self.jobs.fetch_sub(count, Relaxed);
    }

    /// Whether the driver has to be left alone most of the time.
    pub(super) fn is_busy(&self) -> bool {
        let now = || self.created.elapsed().as_nanos() as u64;
        self.jobs.load(Relaxed) > 0 || self.stepping.load(Acquire) > 0 || now() < self.quiet_from.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn idle() -> Activity {
        let activity = Activity::default();
        activity.quiet_from.store(0, Relaxed);
        activity
    }

    #[test]
    fn an_engine_is_busy_while_it_starts() {
        let mut activity = Activity::default();
        let busy = activity.is_busy();
        assert!(busy || activity.created.elapsed() >= STARTING);
        activity.created -= STARTING;
        assert!(!activity.is_busy(), "whether or not there was a step");
    }

    #[test]
    fn the_first_step_ends_the_start() {
        let activity = Activity::default();
        activity.set_stepping(true);
        activity.set_stepping(false);
        let from = Duration::from_nanos(activity.quiet_from.load(Relaxed));
        assert!(from < activity.created.elapsed() + QUIET_AFTER_STEP, "not that of the start");
    }

    #[test]
    fn an_engine_is_busy_from_the_start_of_a_step_until_some_time_after_its_end() {
        let activity = Activity::default();
        activity.set_stepping(true);
        std::thread::sleep(QUIET_AFTER_STEP);
        assert!(activity.is_busy(), "a step that lasts");
        let before = activity.created.elapsed();
        activity.set_stepping(false);
        let from = Duration::from_nanos(activity.quiet_from.load(Relaxed));
        assert!(from >= before + QUIET_AFTER_STEP, "the next step may be about to begin");
        let busy = activity.is_busy();
        assert!(busy || activity.created.elapsed() >= from);
        std::thread::sleep(QUIET_AFTER_STEP);
        assert!(!activity.is_busy());
    }

    #[test]
    fn copies_keep_an_engine_busy() {
        let activity = idle();
        activity.begin_job();
        activity.begin_job();
        activity.end_jobs(1);
        assert!(activity.is_busy());
        activity.end_jobs(1);
        assert!(!activity.is_busy());
    }
}
