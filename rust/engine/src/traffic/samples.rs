//! Blocks whose reuse is followed: a hash table of samples, and over their places in the order of use a tree of sums
//! that tells how many bytes were used since. The samples are the truth, the tree follows from them. All of this under
//! the lock of the curve.

use super::file::Traffic;
use super::rows::Sample;
use crate::limits::{TRAFFIC_PLACES, TRAFFIC_PROBES_MAX, TRAFFIC_SAMPLES_MAX};
use crate::sync::Relaxed;

/// Lowest threshold, and so one block in 2^32 that is followed at least.
const THRESHOLD_MIN: u64 = 1 << 32;

impl Traffic {
    /// Blocks with hashes below are followed.
    pub(super) fn threshold(&self) -> u64 {
        match self.header().threshold.load(Relaxed) {
            0 => u64::MAX,
            threshold => threshold.max(THRESHOLD_MIN),
        }
    }

    fn slots_for(&self, hash: u64) -> impl Iterator<Item = &Sample> {
        let samples = self.samples();
        (0..TRAFFIC_PROBES_MAX).map(move |probe| &samples[(hash as usize).wrapping_add(probe) & (samples.len() - 1)])
    }

    /// The sample of this hash.
    pub(super) fn sample(&self, hash: u64) -> Option<&Sample> {
        self.slots_for(hash)
            .take_while(|sample| sample.place.load(Relaxed) != 0)
            .find(|sample| sample.hash.load(Relaxed) == hash)
    }

    /// Units of 1,024 bytes of all samples.
    pub(super) fn kib_in_all(&self) -> u64 {
        self.sum_to(self.last_place())
    }

    /// Of those that were used before this one, and its own.
    pub(super) fn kib_until(&self, sample: &Sample) -> u64 {
        self.sum_to(sample.place.load(Relaxed) as usize)
    }

    /// The block of this hash was used now. If there is no room for it the threshold sinks, and it may not be followed
    /// any more. `seen`: where its sample was found a moment ago, if it was.
    pub(super) fn note_use(&self, hash: u64, kib: u32, seen: Option<&Sample>) {
        if self.last_place() + 1 >= TRAFFIC_PLACES {
            self.number_anew(self.threshold());
        }
        // Numbering anew may have put another one there.
        let still = seen.filter(|sample| sample.hash.load(Relaxed) == hash && sample.place.load(Relaxed) != 0);
        let known = still.or_else(|| self.sample(hash));
        if known.is_none() && self.header().samples.load(Relaxed) as usize >= TRAFFIC_SAMPLES_MAX {
            self.lower_threshold();
            if hash >= self.threshold() {
                return;
            }
        }
        let Some(sample) = known.or_else(|| self.free_slot(hash)) else { return };
        let (before, place) = (sample.place.load(Relaxed) as usize, self.last_place() + 1);
        if before == 0 {
            sample.hash.store(hash, Relaxed);
            self.header().samples.fetch_add(1, Relaxed);
        } else {
            self.add(before, 0u64.wrapping_sub(u64::from(sample.kib.load(Relaxed))));
        }
        sample.kib.store(kib, Relaxed);
        sample.place.store(place as u32, Relaxed);
        self.header().last_place.store(place as u64, Relaxed);
        self.add(place, u64::from(kib));
    }

    fn free_slot(&self, hash: u64) -> Option<&Sample> {
        self.slots_for(hash).find(|sample| sample.place.load(Relaxed) == 0)
    }

    fn last_place(&self) -> usize {
        (self.header().last_place.load(Relaxed) as usize).min(TRAFFIC_PLACES - 1)
    }

    /// A quarter of what is followed is no longer.
    fn lower_threshold(&self) {
        let mut threshold = self.threshold();
        while self.header().samples.load(Relaxed) as usize >= TRAFFIC_SAMPLES_MAX && threshold > THRESHOLD_MIN {
            threshold = threshold / 4 * 3;
            self.header().threshold.store(threshold, Relaxed);
            self.number_anew(threshold);
        }
    }

    /// Give the samples below the threshold the first places in the order that they have, and make the tree anew. A
    /// death here loses samples, so that the curve goes on as if those blocks had never been used.
    pub(super) fn number_anew(&self, threshold: u64) {
        let facts = |sample: &Sample| (sample.place.load(Relaxed), sample.hash.load(Relaxed), sample.kib.load(Relaxed));
        let mut kept: Vec<(u32, u64, u32)> = self.samples().iter().map(facts).collect();
        kept.retain(|(place, hash, _)| *place != 0 && *hash < threshold);
        kept.sort_unstable();
        let first = kept.len().saturating_sub(TRAFFIC_SAMPLES_MAX);
        self.samples().iter().for_each(|sample| sample.place.store(0, Relaxed));
        self.tree().iter().for_each(|word| word.store(0, Relaxed));
        crate::crash_point::pass("traffic.emptied");
        let mut last = 0;
        for (_, hash, kib) in &kept[first..] {
            let free = if self.sample(*hash).is_none() { self.free_slot(*hash) } else { None };
            let Some(sample) = free else { continue };
            last += 1;
            sample.hash.store(*hash, Relaxed);
            sample.kib.store(*kib, Relaxed);
            sample.place.store(last, Relaxed);
            self.add(last as usize, u64::from(*kib));
        }
        self.header().samples.store(u64::from(last), Relaxed);
        self.header().last_place.store(u64::from(last), Relaxed);
    }

    /// To all sums that a place is in. Places that cannot be are in none.
    fn add(&self, place: usize, kib: u64) {
        let (tree, mut at) = (self.tree(), place);
        while at != 0 && at < tree.len() {
            tree[at].store(tree[at].load(Relaxed).wrapping_add(kib), Relaxed);
            at += at & at.wrapping_neg();
        }
    }

    fn sum_to(&self, place: usize) -> u64 {
        let (tree, mut at, mut sum) = (self.tree(), place.min(TRAFFIC_PLACES - 1), 0u64);
        while at != 0 {
            sum = sum.wrapping_add(tree[at].load(Relaxed));
            at &= at - 1;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::file::Place;
    use crate::traffic::name::mixed;

    #[test]
    fn what_was_used_since_is_told_exactly_while_all_fit() {
        let traffic = Traffic::open_or_create(&Place::Anonymous, 1).unwrap();
        let count = TRAFFIC_SAMPLES_MAX as u64;
        for round in 0..10u64 {
            for number in 0..count {
                if let Some(sample) = traffic.sample(mixed(number)) {
                    let since = traffic.kib_in_all() - traffic.kib_until(sample);
                    assert_eq!(since, 2 * (count - 1), "{number} in round {round}");
                }
                traffic.note_use(mixed(number), 2, None);
            }
        }
        assert_eq!(traffic.header().samples.load(Relaxed), count);
        assert_eq!(traffic.threshold(), u64::MAX);
    }

    #[test]
    fn samples_never_grow_beyond_their_number_and_the_threshold_sinks() {
        let traffic = Traffic::open_or_create(&Place::Anonymous, 1).unwrap();
        for number in 0..20 * TRAFFIC_SAMPLES_MAX as u64 {
            if mixed(number) < traffic.threshold() {
                traffic.note_use(mixed(number), 1, None);
            }
            assert!(traffic.header().samples.load(Relaxed) as usize <= TRAFFIC_SAMPLES_MAX);
        }
        let rate = traffic.threshold() as f64 / u64::MAX as f64;
        assert!((0.025..0.055).contains(&rate), "{rate}");
    }
}
