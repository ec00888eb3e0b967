//! Bounded waiting for other processes.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::error::{Error, Result};
use crate::limits::OBJECT_WAIT_MAX;
use crate::shm::lock::begin_operation;

/// Tries before the first sleep: mostly somebody is just finishing.
const TRIES_AT_ONCE: u32 = 16;
const SLEEP: Duration = Duration::from_micros(200);
const LONG_SLEEP_MIN: Duration = Duration::from_millis(1);
const LONG_SLEEP_SPREAD_NS: u64 = 7_000_000;

/// How long one operation has been waiting in all.
#[derive(Default)]
pub(super) struct Patience {
    tries: u32,
    since: Option<Instant>,
}

impl Patience {
    /// Wait a little before another try, or fail after [`OBJECT_WAIT_MAX`].
    pub(super) fn wait(&mut self) -> Result<()> {
        self.tries += 1;
        if self.tries <= TRIES_AT_ONCE {
            std::thread::yield_now();
            return Ok(());
        }
        self.sleep(SLEEP)
    }

    /// Wait some milliseconds before another try, each process another time: for those that were in each other's way.
    pub(super) fn wait_long(&mut self) -> Result<()> {
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.subsec_nanos());
        self.sleep(LONG_SLEEP_MIN + Duration::from_nanos(u64::from(nanos ^ std::process::id()) % LONG_SLEEP_SPREAD_NS))
    }

    fn sleep(&mut self, time: Duration) -> Result<()> {
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() > OBJECT_WAIT_MAX {
            return Err(Error::busy(format!(
                "another process of the pool has been in the way for {} s (is it stopped?): try again",
                OBJECT_WAIT_MAX.as_secs()
            )));
        }
        std::thread::sleep(time);
        // The next try may wait for locks as the first one did.
        begin_operation();
        Ok(())
    }

    /// Tries so far.
    pub(super) fn tries(&self) -> u32 {
        self.tries
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn patience_ends() {
        let mut patience = Patience::default();
        // More would take longer than it is to wait, on any host.
        let waits = TRIES_AT_ONCE + OBJECT_WAIT_MAX.div_duration_f64(SLEEP) as u32 + 2;
        let error = (0..waits).find_map(|_| patience.wait().err()).expect("an end");
        assert_eq!(error.kind(), ErrorKind::Busy);
    }
}
