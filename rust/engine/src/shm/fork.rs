//! What a `fork()` after use must not do: keep the parent's liveness lock alive in the child.

use std::sync::Once;

use crate::sync::{AcqRel, Acquire, AtomicI32, AtomicU32, Relaxed, Release};

/// Pools and listening sockets that one process may have open.
const OPEN_MAX: usize = 256;
const NONE: i32 = -1;

static FORKS: AtomicU32 = AtomicU32::new(0);
static DESCRIPTORS: [AtomicI32; OPEN_MAX] = [const { AtomicI32::new(NONE) }; OPEN_MAX];
static HOOK: Once = Once::new();

/// Registers a descriptor that forked children close at once, and knows whether this is such a child.
pub struct ForkGuard {
    forks: u32,
    entry: usize,
}

impl ForkGuard {
    /// `None` if this process has too many pools open.
    pub fn new(descriptor: i32) -> Option<Self> {
        HOOK.call_once(|| {
            // SAFETY: `in_child` is an `extern "C"` function that only touches atomics and calls close(2), which is
            // async-signal-safe, as a fork handler of a threaded process has to be.
            let failed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            if failed != 0 {
                log::warn!("pegaflow: no fork handler; do not fork after opening a pool");
            }
        });
        let entry =
            DESCRIPTORS.iter().position(|entry| entry.compare_exchange(NONE, descriptor, AcqRel, Relaxed).is_ok())?;
        Some(Self { forks: FORKS.load(Acquire), entry })
    }

    /// Forget the descriptor; before it is closed, so that no child closes a number that was given out again.
    pub fn release(&self) {
        DESCRIPTORS[self.entry].store(NONE, Release);
    }

    /// Whether this process is a fork of the one that made the guard.
    pub fn forked(&self) -> bool {
        FORKS.load(Acquire) != self.forks
    }
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, AcqRel);
    for entry in &DESCRIPTORS {
        let descriptor = entry.swap(NONE, AcqRel);
        if descriptor != NONE {
            // SAFETY: the child's copy of a descriptor that only its guard's owner uses, and the owner refuses to
            // touch it in a forked process.
            unsafe { libc::close(descriptor) };
        }
    }
}
