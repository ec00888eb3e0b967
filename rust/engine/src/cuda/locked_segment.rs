//! One segment of the pool and which chunks of it are page-locked.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::limits::REGISTRATION_BYTES_MAX;
use crate::slot_space::Segment;
use crate::sync::{Acquire, AtomicU32, AtomicUsize, Relaxed, Release};

use super::driver::{Driver, DriverResult, Entered};
use super::options::REGISTER_CHUNK_BYTES_MAX;
use super::touch::touch;

const _: () = assert!(REGISTER_CHUNK_BYTES_MAX < REGISTRATION_BYTES_MAX, "a chunk is one registration");

/// How long to sleep while another thread maps the chunk that is locked next.
const TOUCH_POLL_INTERVAL: Duration = Duration::from_micros(50);

// States of a chunk, in this order; unlocking leads back to MAPPED.
const NEW: u32 = 0;
/// Somebody is mapping it.
const MAPPING: u32 = 1;
const MAPPED: u32 = 2;
const LOCKED: u32 = 3;

/// A segment, page-locked in chunks of equal length, in any order. Unlocked and let go when it is dropped.
pub(super) struct LockedSegment {
    driver: Arc<dyn Driver>,
    segment: Segment,
    chunk_bytes: usize,
    chunks: Box<[AtomicU32]>,
    locked_bytes: AtomicUsize,
}

/// A chunk of a segment.
#[derive(Clone)]
pub(super) struct Chunk {
    pub(super) segment: Arc<LockedSegment>,
    pub(super) index: usize,
}

impl Chunk {
    /// What no other chunk of a segment in use has.
    pub(super) fn key(&self) -> (usize, usize) {
        (self.segment.segment.address, self.index)
    }
}

impl LockedSegment {
    /// Nothing is locked yet.
    pub(super) fn new(driver: Arc<dyn Driver>, segment: Segment, chunk_bytes: usize) -> Self {
        let chunks = (0..segment.bytes.div_ceil(chunk_bytes)).map(|_| AtomicU32::new(NEW)).collect();
        Self { driver, segment, chunk_bytes, chunks, locked_bytes: AtomicUsize::new(0) }
    }

    /// Whether this is `segment`. What is held here stays mapped, so no other can be at its address.
    pub(super) fn is(&self, segment: &Segment) -> bool {
        (self.segment.address, self.segment.bytes) == (segment.address, segment.bytes)
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
        self.locked_bytes.load(Relaxed)
    }

    /// Number of the chunk that holds the byte at `host`.
    pub(super) fn chunk_at(&self, host: usize) -> usize {
        (host - self.segment.address) / self.chunk_bytes
    }

    /// Bytes from `host` on, at most `bytes`, that lie in one chunk, and whether that is locked.
    pub(super) fn run(&self, host: usize, bytes: usize) -> (usize, bool) {
        let index = self.chunk_at(host);
        let end = self.segment.address + (index + 1) * self.chunk_bytes;
        ((end - host).min(bytes), self.is_locked(index))
    }

    /// Whether a chunk is locked.
    pub(super) fn is_locked(&self, index: usize) -> bool {
        // Acquire: pairs with the store after the driver's call.
        self.chunks[index].load(Acquire) == LOCKED
    }

    /// Numbers of the chunks that are not locked.
    pub(super) fn unlocked(&self) -> impl Iterator<Item = usize> {
        (0..self.chunks.len()).filter(|index| !self.is_locked(*index))
    }

    fn range(&self, index: usize) -> (usize, usize) {
        let offset = index * self.chunk_bytes;
        (self.segment.address + offset, (self.segment.bytes - offset).min(self.chunk_bytes))
    }

    /// Have the kernel map a chunk, unless somebody has done so or is at it. Whatever the driver has to map by itself
    /// it maps under its lock, while everybody else waits for that.
    pub(super) fn touch_chunk(&self, index: usize) {
        let state = &self.chunks[index];
        if state.compare_exchange(NEW, MAPPING, Relaxed, Relaxed).is_ok() {
            let (address, bytes) = self.range(index);
            touch(address, bytes);
            state.store(MAPPED, Release);
        }
    }

    /// Whether somebody has mapped a chunk, or is at it.
    #[cfg(test)]
    pub(super) fn is_touched(&self, index: usize) -> bool {
        self.chunks[index].load(Relaxed) != NEW
    }

    /// Lock a chunk; one thread locks and unlocks. Returns how long the driver was busy with it, not at all if it was
    /// locked already.
    pub(super) fn lock_chunk(&self, index: usize) -> DriverResult<Duration> {
        if self.is_locked(index) {
            return Ok(Duration::ZERO);
        }
        self.touch_chunk(index);
        while self.chunks[index].load(Acquire) == MAPPING {
            std::thread::sleep(TOUCH_POLL_INTERVAL);
        }
        let (address, bytes) = self.range(index);
        let started = Instant::now();
        self.driver.register_host(address, bytes)?;
        self.chunks[index].store(LOCKED, Release);
        self.locked_bytes.fetch_add(bytes, Relaxed);
        Ok(started.elapsed())
    }

    /// Unlock one chunk, from the end. No copy may hold the segment. Returns how long the driver was busy with it;
    /// `None` if nothing is locked.
    pub(super) fn unlock_last(&self) -> Option<Duration> {
        let index = (0..self.chunks.len()).rev().find(|index| self.is_locked(*index))?;
        self.chunks[index].store(MAPPED, Relaxed);
        let (address, bytes) = self.range(index);
        self.locked_bytes.fetch_sub(bytes, Relaxed);
        let started = Instant::now();
        if let Err(error) = self.driver.unregister_host(address) {
            log::warn!("pegaflow: a segment stays mapped, since it cannot be unlocked: {error}");
            std::mem::forget(self.segment.clone());
        }
        Some(started.elapsed())
    }
}

impl Drop for LockedSegment {
    fn drop(&mut self) {
        // Tried even if the driver refuses this thread: what stays locked can never be unmapped.
        let _entered = Entered::new(&*self.driver);
        while self.unlock_last().is_some() {}
    }
}
