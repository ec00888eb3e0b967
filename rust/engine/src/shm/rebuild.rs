//! Rebuilding the index from the slot headers, which are the truth.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::key::BlockRef;
use crate::limits::CHAIN_HOPS_MAX;
use crate::shm::core::Core;
use crate::shm::evict::name_of;
use crate::shm::extent::Extent;
use crate::shm::state::{NOBODY, SlotState, State};
use crate::sync::{Acquire, Relaxed, Release, SeqCst};

/// Blocks that lose against another of their key, and that other.
type Doomed = HashMap<BlockRef, BlockRef>;

impl Core {
    /// Link every sealed slot anew, all stripes held. Returns how many blocks are in the index afterwards. Readers see
    /// misses meanwhile. A process that dies here leaves `rebuild_wanted` set, and the next one starts over.
    pub(crate) fn rebuild_index(&self) -> Result<usize> {
        let header = self.control.header();
        header.rebuild_wanted.store(1, SeqCst);
        crate::crash_point::pass("rebuild.wanted");
        let mut guards = Vec::new();
        for stripe in self.control.stripes() {
            let guard = self
                .lock(&stripe.lock)
                .ok_or_else(|| Error::busy("a sibling holds a lock of the index (is it stopped?): try again"))?;
            guards.push(guard);
            crate::crash_point::pass("rebuild.locked");
        }
        for stripe in self.control.stripes() {
            let version = stripe.version.load(Relaxed);
            stripe.version.store(version | 1, SeqCst);
            crate::crash_point::pass("rebuild.odd");
        }
        self.control.buckets().iter().for_each(|bucket| bucket.store(0, Relaxed));
        crate::crash_point::pass("rebuild.cleared");
        let mut doomed = HashMap::new();
        let extents = self.all_extents();
        extents.iter().flat_map(Extent::slots).for_each(|slot| self.relink(slot, &mut doomed));
        crate::crash_point::pass("rebuild.linked");
        self.rename_parents(&extents, &doomed);
        let linked = extents.iter().flat_map(Extent::slots).filter(|slot| self.is_sealed(*slot)).count();
        header.rebuild_wanted.store(0, SeqCst);
        crate::crash_point::pass("rebuild.done");
        header.rebuilds.fetch_add(1, SeqCst);
        for stripe in self.control.stripes() {
            stripe.version.fetch_add(1, SeqCst);
            crate::crash_point::pass("rebuild.even");
        }
        drop(guards);
        doomed.into_keys().for_each(|block: BlockRef| self.settle_doomed(block.slot()));
        self.count_rebuild();
        log::info!("pegaflow: rebuilt the index of pool {}: {linked} blocks", self.name);
        Ok(linked)
    }

    fn is_sealed(&self, slot: u32) -> bool {
        let state = self.control.slot(slot).and_then(|header| SlotState::decode(header.state.load(Acquire)));
        state.is_some_and(|state| state.state == State::Sealed)
    }

    /// Put one sealed slot on its chain. Of two with one key (a block was stored again while nobody could find it) the
    /// more recent stays.
    fn relink(&self, slot: u32, doomed: &mut Doomed) {
        if !self.is_sealed(slot) {
            return;
        }
        let header = self.control.slot_unchecked(slot);
        let Some((identity, key)) = name_of(header) else { return };
        let bucket = &self.control.buckets()[self.bucket_of(&identity, &key)];
        let mut link = bucket;
        // Links are this process's own, unless somebody damages them meanwhile: so they are checked like all others.
        for _ in 0..CHAIN_HOPS_MAX {
            let Some(other) = link.load(Relaxed).checked_sub(1) else { break };
            let Some(there) = self.control.slot(other) else { break };
            let same = name_of(there).is_some_and(|(whose, name)| {
                name == key && whose.id == identity.id && whose.fingerprint == identity.fingerprint
            });
            if !same {
                link = &there.next;
            } else if self.stamp_value(other) < self.stamp_value(slot) {
                link.store(there.next.load(Relaxed), Relaxed);
                self.doom_in_rebuild(other, slot, doomed);
            } else {
                self.doom_in_rebuild(slot, other, doomed);
                return;
            }
        }
        header.next.store(bucket.load(Relaxed), Relaxed);
        bucket.store(slot + 1, Release);
        crate::crash_point::pass("rebuild.relinked");
    }

    fn doom_in_rebuild(&self, slot: u32, survivor: u32, doomed: &mut Doomed) {
        let block = |slot| BlockRef::new(slot, (self.control.slot_unchecked(slot).state.load(Acquire) >> 32) as u32);
        let (loser, survivor) = (block(slot), block(survivor));
        let word = SlotState::new(loser.generation(), NOBODY, State::Doomed).encode();
        self.control.slot_unchecked(slot).state.store(word, SeqCst);
        doomed.insert(loser, survivor);
        crate::crash_point::pass("rebuild.doomed");
    }

    /// The children of a doomed block are now those of the survivor. A sibling that has touched a child meanwhile may
    /// not have reached any block before it: so the survivor is touched before it gets the child, and both after.
    fn rename_parents(&self, extents: &[Extent], doomed: &Doomed) {
        if doomed.is_empty() {
            return;
        }
        for slot in extents.iter().flat_map(Extent::slots).filter(|slot| self.is_sealed(*slot)) {
            let parent = &self.control.slot_unchecked(slot).parent;
            if let Some(survivor) = doomed.get(&BlockRef(parent.load(Relaxed))) {
                self.keep(*survivor);
                parent.store(survivor.0, SeqCst);
                crate::crash_point::pass("rebuild.renamed");
                let state = self.control.slot_unchecked(slot).state.load(Acquire);
                self.keep(BlockRef::new(slot, (state >> 32) as u32));
            }
        }
    }

    fn stamp_value(&self, slot: u32) -> u64 {
        self.control.stamp(slot).load(Relaxed)
    }
}
