//! Rebuilding the index from the slot headers, which are the truth.

use crate::error::{Error, Result};
use crate::shm::core::Core;
use crate::shm::evict::name_of;
use crate::shm::extent::Extent;
use crate::shm::state::{NOBODY, SlotState, State};
use crate::sync::{Acquire, Relaxed, Release, SeqCst};

impl Core {
    /// Link every sealed slot anew, all stripes held. Returns how many blocks are in the index afterwards. Readers see
    /// misses meanwhile. A process that dies here leaves `rebuild_wanted` set, and the next one starts over.
    pub(crate) fn rebuild_index(&self) -> Result<usize> {
        let header = self.control.header();
        header.rebuild_wanted.store(1, SeqCst);
        let mut guards = Vec::new();
        for stripe in self.control.stripes() {
            let guard = self
                .lock(&stripe.lock)
                .ok_or_else(|| Error::busy("a sibling holds a lock of the index (is it stopped?): try again"))?;
            guards.push(guard);
        }
        for stripe in self.control.stripes() {
            let version = stripe.version.load(Relaxed);
            stripe.version.store(version | 1, SeqCst);
        }
        self.control.buckets().iter().for_each(|bucket| bucket.store(0, Relaxed));
        crate::crash_point::pass("rebuild.cleared");
        let mut linked = 0;
        let mut doomed = Vec::new();
        for slot in self.all_extents().iter().flat_map(Extent::slots) {
            if self.relink(slot, &mut doomed) {
                linked += 1;
            }
        }
        header.rebuild_wanted.store(0, SeqCst);
        header.rebuilds.fetch_add(1, SeqCst);
        for stripe in self.control.stripes() {
            stripe.version.fetch_add(1, SeqCst);
        }
        drop(guards);
        doomed.into_iter().for_each(|slot| self.settle_doomed(slot));
        self.stats.index_rebuilds.add(1);
        log::info!("pegaflow: rebuilt the index of pool {}: {linked} blocks", self.name);
        Ok(linked)
    }

    /// Put one sealed slot on its chain. Of two with one key the more recent stays.
    fn relink(&self, slot: u32, doomed: &mut Vec<u32>) -> bool {
        let Some(header) = self.control.slot(slot) else { return false };
        let Some(state) = SlotState::decode(header.state.load(Acquire)).filter(|s| s.state == State::Sealed) else {
            return false;
        };
        let Some((identity, key)) = name_of(header) else { return false };
        let bucket = &self.control.buckets()[self.bucket_of(&identity, &key)];
        let mut link = bucket;
        while let Some(other) = link.load(Relaxed).checked_sub(1) {
            let there = self.control.slot_unchecked(other);
            let same = name_of(there).is_some_and(|(whose, name)| {
                name == key && whose.id == identity.id && whose.fingerprint == identity.fingerprint
            });
            if !same {
                link = &there.next;
            } else if self.stamp_value(other) < self.stamp_value(slot) {
                link.store(there.next.load(Relaxed), Relaxed);
                self.doom_in_rebuild(other, doomed);
            } else {
                self.doom_in_rebuild(slot, doomed);
                return false;
            }
        }
        header.next.store(bucket.load(Relaxed), Relaxed);
        bucket.store(slot + 1, Release);
        state.state == State::Sealed
    }

    fn doom_in_rebuild(&self, slot: u32, doomed: &mut Vec<u32>) {
        let header = self.control.slot_unchecked(slot);
        let generation = (header.state.load(Acquire) >> 32) as u32;
        header.state.store(SlotState::new(generation, NOBODY, State::Doomed).encode(), SeqCst);
        doomed.push(slot);
    }

    fn stamp_value(&self, slot: u32) -> u64 {
        self.control.stamp(slot).load(Relaxed)
    }
}
