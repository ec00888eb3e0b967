//! What the workers of one hammer run have done: a file of counters that a killed worker leaves behind, too.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use super::stopwatch::Took;

/// Operations whose longest time is kept, each by itself.
pub const OPERATIONS: [&str; 10] =
    ["lookup", "lease", "release", "touch", "reserve", "publish", "abort", "reset", "reap", "rebuild"];
/// Those that an engine's scheduler or worker calls while it serves.
pub const SERVING: usize = 7;
/// Counters of the hammer itself.
pub const OPERATION_COUNT: usize = 0;
pub const CHECKED: usize = 1;
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
const SUMS: usize = 2 + POOL_COUNTERS.len();
const WORDS: usize = SUMS + 1 + 2 * OPERATIONS.len();

/// Counters of one worker.
#[derive(Clone, Debug)]
pub struct Report {
    words: [u64; WORDS],
}

impl Default for Report {
    fn default() -> Self {
        Self { words: [0; WORDS] }
    }
}

impl Report {
    pub fn count(&mut self, counter: usize, count: u64) {
        self.words[counter] += count;
    }

    /// Add the counters of a handle of the pool; once per handle, or to a copy.
    pub fn add_stats(&mut self, stats: &[(&'static str, u64)]) {
        let of = |name| stats.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no counter {name}")).1;
        for (word, name) in self.words[2..].iter_mut().zip(POOL_COUNTERS) {
            *word += of(name);
        }
        self.words[SUMS] = self.words[SUMS].max(of("lock_wait_us_max"));
    }

    pub fn took(&mut self, operation: usize, took: Took) {
        let own = &mut self.words[SUMS + 1 + 2 * operation];
        *own = (*own).max(took.own.as_micros() as u64);
        let wall = &mut self.words[SUMS + 2 + 2 * operation];
        *wall = (*wall).max(took.wall.as_micros() as u64);
    }

    pub fn counted(&self, counter: usize) -> u64 {
        self.words[counter]
    }

    pub fn pool_counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
        POOL_COUNTERS.into_iter().zip(self.words[2..].iter().copied())
    }

    pub fn lock_wait(&self) -> Duration {
        Duration::from_micros(self.words[SUMS])
    }

    /// Longest time of an operation: its own, and by the clock on the wall.
    pub fn longest(&self, operation: usize) -> Took {
        let word = |index| Duration::from_micros(self.words[SUMS + index + 2 * operation]);
        Took { own: word(1), wall: word(2) }
    }

    /// Add another worker's counters; of the maxima the larger ones stay.
    pub fn add(&mut self, other: &Self) {
        for (index, (word, value)) in self.words.iter_mut().zip(other.words).enumerate() {
            *word = if index < SUMS { *word + value } else { (*word).max(value) };
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
