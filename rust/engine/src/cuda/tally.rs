//! What was moved, and how.

use crate::sync::{AtomicU64, Relaxed};

/// Counters since the copier was made.
#[derive(Default)]
pub(super) struct Tally {
    pub(super) bytes_loaded: AtomicU64,
    pub(super) bytes_saved: AtomicU64,
    /// Microseconds for which bytes were on their way.
    pub(super) load_moving_us: AtomicU64,
    pub(super) save_moving_us: AtomicU64,
    pub(super) bytes_bounced: AtomicU64,
    pub(super) pieces_staged: AtomicU64,
    pub(super) pieces_direct: AtomicU64,
    pub(super) pieces_kernel: AtomicU64,
    pub(super) bounce_bytes: AtomicU64,
}

impl Tally {
    /// Add to a counter.
    pub(super) fn add(counter: &AtomicU64, count: usize) {
        counter.fetch_add(count as u64, Relaxed);
    }

    /// Names and values.
    pub(super) fn snapshot(&self) -> Vec<(&'static str, u64)> {
        [
            ("bytes_loaded", &self.bytes_loaded),
            ("bytes_saved", &self.bytes_saved),
            ("load_moving_us", &self.load_moving_us),
            ("save_moving_us", &self.save_moving_us),
            ("bytes_bounced", &self.bytes_bounced),
            ("pieces_staged", &self.pieces_staged),
            ("pieces_direct", &self.pieces_direct),
            ("pieces_kernel", &self.pieces_kernel),
            ("bounce_bytes", &self.bounce_bytes),
        ]
        .map(|(name, counter)| (name, counter.load(Relaxed)))
        .to_vec()
    }
}
