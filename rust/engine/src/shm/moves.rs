//! An extent goes from one namespace to another: to one that has none, or one whose instance is below its share.
//!
//! The blocks that are lost are the oldest of the namespace that gives, wherever they are, and no more of them than one
//! extent has slots; what else is in the extent moves to the slots that they leave.

use std::collections::HashMap;
use std::time::Instant;

use crate::limits::{EXTENTS_TRIED_MAX, GROW_RETRY_PAUSE};
use crate::shm::core::Core;
use crate::shm::evict::{EvictQueue, Leaving};
use crate::shm::extent::{Extent, ExtentState};
use crate::shm::free::TakenSlot;
use crate::shm::namespace::{Namespace, is_kept};
use crate::shm::recency::owner_of;
use crate::shm::relocate::Moved;
use crate::shm::shares::Shares;
use crate::shm::state::SlotState;
use crate::sync::SeqCst;

/// What a namespace would lose with an extent.
#[derive(Default)]
struct Source {
    extents: Vec<Extent>,
    blocks: u64,
    /// Blocks of the asker.
    asker_blocks: u64,
    /// Blocks that may go by the shares.
    spare_blocks: u64,
}

/// An extent that is being emptied.
struct Evacuation<'a> {
    extent: &'a Extent,
    /// All extents of its namespace, itself too.
    extents: Vec<Extent>,
    leaving: Leaving,
    queue: EvictQueue,
    owned: HashMap<u32, SlotState>,
    /// Slots of other extents for what has to move.
    elsewhere: Vec<TakenSlot>,
    moved: Moved,
}

impl Core {
    /// A scan for victims found this instance below its share: have an extent of another namespace looked for.
    pub(crate) fn ask_for_share(&self, ns: Namespace, all: &[Extent], shares: &Shares) {
        let gives = |extent: &Extent| {
            extent.state == ExtentState::Ready && extent.namespace != ns.0 && !is_kept(&self.control, extent.namespace)
        };
        if self.is_entitled(ns, all, shares) && all.iter().any(gives) {
            self.ask_to_grow(ns);
        }
    }

    /// Whether one more extent is within this instance's share.
    fn is_entitled(&self, ns: Namespace, all: &[Extent], shares: &Shares) -> bool {
        let own = all.iter().filter(|extent| extent.namespace == ns.0).map(|extent| extent.bytes).max();
        let mine = shares.of(self.me.row);
        let paused = *self.moves_paused_until.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        own.is_some_and(|bytes| mine.used_bytes + bytes <= mine.bytes)
            && paused.is_none_or(|until| Instant::now() >= until)
    }

    /// Whether all blocks of an extent may go without another instance getting below its share.
    pub(crate) fn may_go(&self, extent: &Extent, shares: &Shares) -> bool {
        if is_kept(&self.control, extent.namespace) {
            return true;
        }
        let mut of_others: HashMap<u32, u64> = HashMap::new();
        let owners = extent.slots().filter_map(|slot| owner_of(self.control.stamp(slot).load(SeqCst)));
        for row in owners.filter(|row| *row != self.me.row && shares.is_instance(*row)) {
            *of_others.entry(row).or_default() += extent.slot_bytes();
        }
        of_others.into_iter().all(|(row, bytes)| bytes <= shares.of(row).excess_bytes())
    }

    /// There was nothing to take: do not look again for a while.
    fn pause_moves(&self) {
        *self.moves_paused_until.lock().unwrap_or_else(std::sync::PoisonError::into_inner) =
            Some(Instant::now() + GROW_RETRY_PAUSE);
    }

    /// Take an extent from another namespace, if `ns` is starving or this instance is below its share.
    ///
    /// By the shares go: blocks on nobody's account (unless they were used after every block of `ns`), and what others
    /// have beyond their shares. A starving namespace gets an extent even if nothing may go by the shares.
    pub(crate) fn take_extent(&self, ns: Namespace, starving: bool) -> bool {
        let all = self.all_extents();
        let shares = self.shares_in(&all);
        let has_room = || self.count_free_hints(&self.extents(ns)) > 0;
        if !starving && (has_room() || !self.is_entitled(ns, &all, &shares)) {
            return false;
        }
        let stamp = |slot| self.control.stamp(slot).load(SeqCst);
        let own = all.iter().filter(|extent| extent.namespace == ns.0);
        let oldest = own.flat_map(Extent::slots).map(stamp).filter(|stamp| *stamp != 0).min();
        let limit = oldest.filter(|_| !starving).unwrap_or(u64::MAX);
        let mut offers: Vec<(bool, u64, Extent)> = Vec::new();
        for source in self.sources(ns, &all, &shares, limit) {
            let slots: u64 = source.extents.iter().map(|extent| u64::from(extent.slot_count)).sum();
            for extent in &source.extents {
                let lost = (source.blocks + u64::from(extent.slot_count)).saturating_sub(slots);
                let spare = source.spare_blocks + if starving { source.asker_blocks } else { 0 };
                let against_shares = lost > spare;
                if starving || (!against_shares && source.asker_blocks == 0) {
                    let newest = extent.slots().map(stamp).max().unwrap_or(0);
                    offers.push((against_shares, newest, extent.clone()));
                }
            }
        }
        offers.sort_unstable_by_key(|(against_shares, newest, _)| (*against_shares, *newest));
        let usable = offers.iter().filter(|(_, _, extent)| self.may_retire(extent, true));
        let taken = usable.take(EXTENTS_TRIED_MAX).any(|(any, _, extent)| self.evacuate(extent, *any));
        if !taken && !starving {
            self.pause_moves();
        }
        taken
    }

    /// Namespaces that may give, with what is in them.
    fn sources(&self, ns: Namespace, all: &[Extent], shares: &Shares, limit: u64) -> Vec<Source> {
        let mut sources: HashMap<u32, Source> = HashMap::new();
        let gives = |extent: &&Extent| {
            extent.state == ExtentState::Ready && extent.namespace != ns.0 && !is_kept(&self.control, extent.namespace)
        };
        for extent in all.iter().filter(gives) {
            sources.entry(extent.namespace).or_default().extents.push(extent.clone());
        }
        for source in sources.values_mut() {
            let mut of_others: HashMap<u32, u64> = HashMap::new();
            for slot in source.extents.iter().flat_map(Extent::slots) {
                let stamp = self.control.stamp(slot).load(SeqCst);
                if stamp == 0 {
                    continue;
                }
                source.blocks += 1;
                match owner_of(stamp).filter(|row| shares.is_instance(*row)) {
                    None => source.spare_blocks += u64::from(stamp < limit),
                    Some(row) if row == self.me.row => source.asker_blocks += 1,
                    Some(row) => *of_others.entry(row).or_default() += 1,
                }
            }
            let slot_bytes = source.extents.iter().map(Extent::slot_bytes).max().unwrap_or(1).max(1);
            let excess = |(row, blocks): (u32, u64)| blocks.min(shares.of(row).excess_bytes() / slot_bytes);
            source.spare_blocks += of_others.into_iter().map(excess).sum::<u64>();
        }
        sources.into_values().collect()
    }

    /// Empty an extent and remove it; with `any`, whatever the shares. `false` if somebody uses a block of it.
    fn evacuate(&self, extent: &Extent, any: bool) -> bool {
        let mut extents = self.extents(Namespace(extent.namespace)).to_vec();
        if !self.claim_for_retiring(extent) {
            return false;
        }
        crate::crash_point::pass("retire.claimed");
        self.expect_orphans();
        extents.retain(|one| one.index != extent.index);
        extents.push(extent.clone());
        let leaving = Leaving { extent: extent.index, any };
        let mut work = Evacuation {
            extent,
            extents,
            leaving,
            queue: EvictQueue::default(),
            owned: HashMap::with_capacity(extent.slot_count as usize),
            elsewhere: Vec::new(),
            moved: Moved::default(),
        };
        let all = self.make_room(&mut work) && extent.slots().all(|slot| self.vacate(slot, &mut work));
        self.rename_moved_parents(&work.extents, &work.moved);
        for (slot, state) in work.elsewhere {
            self.give_back(slot, state);
        }
        self.end_retiring(extent, work.owned.into_iter().collect(), all)
    }

    /// Take all slots of the extent that are free, and for each of the others a slot elsewhere. All that is lost is
    /// lost here: a list of candidates does not survive that blocks move.
    fn make_room(&self, work: &mut Evacuation<'_>) -> bool {
        let ns = Namespace(work.extent.namespace);
        for slot in work.extent.slots() {
            if let Some(taken) = self.reserve_slot(slot) {
                self.unhint_free(slot);
                work.owned.extend([taken]);
                crate::crash_point::pass("retire.taken");
            }
        }
        let mut lost = 0;
        while work.owned.len() + work.elsewhere.len() < work.extent.slot_count as usize {
            let free = self.take_free(ns, &self.extents(ns));
            let Some(taken) = free.or_else(|| {
                let may_lose = lost < work.extent.slot_count;
                let evicted = may_lose.then(|| self.evict_from(&mut work.queue, ns, Some(&work.leaving)))?;
                lost += u32::from(evicted.is_some());
                evicted
            }) else {
                return false;
            };
            if work.extent.slots().contains(&taken.0) {
                work.owned.extend([taken]);
            } else {
                work.elsewhere.push(taken);
            }
        }
        true
    }

    /// Get one more slot of the extent, by moving its block.
    fn vacate(&self, slot: u32, work: &mut Evacuation<'_>) -> bool {
        if work.owned.contains_key(&slot) {
            return true;
        }
        if let Some(taken) = self.reserve_slot(slot) {
            self.unhint_free(slot);
            work.owned.extend([taken]);
            return true;
        }
        let Some(target) = work.elsewhere.pop() else { return false };
        let left = self.relocate(slot, target, &mut work.moved);
        if left.is_none() {
            self.give_back(target.0, target.1);
        }
        work.owned.extend(left);
        left.is_some()
    }
}
