//! How far page-locking has come, for people and metrics.

use std::time::Duration;

use crate::sync::{AtomicU64, Relaxed};

/// How often there is a line in the log while work goes on.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// Where page-locking stands.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RegistrationProgress {
    /// Segments seen.
    pub segments: usize,
    /// Their bytes.
    pub bytes_seen: u64,
    /// Bytes of them that are page-locked.
    pub bytes_registered: u64,
    /// Bytes that were page-locked so far, those of segments that are gone included.
    pub bytes_total: u64,
    /// Seconds since page-locking began, without those in which there was nothing to do.
    pub seconds: f64,
    /// Seconds of these in which the driver was busy with it, and other threads waited if they needed the driver.
    pub driver_seconds: f64,
    /// Why there will be no more, if so.
    pub problem: Option<String>,
}

/// What was done so far; one thread writes.
#[derive(Default)]
pub(super) struct Work {
    nanoseconds: AtomicU64,
    driver_nanoseconds: AtomicU64,
    bytes: AtomicU64,
}

impl Work {
    /// Add time, time of it that the driver was busy, and bytes that were locked.
    pub(super) fn add(&self, time: Duration, driver_time: Duration, bytes: usize) {
        self.nanoseconds.fetch_add(time.as_nanos() as u64, Relaxed);
        self.driver_nanoseconds.fetch_add(driver_time.as_nanos() as u64, Relaxed);
        self.bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// Seconds, seconds of the driver, bytes.
    pub(super) fn sums(&self) -> (f64, f64, u64) {
        let seconds = |nanoseconds: &AtomicU64| Duration::from_nanos(nanoseconds.load(Relaxed)).as_secs_f64();
        (seconds(&self.nanoseconds), seconds(&self.driver_nanoseconds), self.bytes.load(Relaxed))
    }
}

/// Lines of the log: one every few seconds while there is work, one when there is no more.
#[derive(Default)]
pub(super) struct Reporter {
    /// Seconds and bytes of all work before this spell of it.
    before: (f64, u64),
    /// Seconds of all work at the last line, or at the end of the last spell.
    reported_seconds: f64,
}

impl Reporter {
    /// The line to write now, if any: of `locked` bytes of `seen`, after `work`, of which there is `more`.
    pub(super) fn line(&mut self, work: &Work, locked: u64, seen: u64, more: bool) -> Option<String> {
        let (seconds, _, bytes) = work.sums();
        let (spent, moved) = (seconds - self.before.0, bytes.saturating_sub(self.before.1) as f64 / 1e9);
        let due = if more { seconds - self.reported_seconds >= REPORT_INTERVAL.as_secs_f64() } else { spent > 0.0 };
        if !more {
            self.before = (seconds, bytes);
        }
        if !due {
            return None;
        }
        self.reported_seconds = seconds;
        let (locked, seen) = (locked as f64 / 1e9, seen as f64 / 1e9);
        Some(format!(
            "pegaflow: {locked:.2} of {seen:.2} GB of the pool are page-locked, {moved:.2} GB now in {spent:.2} s \
             ({:.1} GB/s)",
            moved / spent
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spell_of_work_is_reported_at_its_end_with_its_rate() {
        let (work, mut reporter) = (Work::default(), Reporter::default());
        assert_eq!(reporter.line(&work, 0, 4_000_000_000, false), None, "there was nothing to do yet");
        work.add(Duration::from_secs(2), Duration::from_secs(1), 4_000_000_000);
        let line = reporter.line(&work, 4_000_000_000, 4_000_000_000, false).unwrap();
        assert!(line.contains("4.00 of 4.00 GB") && line.contains("in 2.00 s (2.0 GB/s)"), "{line}");
        assert_eq!(reporter.line(&work, 4_000_000_000, 4_000_000_000, false), None, "said once");
    }

    #[test]
    fn long_work_is_reported_every_few_seconds() {
        let (work, mut reporter) = (Work::default(), Reporter::default());
        let mut lines = 0;
        for _ in 0..40 {
            lines += usize::from(reporter.line(&work, 0, 1, true).is_some());
            work.add(Duration::from_secs(1), Duration::ZERO, 100_000_000);
        }
        assert_eq!(lines, 7);
    }

    #[test]
    fn each_spell_has_its_own_rate() {
        let (work, mut reporter) = (Work::default(), Reporter::default());
        for _ in 0..2 {
            work.add(Duration::from_secs(1), Duration::ZERO, 3_000_000_000);
            assert!(reporter.line(&work, 0, 0, false).unwrap().contains("3.00 GB now in 1.00 s (3.0 GB/s)"));
        }
    }
}
