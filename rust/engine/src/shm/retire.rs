//! Taking an extent out of use, so that another namespace can have its segments.
//!
//! The retiring process reserves every slot of the extent; only when it owns them all can nobody else have a lease, a
//! reservation or a transfer there. If one cannot be had, everything is put back. What is in it goes (values of
//! `PegaEngine`), or moves to other slots of its namespace (`moves.rs`).

use crate::key::BlockRef;
use crate::shm::core::Core;
use crate::shm::extent::{Extent, ExtentState};
use crate::shm::free::TakenSlot;
use crate::shm::lease::is_leased;
use crate::shm::namespace::Namespace;
use crate::shm::rows::SlotHeader;
use crate::shm::state::{SlotState, State, sealed_word};
use crate::sync::{Acquire, Relaxed, SeqCst};

impl Core {
    /// Give back every extent of any namespace but `keep` in which no slot is used. Returns how many.
    pub(crate) fn retire_empty(&self, keep: Namespace) -> usize {
        let others = self.all_extents().into_iter().filter(|e| e.state == ExtentState::Ready && e.namespace != keep.0);
        others.filter(|extent| self.retire(extent, false)).count()
    }

    /// Take `extent` out of use; with `evict`, its sealed blocks go first.
    pub(crate) fn retire(&self, extent: &Extent, evict: bool) -> bool {
        if !self.may_retire(extent, evict) {
            return false;
        }
        let Some(extent) = self.claim_for_retiring(extent, false) else { return false };
        crate::crash_point::pass("retire.claimed");
        if evict {
            self.expect_orphans();
        }
        let mut owned = Vec::with_capacity(extent.slot_count as usize);
        let all = extent.slots().all(|slot| {
            let taken = self.own_for_retiring(slot, evict);
            owned.extend(taken);
            crate::crash_point::pass("retire.taken");
            taken.is_some()
        });
        self.end_retiring(&extent, owned, all)
    }

    /// Remove a RETIRING extent of which this process has all slots, or give back those that it has. Whether it went.
    pub(crate) fn end_retiring(&self, extent: &Extent, owned: Vec<TakenSlot>, all: bool) -> bool {
        let dropping = if all { self.move_on(extent, self.me.row, ExtentState::Dropping) } else { None };
        if let Some(dropping) = &dropping {
            self.extents_changed();
            crate::crash_point::pass("retire.dropping");
            self.drop_extent(dropping);
            self.stats.extents_retired.add(1);
        } else {
            for (slot, state) in owned {
                self.give_back(slot, state);
            }
            self.reopen(extent);
        }
        self.drop_orphans();
        dropping.is_some()
    }

    /// Whether it is worth the try: nothing is leased or on its way, so that no block is lost in vain.
    pub(crate) fn may_retire(&self, extent: &Extent, evict: bool) -> bool {
        extent.slots().all(|slot| {
            self.control.slot(slot).is_some_and(|header| {
                let state = SlotState::decode(header.state.load(Acquire)).map(|state| state.state);
                match state {
                    Some(State::Free) => true,
                    Some(State::Sealed) => evict && !is_leased(header),
                    Some(State::Member) => evict && self.head_of(header).is_some_and(|head| !is_leased(head)),
                    _ => false,
                }
            })
        })
    }

    /// READY to RETIRING; if `alone`, not while any other extent of the namespace is. The extent as it is then.
    pub(crate) fn claim_for_retiring(&self, extent: &Extent, alone: bool) -> Option<Extent> {
        let _structure = self.lock(&self.control.header().structure_lock)?;
        let is_other = |e: &Extent| e.namespace == extent.namespace && e.state == ExtentState::Retiring;
        if alone && self.all_extents().iter().any(is_other) {
            return None;
        }
        let now = Extent::load(&self.control, extent.index).ok().flatten().filter(|now| now == extent)?;
        let retiring = self.move_on(&now, self.me.row, ExtentState::Retiring)?;
        crate::crash_point::pass("retire.marked");
        self.extents_changed();
        self.still_claimed(&retiring, &now).then_some(retiring)
    }

    fn own_for_retiring(&self, slot: u32, evict: bool) -> Option<TakenSlot> {
        if let Some(taken) = self.reserve_slot(slot) {
            return Some(taken);
        }
        if evict
            && let Some(block) = self.block_with(slot)
            && let Some(freeing) = self.evict_one(block, self.control.stamp(block).load(SeqCst), None)
        {
            self.count_evicted(self.namespace_in(block));
            self.give_back(block, freeing);
        }
        self.reserve_slot(slot)
    }

    /// Slot of the block that `slot` belongs to: itself, or the head of which it is a member.
    fn block_with(&self, slot: u32) -> Option<u32> {
        let header = self.control.slot(slot)?;
        match SlotState::decode(header.state.load(Acquire))?.state {
            State::Sealed => Some(slot),
            State::Member => self.head_of(header).map(|_| BlockRef(header.parent.load(Relaxed)).slot()),
            _ => None,
        }
    }

    /// The sealed head of a member.
    fn head_of(&self, member: &SlotHeader) -> Option<&SlotHeader> {
        let head = BlockRef(member.parent.load(Relaxed));
        let header = self.control.slot(head.slot())?;
        (header.state.load(Acquire) == sealed_word(head.generation())).then_some(header)
    }

    /// RETIRING back to READY, unless it is in other hands.
    pub(crate) fn reopen(&self, extent: &Extent) {
        for slot in extent.slots().take_while(|_| self.has_extent(extent)) {
            self.hint_free(slot);
        }
        if self.move_on(extent, 0, ExtentState::Ready).is_none() {
            return;
        }
        crate::crash_point::pass("retire.reopened");
        self.extents_changed();
        self.namespace_freed(extent.namespace);
    }
}
