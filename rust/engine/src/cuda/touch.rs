//! Mapping memory of segments before somebody has to wait for it.

use crate::shm::backing::populate;
use crate::sync::{AtomicU32, AtomicUsize, Relaxed};

use super::locked_segment::Chunk;

/// Have the kernel map memory of a segment that the caller holds.
pub(super) fn touch(address: usize, bytes: usize) {
    // SAFETY: the caller's segment keeps the range mapped.
    unsafe { populate(address, bytes) };
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
