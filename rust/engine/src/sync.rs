//! The only file that names atomics, so that what crosses processes is found in one place.
//! `tests/tidy` refuses them anywhere else.

pub(crate) use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, fence};

pub(crate) use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
