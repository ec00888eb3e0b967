//! The only file that names atomics. All of them are words of one process: counters, gauges, switches.

pub(crate) use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// What the mutex guards. A panic elsewhere leaves nothing half done behind here.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
