//! One segment of the pool and how much of it is page-locked.

use std::num::NonZero;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use crate::slot_space::Segment;
use crate::sync::{Acquire, AtomicUsize, Relaxed, Release};

use super::driver::{Driver, DriverResult, Entered};

/// Memory is touched in steps of this length: whoever maps memory meanwhile waits no longer than for one.
const TOUCH_BYTES: usize = 2 << 20;
/// Threads that touch memory where there are CPUs to spare.
const TOUCH_THREADS: usize = 4;
const CPUS_TO_SPARE: usize = 8;

/// A segment, page-locked in chunks from its beginning. Unlocked and let go when it is dropped.
pub(super) struct LockedSegment {
    driver: Arc<dyn Driver>,
    segment: Segment,
    chunk_bytes: usize,
    locked_bytes: AtomicUsize,
    touched_bytes: AtomicUsize,
}

impl LockedSegment {
    /// Nothing is locked yet.
    pub(super) fn new(driver: Arc<dyn Driver>, segment: Segment, chunk_bytes: usize) -> Self {
        Self { driver, segment, chunk_bytes, locked_bytes: AtomicUsize::new(0), touched_bytes: AtomicUsize::new(0) }
    }

    /// Its length.
    pub(super) fn bytes(&self) -> usize {
        self.segment.bytes
    }

    /// First address beyond it.
    pub(super) fn end(&self) -> usize {
        self.segment.address + self.segment.bytes
    }

    /// Bytes that are locked.
    pub(super) fn locked_bytes(&self) -> usize {
        // Acquire: pairs with the store after the driver's call.
        self.locked_bytes.load(Acquire)
    }

    /// First address that is not locked.
    pub(super) fn locked_end(&self) -> usize {
        self.segment.address + self.locked_bytes()
    }

    /// Bytes from `host` on, at most `bytes`, that were locked by one call.
    pub(super) fn run(&self, host: usize, bytes: usize) -> usize {
        let offset = host - self.segment.address;
        let chunk_end = (offset / self.chunk_bytes + 1) * self.chunk_bytes;
        chunk_end.min(self.locked_bytes()).saturating_sub(offset).min(bytes)
    }

    /// Lock one more chunk. Returns how long the driver was busy with it.
    pub(super) fn lock_chunk(&self) -> DriverResult<Duration> {
        let offset = self.locked_bytes.load(Relaxed);
        let bytes = (self.segment.bytes - offset).min(self.chunk_bytes);
        self.touch_next();
        let started = Instant::now();
        self.driver.register_host(self.segment.address + offset, bytes)?;
        self.locked_bytes.store(offset + bytes, Release);
        Ok(started.elapsed())
    }

    /// Have the kernel map the chunk that is locked next, if it has not done so yet. Whatever the driver has to map by
    /// itself it maps under its lock, while everybody else waits for that.
    pub(super) fn touch_next(&self) {
        let offset = self.locked_bytes.load(Relaxed);
        let bytes = (self.segment.bytes - offset).min(self.chunk_bytes);
        if self.touched_bytes.fetch_max(offset + bytes, Relaxed) < offset + bytes {
            touch(self.segment.address + offset, bytes);
        }
    }

    /// Unlock one chunk, from the end. No copy may hold the segment. Returns how long the driver was busy with it.
    pub(super) fn unlock_chunk(&self) -> Duration {
        let locked = self.locked_bytes.load(Relaxed);
        let offset = locked.saturating_sub(1) / self.chunk_bytes * self.chunk_bytes;
        self.locked_bytes.store(offset, Relaxed);
        let started = Instant::now();
        if let Err(error) = self.driver.unregister_host(self.segment.address + offset) {
            log::warn!("pegaflow: a segment stays mapped, since it cannot be unlocked: {error}");
            std::mem::forget(self.segment.clone());
        }
        started.elapsed()
    }
}

impl Drop for LockedSegment {
    fn drop(&mut self) {
        // Tried even if the driver refuses this thread: what stays locked can never be unmapped.
        let _entered = Entered::new(&*self.driver);
        while self.locked_bytes.load(Relaxed) > 0 {
            self.unlock_chunk();
        }
    }
}

/// Have the kernel map memory that is already there. Best effort: older kernels do it when it is used.
fn touch(address: usize, bytes: usize) {
    let cpus = available_parallelism().map_or(1, NonZero::get);
    let threads = if cpus >= CPUS_TO_SPARE { TOUCH_THREADS } else { 1 };
    let share = bytes.div_ceil(threads).next_multiple_of(TOUCH_BYTES);
    let touch_share = |number: usize| {
        for offset in (number * share..bytes.min((number + 1) * share)).step_by(TOUCH_BYTES) {
            let start = std::ptr::with_exposed_provenance_mut(address + offset);
            // SAFETY: maps pages of a range that the caller's segment keeps mapped; changes no byte.
            unsafe { libc::madvise(start, TOUCH_BYTES.min(bytes - offset), libc::MADV_POPULATE_WRITE) };
        }
    };
    std::thread::scope(|scope| {
        let helpers = (1..threads).map(|number| {
            std::thread::Builder::new().name("pega-touch".into()).spawn_scoped(scope, move || touch_share(number))
        });
        let _started: Vec<_> = helpers.collect();
        touch_share(0);
    });
}
