//! Eviction of values, for stores that allow it: those used longest ago first.
//!
//! A class runs out while another has room, so the victim is either the oldest value that has a slot of the wanted
//! class, or all of an extent of another class in which nothing is younger than that. A class in which nothing can go
//! takes an extent whatever is in it.

use std::sync::PoisonError;

use crate::limits::{EVICT_BATCH_MAX, EVICT_BATCH_MIN, EVICT_SCANS_MAX};
use crate::shm::extent::{Extent, ExtentState};
use crate::shm::free::TakenSlot;
use crate::shm::state::{SlotState, State};
use crate::sync::{Acquire, Relaxed, SeqCst};

use super::classes::HEAD;
use super::store::Inner;

/// Extents of other namespaces that are tried per scan, of those in which nothing is leased or being written.
const EXTENTS_TRIED_MAX: usize = 4;

/// Members of a victim among which one of the wanted class is looked for: the larger ones come first.
const MEMBERS_LOOKED_AT_MAX: usize = 1100;

/// Heads with their stamps, youngest first so that the oldest is popped.
pub(super) type Candidates = Vec<(u64, u32)>;

impl Inner {
    /// Evict until a slot of `class` may be free. Returns whether one may be, and the slot if it was got at once.
    pub(super) fn evict_for(&self, class: usize) -> (bool, Option<TakenSlot>) {
        let core = self.core();
        let mut candidates = self.candidates[class].lock().unwrap_or_else(PoisonError::into_inner);
        for scan in 0..=EVICT_SCANS_MAX {
            while let Some((stamp, slot)) = candidates.pop() {
                if let Some(freeing) = core.evict_one(slot, stamp, Some(self.classes.namespace(HEAD))) {
                    self.stats.evicted.add(1);
                    core.count_evicted(Some(self.classes.namespace(HEAD)));
                    self.search_where_it_was(slot, class);
                    if class == HEAD {
                        return (true, core.recycle(slot, freeing));
                    }
                    core.give_back(slot, freeing);
                    return (true, None);
                }
            }
            if scan == EVICT_SCANS_MAX {
                break;
            }
            if core.retire_empty(self.classes.namespace(class)) > 0 {
                return (true, None);
            }
            *candidates = self.scan(class);
            self.at_capacity[class].store(u64::MAX, Relaxed);
            // Values that were stored while there was no slot of the class have none to give.
            let has_slots = !core.extents(self.classes.namespace(class)).is_empty();
            let oldest = candidates.last().map(|(stamp, _)| *stamp).filter(|_| has_slots);
            if self.retire_older(class, oldest) {
                return (true, None);
            }
        }
        (false, None)
    }

    /// Have the search for a slot of `class` begin where a value that is about to be freed has one.
    fn search_where_it_was(&self, head: u32, class: usize) {
        let control = &self.core().control;
        let ns = self.classes.namespace(class);
        let mut slot = head;
        for _ in 0..MEMBERS_LOOKED_AT_MAX {
            let Some(header) = control.slot(slot) else { return };
            if header.tag.load(Relaxed) >> 16 == ns.id() {
                return self.core().search_from(ns, slot);
            }
            let Some(next) = header.member_next.load(Acquire).checked_sub(1) else { return };
            slot = next;
        }
    }

    /// The oldest values that have a slot of `class`.
    fn scan(&self, class: usize) -> Candidates {
        let core = self.core();
        let extents = core.extents(self.classes.namespace(HEAD));
        let mut oldest = Vec::new();
        for slot in extents.iter().flat_map(Extent::slots) {
            let stamp = core.control.stamp(slot).load(SeqCst);
            if stamp != 0 && (class == HEAD || self.has_slot_of(slot, class)) {
                oldest.push((stamp, slot));
            }
        }
        let wanted = (oldest.len() / 64).clamp(EVICT_BATCH_MIN, EVICT_BATCH_MAX);
        if oldest.len() > wanted {
            oldest.select_nth_unstable(wanted);
            oldest.truncate(wanted);
        }
        oldest.sort_unstable_by(|one, other| other.cmp(one));
        oldest
    }

    fn has_slot_of(&self, head: u32, class: usize) -> bool {
        let header = self.core().control.slot(head);
        header.is_some_and(|header| self.classes.uses(header.used_bytes.load(Relaxed) as usize, class))
    }

    /// Take the coldest extent of another namespace out of use if everything in it is older than `oldest`, the value
    /// that would go instead, and may go by the shares. Without such a value, one of which that is not true if need be:
    /// stores have no share, and would never get an extent of a pool that others have filled.
    fn retire_older(&self, class: usize, oldest: Option<u64>) -> bool {
        let core = self.core();
        let keep = self.classes.namespace(class).id();
        let all = core.all_extents();
        let shares = core.shares_in(&all);
        let others = all.iter().filter(|e| e.state == ExtentState::Ready && e.namespace != keep);
        let offers = others.filter_map(|extent| {
            let against_shares = !core.may_go(extent, &shares);
            let newest = self.newest(extent, oldest.unwrap_or(u64::MAX))?;
            (oldest.is_none() || !against_shares).then_some((against_shares, newest, extent))
        });
        let mut offers: Vec<(bool, u64, &Extent)> = offers.collect();
        offers.sort_unstable_by_key(|(against_shares, newest, _)| (*against_shares, *newest));
        let usable = offers.iter().filter(|(.., extent)| core.may_retire(extent, true));
        usable.take(EXTENTS_TRIED_MAX).any(|(.., extent)| core.retire(extent, true))
    }

    /// Stamp of the newest block that has a slot in the extent; `None` if that is not below `limit`.
    fn newest(&self, extent: &Extent, limit: u64) -> Option<u64> {
        let mut newest = 0;
        for slot in extent.slots() {
            newest = newest.max(self.stamp_of_owner(slot));
            if newest >= limit {
                return None;
            }
        }
        Some(newest)
    }

    fn stamp_of_owner(&self, slot: u32) -> u64 {
        let control = &self.core().control;
        let stamp = control.stamp(slot).load(Relaxed);
        if stamp != 0 {
            return stamp;
        }
        let Some(header) = control.slot(slot) else { return 0 };
        match SlotState::decode(header.state.load(Acquire)).map(|state| state.state) {
            Some(State::Member) => {
                let head = crate::key::BlockRef(header.parent.load(Relaxed)).slot();
                control.slot(head).map_or(0, |_| control.stamp(head).load(Relaxed))
            }
            _ => 0,
        }
    }
}
