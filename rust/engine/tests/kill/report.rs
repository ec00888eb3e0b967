//! What the workers of a run have done: a file of counters that a killed worker leaves behind, too.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use super::histogram::{BUCKETS, bucket_of, percentile};
use super::stopwatch::Took;

/// Operations that are timed, each by itself.
pub const OPERATIONS: [&str; 16] = [
    "lookup", "contains", "lease", "release", "touch", "reserve", "publish", "abort", "reset", "reap", "rebuild",
    "open", "put", "get", "remove", "keys",
];
/// Those that an engine's scheduler or worker calls while it serves.
pub const SERVING: usize = 8;
/// Counters of the worker itself.
pub const OPERATION_COUNT: usize = 0;
pub const CHECKED: usize = 1;
pub const BYTES_READ: usize = 2;
pub const BYTES_WRITTEN: usize = 3;
/// Blocks with wrong bytes.
pub const WRONG: usize = 4;
const OWN_COUNTERS: usize = 5;
/// Counters of the pool that a run has to move, or it did not hammer what it says.
pub const POOL_COUNTERS: [&str; 11] = [
    "blocks_published",
    "blocks_duplicate",
    "blocks_orphaned",
    "blocks_evicted",
    "slots_reaped",
    "processes_reaped",
    "locks_taken_over",
    "segments_created",
    "extents_retired",
    "index_rebuilds",
    "lock_timeouts",
];
/// Of each operation: how often, then how often its own time and its time on the wall fell into each bucket.
const WORDS_PER_OPERATION: usize = 1 + 2 * BUCKETS;
const OPERATION_WORDS: usize = OWN_COUNTERS + POOL_COUNTERS.len();
/// Sums first, then maxima: the longest wait for a lock, and of each operation its own time, that on the wall, and its
/// sleeps.
const SUMS: usize = OPERATION_WORDS + OPERATIONS.len() * WORDS_PER_OPERATION;
const WORDS: usize = SUMS + 1 + 3 * OPERATIONS.len();

/// Counters of one worker.
#[derive(Clone, Debug)]
pub struct Report {
    words: Vec<u64>,
}

impl Default for Report {
    fn default() -> Self {
        Self { words: vec![0; WORDS] }
    }
}

impl Report {
    pub fn count(&mut self, counter: usize, count: u64) {
        self.words[counter] += count;
    }

    /// Add the counters of a handle of the pool; once per handle, or to a copy.
    pub fn add_stats(&mut self, stats: &[(&'static str, u64)]) {
        let of = |name| stats.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no counter {name}")).1;
        for (word, name) in self.words[OWN_COUNTERS..].iter_mut().zip(POOL_COUNTERS) {
            *word += of(name);
        }
        self.words[SUMS] = self.words[SUMS].max(of("lock_wait_us_max"));
    }

    /// An operation was done, and took so long if that is known.
    pub fn took(&mut self, operation: usize, took: Option<Took>) {
        self.words[OPERATION_COUNT] += 1;
        let words = OPERATION_WORDS + operation * WORDS_PER_OPERATION;
        self.words[words] += 1;
        let Some(took) = took else { return };
        self.words[words + 1 + bucket_of(took.own)] += 1;
        self.words[words + 1 + BUCKETS + bucket_of(took.wall)] += 1;
        let own = &mut self.words[SUMS + 1 + 3 * operation];
        *own = (*own).max(took.own.as_micros() as u64);
        let wall = &mut self.words[SUMS + 2 + 3 * operation];
        *wall = (*wall).max(took.wall.as_micros() as u64);
        let sleeps = &mut self.words[SUMS + 3 + 3 * operation];
        *sleeps = (*sleeps).max(took.sleeps);
    }

    pub fn counted(&self, counter: usize) -> u64 {
        self.words[counter]
    }

    pub fn pool_counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
        POOL_COUNTERS.into_iter().zip(self.words[OWN_COUNTERS..].iter().copied())
    }

    pub fn lock_wait(&self) -> Duration {
        Duration::from_micros(self.words[SUMS])
    }

    /// Longest time of an operation: its own, and by the clock on the wall; and the most sleeps.
    pub fn longest(&self, operation: usize) -> Took {
        let word = |index| self.words[SUMS + index + 3 * operation];
        let time = |index| Duration::from_micros(word(index));
        Took { own: time(1), wall: time(2), sleeps: word(3) }
    }

    /// How often an operation was done.
    pub fn times(&self, operation: usize) -> u64 {
        self.words[OPERATION_WORDS + operation * WORDS_PER_OPERATION]
    }

    /// The time that 999 of 1000 of an operation did not exceed: its own, and by the clock on the wall.
    pub fn nearly_longest(&self, operation: usize) -> Took {
        let words = OPERATION_WORDS + operation * WORDS_PER_OPERATION + 1;
        let of = |first: usize| percentile(&self.words[first..first + BUCKETS], 999);
        Took { own: of(words), wall: of(words + BUCKETS), sleeps: 0 }
    }

    /// Add another worker's counters; of the maxima the larger ones stay.
    pub fn add(&mut self, other: &Self) {
        for (index, (word, value)) in self.words.iter_mut().zip(&other.words).enumerate() {
            *word = if index < SUMS { *word + value } else { (*word).max(*value) };
        }
    }

    pub fn write(&self, file: &Path) {
        let bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let file = File::options().write(true).create(true).truncate(false).open(file).unwrap();
        file.write_all_at(&bytes, 0).unwrap();
    }

    /// Counters of a worker; zeros if it was killed before it had written any.
    pub fn read(file: &Path) -> Self {
        let mut report = Self::default();
        let bytes = std::fs::read(file).unwrap_or_default();
        for (word, chunk) in report.words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(chunk.try_into().unwrap());
        }
        report
    }
}
