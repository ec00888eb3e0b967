//! Hints: which records are on SSD, as far as 64 bits of their names tell. One process writes them, all read them, and
//! a wrong one costs no more than a miss.

use std::sync::Arc;

use super::counters::Counter;
use super::rows::{BUCKET_TAGS, HintBucket};
use super::segment::Segment;
use crate::ssd::IndexWatch;
use crate::sync::{AtomicU64, Relaxed};

/// No tag.
const EMPTY: u64 = 0;

impl Segment {
    /// The two buckets in which a tag may be.
    fn buckets_of(&self, tag: u64) -> [&HintBucket; 2] {
        let hints = self.hints();
        let mask = hints.len() - 1;
        [&hints[tag as usize & mask], &hints[(tag >> 32) as usize & mask]]
    }

    fn places_of(&self, tag: u64) -> impl Iterator<Item = &AtomicU64> {
        self.buckets_of(tag).into_iter().flat_map(|bucket| &bucket.tags)
    }

    /// Whether there is a hint.
    pub(crate) fn is_hinted(&self, tag: u64) -> bool {
        tag != EMPTY && self.places_of(tag).any(|place| place.load(Relaxed) == tag)
    }

    pub(crate) fn hint(&self, tag: u64) {
        if tag == EMPTY || self.is_hinted(tag) {
            return;
        }
        let free = self.places_of(tag).find(|place| place.load(Relaxed) == EMPTY);
        let place = free.unwrap_or_else(|| {
            self.header().add(Counter::HintsDropped, 1);
            // Any of them: bits that chose neither bucket choose the place.
            let [first, second] = self.buckets_of(tag);
            let bucket = if tag >> 63 == 0 { first } else { second };
            &bucket.tags[(tag >> 57) as usize % BUCKET_TAGS]
        });
        place.store(tag, Relaxed);
        crate::crash_point::pass("ssd.hinted");
    }

    pub(crate) fn unhint(&self, tag: u64) {
        if tag != EMPTY {
            self.places_of(tag)
                .filter(|place| place.load(Relaxed) == tag)
                .for_each(|place| place.store(EMPTY, Relaxed));
        }
    }

    pub(crate) fn clear_hints(&self) {
        self.hints().iter().flat_map(|bucket| &bucket.tags).for_each(|place| place.store(EMPTY, Relaxed));
    }
}

/// Keeps the hints what the index of the store is.
pub(crate) struct Mirror(pub(crate) Arc<Segment>);

impl IndexWatch for Mirror {
    fn added(&self, tag: u64) {
        self.0.hint(tag);
    }

    fn removed(&self, tag: u64) {
        self.0.unhint(tag);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::file::Place;
    use crate::ssd::fake_block::Random;

    #[test]
    fn what_was_hinted_is_found_until_it_goes_or_there_is_no_place() {
        let segment = Segment::open_or_create(&Place::Anonymous, 0).unwrap();
        let places = segment.hints().len() * BUCKET_TAGS;
        let mut random = Random::new(1);
        let tags: Vec<u64> = (0..places).map(|_| random.next()).collect();
        let (few, many) = tags.split_at(places * 3 / 4);
        few.iter().for_each(|tag| segment.hint(*tag));
        let dropped = |segment: &Segment| segment.header().counters[Counter::HintsDropped as usize].load(Relaxed);
        let lost = few.iter().filter(|tag| !segment.is_hinted(**tag)).count();
        assert!(lost as u64 == dropped(&segment) && lost < places / 100, "{lost} of {} are lost", few.len());
        many.iter().for_each(|tag| segment.hint(*tag));
        let lost = tags.iter().filter(|tag| !segment.is_hinted(**tag)).count();
        assert!(lost as u64 <= dropped(&segment) && lost > 0, "not all of them have a place");
        let (gone, left) = tags.split_at(places / 2);
        let before = left.iter().filter(|tag| segment.is_hinted(**tag)).count();
        gone.iter().for_each(|tag| segment.unhint(*tag));
        assert!(!gone.iter().any(|tag| segment.is_hinted(*tag)));
        assert_eq!(left.iter().filter(|tag| segment.is_hinted(**tag)).count(), before);
        segment.clear_hints();
        assert!(!tags.iter().any(|tag| segment.is_hinted(*tag)));
    }

    #[test]
    fn an_impossible_tag_is_no_hint() {
        let segment = Segment::open_or_create(&Place::Anonymous, 0).unwrap();
        segment.hint(EMPTY);
        assert!(!segment.is_hinted(EMPTY));
        segment.unhint(EMPTY);
    }
}
