//! Mapping memory of segments before somebody has to wait for it.

use std::num::NonZero;
use std::thread::available_parallelism;

use crate::sync::{AtomicU32, AtomicUsize, Relaxed};

use super::locked_segment::Chunk;

/// Memory is touched in steps of this length: whoever maps memory meanwhile waits no longer than for one.
const TOUCH_BYTES: usize = 2 << 20;
/// Threads that touch memory where there are CPUs to spare.
const TOUCH_THREADS_MAX: usize = 4;
const CPUS_TO_SPARE: usize = 8;

/// Threads that may help with touching memory here.
pub(super) fn touch_threads() -> usize {
    let cpus = available_parallelism().map_or(1, NonZero::get);
    if cpus >= CPUS_TO_SPARE { TOUCH_THREADS_MAX } else { 0 }
}

/// Have the kernel map memory, which it clears first if it is new. Best effort: older kernels do it at its first use.
pub(super) fn touch(address: usize, bytes: usize) {
    for offset in (0..bytes).step_by(TOUCH_BYTES) {
        let start = std::ptr::with_exposed_provenance_mut(address + offset);
        // SAFETY: maps pages of a range that the caller's segment keeps mapped; changes no byte.
        unsafe { libc::madvise(start, TOUCH_BYTES.min(bytes - offset), libc::MADV_POPULATE_WRITE) };
    }
}

/// Do `work` while up to `threads` others touch the chunks, in order. They stop when it is done.
pub(super) fn touch_meanwhile<T>(chunks: &[Chunk], threads: usize, work: impl FnOnce() -> T) -> T {
    let (next, stop) = (AtomicUsize::new(0), AtomicU32::new(0));
    let touch_in_turn = || {
        while stop.load(Relaxed) == 0
            && let Some(chunk) = chunks.get(next.fetch_add(1, Relaxed))
        {
            chunk.segment.touch_chunk(chunk.index);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.min(chunks.len()) {
            // Without helpers, whoever locks a chunk touches it.
            let _started = std::thread::Builder::new().name("pega-touch".into()).spawn_scoped(scope, touch_in_turn);
        }
        let outcome = work();
        stop.store(1, Relaxed);
        outcome
    })
}
