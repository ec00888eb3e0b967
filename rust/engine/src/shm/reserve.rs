//! Reserving slots for blocks that are not in the pool. Never waits for memory: what does not fit now is left out.

use std::sync::PoisonError;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::key::{BlockRef, Key};
use crate::limits::{GROW_RETRY_PAUSE, SPARE_EXTENT_BYTES_MIN};
use crate::shm::core::Core;
use crate::shm::free::TakenSlot;
use crate::shm::grow::unused_slots;
use crate::shm::namespace::{Identity, Namespace};
use crate::shm::rows::store4;
use crate::shm::state::{NOBODY, SlotState, State};
use crate::sync::{AcqRel, Relaxed, Release};

/// What this process remembers of a block between reserving and publishing it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    pub(crate) ns: Namespace,
    pub(crate) key: Key,
    pub(crate) parent: Option<Key>,
    /// Row of the instance on whose account it will be.
    pub(crate) account: u32,
    /// Whether it starts as if it had been used already, whatever the policy says.
    pub(crate) used: bool,
}

impl Core {
    /// Reserve a slot for each key that is not present, in order, stopping at the first that gets none.
    pub(crate) fn reserve(
        &self,
        ns: Namespace,
        keys: &[Key],
        parents: Option<&[Option<Key>]>,
        evict: bool,
    ) -> Result<Vec<(usize, BlockRef)>> {
        self.reserve_for(self.me.row, ns, keys, parents, evict)
    }

    /// As [`Self::reserve`], on the account of the instance in row `account`.
    pub(crate) fn reserve_for(
        &self,
        account: u32,
        ns: Namespace,
        keys: &[Key],
        parents: Option<&[Option<Key>]>,
        evict: bool,
    ) -> Result<Vec<(usize, BlockRef)>> {
        if parents.is_some_and(|parents| parents.len() != keys.len()) {
            return Err(Error::invalid("parents and keys differ in number: give one parent (or None) per key"));
        }
        let identity = self.identity(ns)?;
        let mut absent = Vec::new();
        let mut position = 0;
        self.find_many(&identity, keys, |found| {
            if found.is_none() {
                absent.push(position);
            }
            position += 1;
            true
        });
        let mut reserved = Vec::with_capacity(absent.len());
        for position in &absent {
            let Some(taken) = self.take_slot(ns, account, evict) else {
                // What waits for the pool to grow is not refused, and comes again.
                if !self.may_grow(ns) {
                    self.count_refused(ns, (absent.len() - reserved.len()) as u64);
                }
                break;
            };
            let parent = match parents {
                Some(parents) => parents[*position],
                None => position.checked_sub(1).map(|before| keys[before]),
            };
            let block = self.name_slot(taken, &identity, &keys[*position]);
            self.remember(block, Pending { ns, key: keys[*position], parent, account, used: false });
            reserved.push((*position, block));
        }
        self.grow_in_time(ns);
        Ok(reserved)
    }

    /// A slot reserved by this process: free, else evicted if that is allowed and the pool cannot grow.
    pub(crate) fn take_slot(&self, ns: Namespace, account: u32, evict: bool) -> Option<TakenSlot> {
        let extents = self.extents(ns);
        if let Some(taken) = self.take_free(ns, &extents) {
            return Some(taken);
        }
        if self.may_grow(ns) {
            self.ask_to_grow(ns);
            return None;
        }
        if evict { self.evict_into_reserved(ns, account) } else { None }
    }

    /// Write the name of the block into a reserved slot's header.
    pub(crate) fn name_slot(&self, taken: TakenSlot, identity: &Identity, key: &Key) -> BlockRef {
        let (slot, state) = taken;
        let header = self.control.slot_unchecked(slot);
        header.tag.store(identity.id << 16 | u32::from(key.len_bytes()), Relaxed);
        store4(&header.key, key.words());
        store4(&header.fingerprint, identity.fingerprint);
        header.parts_written.store(0, Relaxed);
        header.checksum.store(0, Relaxed);
        header.parent.store(0, Relaxed);
        header.used_bytes.store(0, Relaxed);
        header.member_next.store(0, Release);
        crate::crash_point::pass("reserve.keyed");
        state.block(slot)
    }

    /// RESERVED to MEMBER of `head`, linked behind slot `last`. A member that was not linked yet when its process died
    /// is found by its head being gone.
    pub(crate) fn make_member(&self, block: BlockRef, head: BlockRef, last: u32) {
        let header = self.control.slot_unchecked(block.slot());
        header.parent.store(head.0, Release);
        let mine = SlotState::new(block.generation(), self.me.row, State::Reserved);
        let member = SlotState::new(block.generation(), NOBODY, State::Member);
        if header.state.compare_exchange(mine.encode(), member.encode(), AcqRel, Relaxed).is_ok() {
            crate::crash_point::pass("chain.linked");
            self.control.slot_unchecked(last).member_next.store(block.slot() + 1, Release);
            crate::crash_point::pass("chain.extended");
        }
    }

    pub(crate) fn remember(&self, block: BlockRef, pending: Pending) {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).insert(block, pending);
    }

    pub(crate) fn forget(&self, block: BlockRef) -> Option<Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).remove(&block)
    }

    /// Whether there is room for another extent of `ns`, as far as this process knows.
    pub(crate) fn may_grow(&self, ns: Namespace) -> bool {
        let paused = self.grow_paused_until.lock().unwrap_or_else(PoisonError::into_inner);
        if paused.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        drop(paused);
        let Ok(info) = self.namespace_info(ns) else { return false };
        let (used, slots_left) = self.used_segments();
        slots_left && used + info.parts as usize <= self.control.geometry().segments_max() as usize
    }

    pub(crate) fn pause_growth(&self) {
        *self.grow_paused_until.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Instant::now() + GROW_RETRY_PAUSE);
    }

    /// Ask for the next extent when less than a quarter of one is left; of large ones, which take long to make, as soon
    /// as the last one is begun.
    fn grow_in_time(&self, ns: Namespace) {
        let extents = self.extents(ns);
        let Some(largest) = extents.iter().max_by_key(|extent| extent.slot_count) else {
            self.ask_to_grow(ns);
            return;
        };
        let per_extent = u64::from(largest.slot_count);
        let least = if largest.bytes >= SPARE_EXTENT_BYTES_MIN { per_extent } else { per_extent / 4 };
        if self.due_for_free_count(ns, (per_extent / 16).max(16))
            && self.count_free_hints(&extents) < least
            && self.may_grow(ns)
        {
            self.ask_to_grow(ns);
        }
    }

    /// Segments in use, and whether any slot number is not: small blocks run out of those first.
    fn used_segments(&self) -> (usize, bool) {
        let version = self.control.header().extents_version.load(crate::sync::Acquire);
        let mut cache = self.used_segments.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.0 != version {
            let all = self.all_extents();
            let slots_left = unused_slots(&all, self.control.geometry().slots_max, 1).is_some();
            *cache = (version, (all.iter().map(|extent| extent.segments.len()).sum(), slots_left));
        }
        cache.1
    }
}
