//! Most blocks are used once. A new one starts near the old end, so that it soon goes if it is one of those; what comes
//! back after it went starts at the young end, and so does whatever is used a second time while it is there.

use super::{Policy, Start};

/// A new block starts one part in so many of the way from the oldest time to now.
const PART: u64 = 5;

pub(super) struct Probation;

impl Policy for Probation {
    fn name(&self) -> &'static str {
        "probation"
    }

    fn time(&self, start: Start) -> u64 {
        if start.returns { start.now } else { start.now - start.now.saturating_sub(start.oldest) / PART * (PART - 1) }
    }
}
