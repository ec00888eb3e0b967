//! Bounded waiting for other processes.

use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::limits::OBJECT_WAIT_MAX;

/// Tries before the first sleep: mostly somebody is just finishing.
const TRIES_AT_ONCE: u32 = 16;
const SLEEP: Duration = Duration::from_micros(200);

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
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() > OBJECT_WAIT_MAX {
            return Err(Error::busy(format!(
                "another process of the pool has been in the way for {} s (is it stopped?): try again",
                OBJECT_WAIT_MAX.as_secs()
            )));
        }
        std::thread::sleep(SLEEP);
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
        let started = Instant::now();
        let mut patience = Patience::default();
        let error = loop {
            if let Err(error) = patience.wait() {
                break error;
            }
        };
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(started.elapsed() < 3 * OBJECT_WAIT_MAX);
    }
}
