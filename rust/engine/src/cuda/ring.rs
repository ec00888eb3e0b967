//! Buffers in device memory through which blocks go packed, each with a page-locked partner in host memory for what
//! the device cannot copy by itself.

use std::num::NonZero;
use std::sync::Arc;
use std::thread::available_parallelism;

use crate::copy::{CopyRange, CopyThreads, copy_ranges};

use super::driver::{CopyOp, Driver, DriverResult, Event};
use super::tally::Tally;

/// Copies by the CPU are cut to this length and spread over threads.
const CPU_COPY_BYTES: usize = 512 << 10;
/// Threads that help with them at most: a few fill the bus, and more only take CPUs from the engine.
const CPU_COPY_THREADS_MAX: usize = 8;

/// One buffer.
pub(super) struct RingBuffer {
    pub(super) device: u64,
    /// Partner in host memory, once there is one.
    pub(super) bounce: Option<usize>,
    /// What is behind the use of the buffer that is under way, if one is.
    pub(super) busy_until: Option<Event>,
    /// Whether that is not in a stream yet, and perhaps never will be: then nobody can be told to wait for it.
    pub(super) is_open: bool,
}

/// The buffers of one direction, used in turn.
pub(super) struct Ring {
    driver: Arc<dyn Driver>,
    buffers: Vec<RingBuffer>,
    buffer_bytes: usize,
    next: usize,
}

impl Ring {
    pub(super) fn new(driver: &Arc<dyn Driver>, count: usize, buffer_bytes: usize) -> DriverResult<Self> {
        let mut ring = Self { driver: Arc::clone(driver), buffers: Vec::with_capacity(count), buffer_bytes, next: 0 };
        for _ in 0..count {
            match driver.allocate(buffer_bytes) {
                Ok(device) => ring.buffers.push(RingBuffer { device, bounce: None, busy_until: None, is_open: false }),
                Err(error) => {
                    ring.close();
                    return Err(error);
                }
            }
        }
        Ok(ring)
    }

    /// The buffer that is next in turn.
    pub(super) fn next(&self) -> &RingBuffer {
        &self.buffers[self.next]
    }

    /// Make host partners for all buffers before a job waits for them: each takes some 10 ms. As far as that is
    /// possible; what is missing is tried again at its first use.
    pub(super) fn prepare(&mut self, tally: &Tally) {
        for index in 0..self.buffers.len() {
            if let Err(error) = self.bounce_of(index, tally) {
                log::debug!("pegaflow: no page-locked buffer yet: {error}");
                return;
            }
        }
    }

    /// Host partner of the buffer that is next in turn.
    pub(super) fn bounce_of_next(&mut self, tally: &Tally) -> DriverResult<usize> {
        self.bounce_of(self.next, tally)
    }

    fn bounce_of(&mut self, index: usize, tally: &Tally) -> DriverResult<usize> {
        let buffer = &mut self.buffers[index];
        match buffer.bounce {
            Some(address) => Ok(address),
            None => {
                let address = self.driver.allocate_host(self.buffer_bytes)?;
                Tally::add(&tally.bounce_bytes, self.buffer_bytes);
                Ok(*buffer.bounce.insert(address))
            }
        }
    }

    /// Use the next buffer until `event`. Returns its number.
    pub(super) fn take_next(&mut self, event: Event) -> usize {
        let index = self.next;
        self.buffers[index].busy_until = Some(event);
        self.buffers[index].is_open = true;
        self.next = (index + 1) % self.buffers.len();
        index
    }

    /// The event that ends the use of a buffer is behind all of it.
    pub(super) fn close_use(&mut self, index: usize) {
        self.buffers[index].is_open = false;
    }

    /// The use of a buffer that ended with `event` is over.
    pub(super) fn release(&mut self, index: usize, event: Event) {
        let buffer = &mut self.buffers[index];
        if buffer.busy_until == Some(event) {
            buffer.busy_until = None;
            buffer.is_open = false;
        }
    }

    /// Give everything back. Nothing may use it any more.
    pub(super) fn close(&mut self) {
        for buffer in self.buffers.drain(..) {
            self.driver.free(buffer.device);
            if let Some(address) = buffer.bounce {
                self.driver.free_host(address);
            }
        }
    }
}

/// A copy between a ring buffer's host partner and a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct CpuCopy {
    /// Position of the block in its piece.
    pub(super) position: usize,
    pub(super) source: usize,
    pub(super) target: usize,
    pub(super) bytes: usize,
}

/// Threads that help with copies by the CPU; started when there is something to copy.
#[derive(Default)]
pub(super) struct CpuCopier {
    threads: Option<CopyThreads>,
}

impl CpuCopier {
    /// Copy and wait. `false` if that failed.
    ///
    /// # Safety
    /// As [`copy_ranges`].
    pub(super) unsafe fn copy(&mut self, copies: &[CpuCopy]) -> bool {
        let mut ranges = Vec::new();
        for &CpuCopy { source, target, bytes, .. } in copies {
            for offset in (0..bytes).step_by(CPU_COPY_BYTES) {
                ranges.push(CopyRange {
                    source: std::ptr::with_exposed_provenance(source + offset),
                    target: std::ptr::with_exposed_provenance_mut(target + offset),
                    bytes: CPU_COPY_BYTES.min(bytes - offset),
                });
            }
        }
        if self.threads.is_none() {
            // This thread copies too.
            let helpers = (available_parallelism().map_or(1, NonZero::get) / 2).clamp(2, CPU_COPY_THREADS_MAX) - 1;
            self.threads = CopyThreads::new(helpers).ok();
        }
        if let Some(threads) = &self.threads {
            // SAFETY: handed on from the caller.
            return unsafe { copy_ranges(threads, ranges, 0, false) }.is_ok();
        }
        for range in ranges {
            // SAFETY: handed on from the caller.
            unsafe { std::ptr::copy_nonoverlapping(range.source, range.target, range.bytes) };
        }
        true
    }
}

/// The same copies between a ring buffer and its partner rather than the slots.
pub(super) fn by_bounce(copies: &[CopyOp], ring: u64, bounce: usize) -> Vec<CopyOp> {
    let mut all: Vec<CopyOp> = Vec::with_capacity(copies.len());
    for copy in copies {
        let moved = CopyOp { host: bounce + (copy.device - ring) as usize, ..*copy };
        match all.last_mut() {
            Some(last) if last.device + last.bytes as u64 == moved.device => last.bytes += moved.bytes,
            _ => all.push(moved),
        }
    }
    all
}
