//! Times by how often they came, in steps of about a fifth: enough for a percentile, and of a fixed size.

use std::time::Duration;

/// Steps per doubling.
const STEPS: u64 = 4;
/// Buckets: up to some hundred seconds.
pub const BUCKETS: usize = 30 * STEPS as usize;

/// The bucket of a time.
pub fn bucket_of(time: Duration) -> usize {
    let us = (time.as_micros() as u64).max(1);
    let doublings = u64::from(us.ilog2());
    let step = if doublings < 2 { 0 } else { (us - (1 << doublings)) >> (doublings - 2) };
    ((doublings * STEPS + step) as usize).min(BUCKETS - 1)
}

/// The longest time that falls into a bucket.
fn end_of(bucket: usize) -> Duration {
    let (doublings, step) = (bucket as u64 / STEPS, bucket as u64 % STEPS);
    let us = (1u64 << doublings) + if doublings < 2 { 0 } else { (step + 1) << (doublings - 2) };
    Duration::from_micros(us)
}

/// The time that at least `per_mille` of a thousand do not exceed, to the end of its bucket.
pub fn percentile(counts: &[u64], per_mille: u64) -> Duration {
    let total: u64 = counts.iter().sum();
    let mut left = (total * per_mille).div_ceil(1000);
    for (bucket, count) in counts.iter().enumerate() {
        if left <= *count {
            return if total == 0 { Duration::ZERO } else { end_of(bucket) };
        }
        left -= count;
    }
    Duration::ZERO
}
