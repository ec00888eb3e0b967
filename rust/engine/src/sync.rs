//! The only file that names atomics, so that what crosses processes is found in one place.
#![allow(clippy::disallowed_types, reason = "this is the module that the rest of the crate imports them from")]

pub(crate) use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, fence};

pub(crate) use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
