//! Moving bytes between host memory and slots, on the engine's own threads.
//!
//! `queue` decides what is next and `threads` does it; `copier` (blocks of a KV cache) and `ranges` (values) are the
//! two kinds of work; `copy_part` moves one block, `stream` one run of bytes.

mod copier;
mod copy_part;
mod layout;
mod queue;
mod ranges;
mod stream;
mod threads;
#[cfg(target_arch = "x86_64")]
mod xxh3_avx2;

#[cfg(test)]
mod copier_tests;

pub use copier::HostCopier;
pub use layout::{KvLayout, Region};
pub use queue::{CopyDone, JobId};
pub use ranges::{CopyRange, copy_range, copy_ranges};
pub use threads::CopyThreads;
