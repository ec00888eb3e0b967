//! The clocks: wall time for people, boot time for waiting, a thread's own for what it costs others.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

/// Time that this thread has had a processor.
pub(crate) fn thread_time() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Milliseconds since boot, suspended time included: the same for all processes of a host, and never set back.
pub(crate) fn boot_ms() -> u64 {
    if cfg!(loom) {
        return 1;
    }
    match nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME) {
        Ok(now) => now.tv_sec() as u64 * 1000 + now.tv_nsec() as u64 / 1_000_000,
        Err(_) => 0,
    }
}
