//! Miss-ratio curve: what the pool would find if it had another size. Reuse distances of a sample of the blocks, chosen
//! by their hashes (SHARDS with a fixed number of samples, Waldspurger et al., FAST 2015), in a histogram.
//!
//! The distance of a use is the bytes of the distinct blocks that were used since the one before, as the samples
//! among them tell. A cache of so many bytes and those of the block itself, that lets go what was used longest ago,
//! would have found it. The blocks of a prompt are used last one first, as in the pool, so that tails go before heads.

use super::file::Traffic;
use crate::limits::TRAFFIC_BUCKETS;
use crate::shm::lock::LockGuard;
use crate::sync::Relaxed;

/// Units of weight of one reference.
const WEIGHT_UNIT: u64 = 1024;
/// Upper bound of the first bucket, as a power of two.
const FIRST_BITS: u32 = 12;

/// What became of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It was asked for and not found in memory,
    Missed,
    /// or found there.
    Found,
    /// It was used, and nobody asked the pool for it.
    NotAsked,
}

/// A use of a followed block.
pub(super) struct Use {
    pub(super) hash: u64,
    pub(super) fate: Fate,
}

/// What one call tells the curve.
pub(super) struct Uses<'a> {
    /// Followed blocks of a prompt, first one first.
    pub(super) blocks: &'a [Use],
    /// How many blocks were asked for, followed or not, and missed; and found.
    pub(super) asked: [u64; 2],
    pub(super) block_bytes: u64,
}

impl Traffic {
    /// Count what was asked for. Needs no lock.
    pub(super) fn note_asked(&self, uses: &Uses<'_>) {
        for (word, count) in self.header().references.iter().zip(uses.asked) {
            word.fetch_add(count, Relaxed);
        }
    }

    /// Take note of a prompt.
    pub(super) fn note_uses(&self, _lock: &LockGuard<'_>, uses: &Uses<'_>) {
        self.begin();
        let threshold = self.threshold();
        let (kib, all) = (kib_of(uses.block_bytes), self.kib_in_all());
        let weight = scaled(WEIGHT_UNIT, threshold);
        let samples: Vec<_> = uses.blocks.iter().map(|block| self.sample(block.hash)).collect();
        for (block, sample) in uses.blocks.iter().zip(&samples) {
            if block.fate == Fate::NotAsked || block.hash >= threshold {
                continue;
            }
            self.header().sampled_weight[block.fate as usize].fetch_add(weight, Relaxed);
            if let Some(sample) = sample {
                let since = all.wrapping_sub(self.kib_until(sample)).saturating_mul(1024);
                let needed = scaled(since, threshold).saturating_add(uses.block_bytes);
                self.header().buckets[block.fate as usize][bucket_of(needed)].fetch_add(weight, Relaxed);
            }
        }
        self.note_asked(uses);
        crate::crash_point::pass("traffic.sampling");
        for (block, sample) in uses.blocks.iter().zip(&samples).rev() {
            // The threshold may sink meanwhile.
            if block.hash < self.threshold() && (block.fate != Fate::NotAsked || sample.is_some()) {
                self.note_use(block.hash, kib, *sample);
            }
        }
        self.end();
    }

    /// A followed block was stored: from now on it takes room, if it did not yet.
    pub(super) fn note_new(&self, _lock: &LockGuard<'_>, hash: u64, block_bytes: u64) {
        self.begin();
        if self.sample(hash).is_none() {
            self.note_use(hash, kib_of(block_bytes), None);
        }
        self.end();
    }

    fn begin(&self) {
        if self.header().curve_busy.swap(1, Relaxed) != 0 {
            // Somebody died here, and the tree may not be what the samples say.
            self.number_anew(self.threshold());
        }
    }

    fn end(&self) {
        self.header().curve_busy.store(0, Relaxed);
    }

    /// The curve as it is now.
    pub(super) fn curve(&self) -> Curve {
        let header = self.header();
        let of = |fate: Fate| Part {
            references: header.references[fate as usize].load(Relaxed),
            sampled_weight: header.sampled_weight[fate as usize].load(Relaxed),
            buckets: header.buckets[fate as usize].iter().map(|bucket| bucket.load(Relaxed)).collect(),
        };
        Curve { missed: of(Fate::Missed), found: of(Fate::Found) }
    }
}

fn kib_of(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX)
}

/// What a number of sampled things stands for.
fn scaled(count: u64, threshold: u64) -> u64 {
    u64::try_from((u128::from(count) << 64) / (u128::from(threshold) + 1)).unwrap_or(u64::MAX)
}

fn bucket_of(bytes: u64) -> usize {
    if bytes < 1 << FIRST_BITS {
        return 0;
    }
    let octave = bytes.ilog2();
    let quarter = bytes >> (octave - 2) & 3;
    ((octave - FIRST_BITS) as usize * 4 + quarter as usize + 1).min(TRAFFIC_BUCKETS - 1)
}

/// Lowest value of a bucket, and the first that is above all of its values.
fn bounds_of(bucket: usize) -> (u64, u64) {
    let Some(quarters) = bucket.checked_sub(1) else { return (0, 1 << FIRST_BITS) };
    let (shift, quarter) = (quarters as u32 / 4 + FIRST_BITS - 2, quarters as u64 % 4);
    ((4 + quarter) << shift, (5 + quarter) << shift)
}

/// A copy of the histogram.
///
/// What the pool found and what it did not find are told apart, since it is known of each block which it was: so much
/// of what chance does to a sample changes nothing near the size that the pool has.
pub(super) struct Curve {
    missed: Part,
    found: Part,
}

struct Part {
    references: u64,
    sampled_weight: u64,
    buckets: Vec<u64>,
}

impl Curve {
    /// Blocks that it is about.
    pub(super) fn references(&self) -> u64 {
        self.missed.references.saturating_add(self.found.references)
    }

    /// Millionths of the blocks that a pool of so many bytes would have found; `None` if none was asked for.
    pub(super) fn hit_ppm(&self, bytes: u64) -> Option<u64> {
        let references = self.references();
        if references == 0 {
            return None;
        }
        // Samples may hold more or fewer of the blocks that are used all the time than their due: what is missing is of
        // those (the adjustment of the SHARDS paper). They are among those found, if there are any.
        let missing = self.found.references as f64 - self.found.weight();
        let again = self.found.reused_within(bytes) + missing;
        let missed = self.missed.references as f64;
        // Of the others all are alike.
        let late = self.missed.reused_within(bytes) / self.missed.weight().max(f64::MIN_POSITIVE) * missed;
        let hits = again.clamp(0.0, self.found.references as f64) + late.clamp(0.0, missed);
        Some(((hits / references as f64).clamp(0.0, 1.0) * 1e6) as u64)
    }
}

impl Part {
    /// References that those that were followed stand for.
    fn weight(&self) -> f64 {
        self.sampled_weight as f64 / WEIGHT_UNIT as f64
    }

    /// Of these, those whose reuse distance is at most so many bytes.
    fn reused_within(&self, bytes: u64) -> f64 {
        let mut weight = 0f64;
        for (bucket, weights) in self.buckets.iter().enumerate() {
            let (low, high) = bounds_of(bucket);
            let part = bytes.saturating_sub(low) as f64 / (high - low) as f64;
            weight += *weights as f64 * part.min(1.0);
        }
        weight / WEIGHT_UNIT as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_size_is_within_the_bounds_of_its_bucket() {
        for bytes in (0..60).flat_map(|bits| [0, 1, 3].map(|more| (1u64 << bits) + more * (1 << bits) / 4)) {
            let (low, high) = bounds_of(bucket_of(bytes));
            assert!(bytes >= low && (bytes < high || bucket_of(bytes) == TRAFFIC_BUCKETS - 1), "{bytes}");
        }
        assert!((1..TRAFFIC_BUCKETS).all(|bucket| bounds_of(bucket).0 == bounds_of(bucket - 1).1));
    }
}
