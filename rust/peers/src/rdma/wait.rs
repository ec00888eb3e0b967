//! Waiting for one of several descriptors.

use std::os::fd::RawFd;
use std::time::Instant;

/// Wait until one of `descriptors` is readable, or `until`; or less, if a signal comes.
pub(super) fn readable(descriptors: &[RawFd], until: Instant) {
    let entry = |fd: &RawFd| libc::pollfd { fd: *fd, events: libc::POLLIN, revents: 0 };
    let mut entries: Vec<libc::pollfd> = descriptors.iter().map(entry).collect();
    let left = until.saturating_duration_since(Instant::now()).as_millis().min(1000) as i32 + 1;
    // SAFETY: the array is as long as is said, and descriptors that are none are only reported.
    unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, left) };
}
