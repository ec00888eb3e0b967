//! How long bytes of one direction were on their way: by it, a rate says what the bus gives, however long jobs had to
//! wait for the caller's stream to produce what they save.

use std::time::{Duration, Instant};

/// Adds up the time for which something moves, as often as somebody looks.
#[derive(Default)]
pub(super) struct MovingTime {
    since: Option<Instant>,
    /// Less than a microsecond that was not reported yet.
    rest: Duration,
}

impl MovingTime {
    /// Whether something moves from `now` on. Returns the microseconds to add for the time up to now.
    pub(super) fn look(&mut self, moves: bool, now: Instant) -> usize {
        let past = self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since)) + self.rest;
        self.since = moves.then_some(now);
        let whole = past.as_micros() as u64;
        self.rest = past - Duration::from_micros(whole);
        whole as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_time_for_which_something_moves_counts_and_nothing_of_it_is_lost() {
        let (mut moving, start) = (MovingTime::default(), Instant::now());
        let mut sum = 0;
        for step in 0..1000u64 {
            let at = start + Duration::from_nanos(1500 * step);
            sum += moving.look(step % 10 < 5, at);
        }
        sum += moving.look(false, start + Duration::from_nanos(1_500_000));
        assert_eq!(sum, 750, "five of ten steps of 1.5 us each");
    }
}
