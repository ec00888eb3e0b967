//! The only file that names atomics, so that what crosses processes is found in one place.
//! `tests/tidy` refuses them anywhere else.
//!
//! Under `cfg(loom)` words of shared memory, pauses and the clock of waits are those of the models (`model_words.rs`);
//! all else of the engine is the same code.

#[cfg(loom)]
pub(crate) use std::sync::atomic::Ordering;
pub(crate) use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

/// Words of one process, on which no protocol between processes rests: counters, switches, descriptors.
pub(crate) use std::sync::atomic::{AtomicI32, AtomicU32 as LocalU32, AtomicU64 as LocalU64, AtomicUsize};

#[cfg(loom)]
pub(crate) use crate::model_words::{AtomicU32, AtomicU64, Instant, fence, sleep, yield_now};
#[cfg(not(loom))]
pub(crate) use {
    std::sync::atomic::{AtomicU32, AtomicU64, fence},
    std::thread::{sleep, yield_now},
    std::time::Instant,
};

/// A word of shared memory on which no protocol rests (kept for later, for people, a number that somebody chose): in
/// models it costs nothing.
#[cfg(not(loom))]
pub(crate) type SpareWord = AtomicU64;
#[cfg(loom)]
pub(crate) type SpareWord = LocalU64;
