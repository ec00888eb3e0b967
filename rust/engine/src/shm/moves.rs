//! An extent goes from one namespace to another: to one that has none, or one whose instance is below its share.
//!
//! The blocks that are lost are the oldest of the namespace that gives, wherever they are, and no more of them than one
//! extent has slots; what else is in the extent moves to the slots that they leave.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::limits::{EXTENTS_TRIED_MAX, GROW_RETRY_PAUSE, LEASED_MOVE_WAIT_MAX};
use crate::shm::core::Core;
use crate::shm::evict::{EvictQueue, Leaving};
use crate::shm::extent::{Extent, ExtentState};
use crate::shm::free::TakenSlot;
use crate::shm::lease::is_leased;
use crate::shm::lock::begin_operation;
use crate::shm::namespace::{Namespace, is_kept};
use crate::shm::recency::owner_of;
use crate::shm::relocate::{Moved, Twin};
use crate::shm::shares::Shares;
use crate::shm::state::{SlotState, State};
use crate::sync::{Acquire, SeqCst, sleep};

/// Pause between two looks whether a block is still leased.
const LEASE_LOOK_PAUSE: Duration = Duration::from_millis(1);

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
    leaving: Leaving,
    queue: EvictQueue,
    owned: HashMap<u32, SlotState>,
    /// Slots of other extents for what has to move.
    elsewhere: Vec<TakenSlot>,
    /// Blocks that are copied to such slots and not yet found there.
    twins: Vec<Twin>,
    moved: Moved,
    /// Until when leases of blocks in the extent are waited for.
    patient_until: Instant,
}

impl Core {
    /// A scan for victims found this instance below its share: have an extent of another namespace looked for.
    pub(crate) fn ask_for_share(&self, ns: Namespace, shares: &Shares) {
        let all = self.all_extents();
        let gives = |extent: &Extent| {
            extent.state == ExtentState::Ready && extent.namespace != ns.0 && !is_kept(&self.control, extent.namespace)
        };
        if self.is_entitled(ns, &all, shares) && all.iter().any(gives) {
            self.ask_to_grow(ns);
        }
    }

    /// Whether others have to give: `ns` has nothing, or one more extent is within this instance's share.
    pub(crate) fn is_in_need(&self, ns: Namespace) -> bool {
        let all = self.all_extents();
        self.extents(ns).is_empty() || self.is_entitled(ns, &all, &self.shares_in(&all))
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
        let limit = self.oldest_in(ns, &all).filter(|_| !starving).unwrap_or(u64::MAX);
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

    /// Stamp of the block of a namespace that was used longest ago. An extent that is being made may have no memory for
    /// stamps yet.
    fn oldest_in(&self, ns: Namespace, all: &[Extent]) -> Option<u64> {
        let own = all.iter().filter(|extent| extent.namespace == ns.0 && extent.state == ExtentState::Ready);
        let stamps = own.flat_map(Extent::slots).map(|slot| self.control.stamp(slot).load(SeqCst));
        stamps.filter(|stamp| *stamp != 0).min()
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

    /// Empty an extent and remove it; with `any`, whatever the shares. `false` if somebody uses a block of it, or a
    /// sibling is taking another extent of the namespace: of two that move blocks at a time, one would not learn what
    /// the other's children are told.
    fn evacuate(&self, extent: &Extent, any: bool) -> bool {
        let Some(extent) = &self.claim_for_retiring(extent, true) else { return false };
        crate::crash_point::pass("retire.claimed");
        self.expect_orphans();
        let leaving = Leaving { extent: extent.index, any };
        let mut work = Evacuation {
            extent,
            leaving,
            queue: EvictQueue::default(),
            owned: HashMap::with_capacity(extent.slot_count as usize),
            elsewhere: Vec::new(),
            twins: Vec::new(),
            moved: Moved::default(),
            patient_until: Instant::now() + LEASED_MOVE_WAIT_MAX,
        };
        let all = self.make_room(&mut work) && self.copy_out(&mut work) && self.move_over(&mut work);
        self.rename_moved_parents(Namespace(extent.namespace), &work.moved);
        let copies = work.twins.iter().map(|twin| (twin.copy.slot(), self.reserved_state(twin.copy)));
        for (slot, state) in work.elsewhere.into_iter().chain(copies) {
            self.give_back(slot, state);
        }
        self.end_retiring(extent, work.owned.into_iter().collect(), all)
    }

    /// Take all slots of the extent that are free, and for each of the others a slot elsewhere. All that is lost is
    /// lost here, once nothing in the extent is in use: a list of candidates does not survive that blocks move.
    fn make_room(&self, work: &mut Evacuation<'_>) -> bool {
        let ns = Namespace(work.extent.namespace);
        let patient_until = work.patient_until;
        let ready = self.patiently(patient_until, || {
            let mut slots = work.extent.slots();
            slots.all(|slot| work.owned.contains_key(&slot) || self.take_over(slot, work) || self.is_movable(slot))
        });
        if !ready {
            return false;
        }
        let mut lost = 0;
        while work.owned.len() + work.elsewhere.len() < work.extent.slot_count as usize {
            let free = self.take_free(ns, &self.extents(ns));
            let Some(taken) = free.or_else(|| {
                let may_lose = lost < work.extent.slot_count;
                let evicted =
                    may_lose.then(|| self.evict_from(&mut work.queue, ns, self.me.row, Some(&work.leaving)))?;
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

    /// Take a slot of the extent that is free.
    fn take_over(&self, slot: u32, work: &mut Evacuation<'_>) -> bool {
        let Some(taken) = self.reserve_slot(slot) else { return false };
        self.unhint_free(slot);
        work.owned.extend([taken]);
        crate::crash_point::pass("retire.taken");
        true
    }

    /// Whether the slot has a block that nobody uses.
    fn is_movable(&self, slot: u32) -> bool {
        self.control.slot(slot).is_some_and(|header| {
            let state = SlotState::decode(header.state.load(Acquire)).map(|state| state.state);
            state == Some(State::Sealed) && !is_leased(header)
        })
    }

    /// Copy what is in the extent. This takes long, and nobody notices: blocks change their places afterwards, all
    /// within a short time, since each that does voids the lists of candidates of all siblings.
    fn copy_out(&self, work: &mut Evacuation<'_>) -> bool {
        let patient_until = work.patient_until;
        work.extent.slots().all(|slot| {
            self.patiently(patient_until, || {
                if work.owned.contains_key(&slot) || self.take_over(slot, work) {
                    return true;
                }
                let Some(target) = work.elsewhere.pop() else { return false };
                match self.copy_to_twin(slot, target) {
                    Some(twin) => work.twins.push(twin),
                    None => work.elsewhere.push(target),
                }
                work.twins.last().is_some_and(|twin| twin.block.slot() == slot)
            })
        })
    }

    /// Have the copies found instead of the blocks.
    fn move_over(&self, work: &mut Evacuation<'_>) -> bool {
        // Copying may have taken longer than that.
        work.patient_until = Instant::now() + LEASED_MOVE_WAIT_MAX;
        while let Some(twin) = work.twins.pop() {
            let slot = twin.block.slot();
            let left = self.patiently(work.patient_until, || {
                let left = self.switch_to_twin(&twin, &mut work.moved);
                work.owned.extend(left);
                left.is_some()
            });
            if !left {
                work.twins.push(twin);
                // It may have gone by itself.
                if !self.take_over(slot, work) {
                    return false;
                }
                let gone = work.twins.pop().map(|twin| (twin.copy.slot(), self.reserved_state(twin.copy)));
                work.elsewhere.extend(gone);
            }
        }
        true
    }

    /// Try until it works, or until nobody waits any more: for a lease that ends soon, a step that a sibling is at.
    fn patiently(&self, until: Instant, mut step: impl FnMut() -> bool) -> bool {
        while !step() {
            if Instant::now() >= until || !self.is_member() || self.is_asked_to_stop() {
                return false;
            }
            sleep(LEASE_LOOK_PAUSE);
            begin_operation();
        }
        true
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Key, OpenOptions, Pool};

    /// Store a block in the extent.
    fn store_in(pool: &Pool, extent: &Extent, key: &Key, parent: Option<Key>) {
        let ns = Namespace(extent.namespace);
        pool.core().search_from(ns, extent.first_slot);
        let block = pool.reserve(ns, &[*key], Some(&[parent]), false).expect("a namespace")[0].1;
        assert!(extent.slots().contains(&block.slot()));
        pool.mark_written(0, &[block], None).expect("reserved");
        assert_eq!(pool.publish(&[block]).expect("written"), 1);
    }

    /// A pool with three extents of a namespace; the first one has a block, the second one its child.
    fn parent_and_child() -> (std::sync::Arc<Pool>, [Key; 2], Vec<Extent>) {
        let options = OpenOptions { pool_bytes: Some(1 << 20), private: true, ..OpenOptions::default() };
        let options = OpenOptions { segment_bytes: Some(64 << 10), ..options };
        let pool = Pool::open("p", &options).expect("a private pool");
        let ns = pool.namespace(&[1; 32], 0, &[1024], "test").expect("a namespace");
        (0..3).for_each(|_| assert_eq!(pool.core().grow(ns).expect("room"), crate::shm::grow::Grown::Yes));
        let extents = pool.core().extents(ns).to_vec();
        let keys = [1, 2].map(|byte| Key::new(&[byte; 16]).expect("a key"));
        store_in(&pool, &extents[0], &keys[0], None);
        store_in(&pool, &extents[1], &keys[1], Some(keys[0]));
        (pool, keys, extents)
    }

    #[test]
    fn of_two_extents_of_a_namespace_one_is_emptied_at_a_time_and_no_child_is_lost() {
        let (pool, keys, extents) = parent_and_child();
        let core = pool.core();
        let taken = core.claim_for_retiring(&extents[1], true).expect("nobody else takes it");
        assert!(!core.evacuate(&extents[0], false), "a sibling is taking the other");
        core.reopen(&taken);
        assert!(core.evacuate(&extents[0], false));
        core.expect_orphans();
        core.drop_orphans();
        assert_eq!(pool.lookup(Namespace(extents[0].namespace), &keys, 0).expect("a namespace"), 2);
    }

    /// A pool of two extents, full of single blocks.
    fn full_pool() -> (std::sync::Arc<Pool>, Vec<Key>, Vec<Extent>) {
        let options = OpenOptions { pool_bytes: Some(128 << 10), private: true, ..OpenOptions::default() };
        let options = OpenOptions { segment_bytes: Some(64 << 10), ..options };
        let pool = Pool::open("p", &options).expect("a private pool");
        let ns = pool.namespace(&[1; 32], 0, &[1024], "test").expect("a namespace");
        (0..2).for_each(|_| assert_eq!(pool.core().grow(ns).expect("room"), crate::shm::grow::Grown::Yes));
        let keys: Vec<Key> = (0..128u8).map(|number| Key::new(&[number; 16]).expect("a key")).collect();
        let blocks = pool.reserve(ns, &keys, Some(&[None; 128]), false).expect("a namespace");
        let blocks: Vec<_> = blocks.iter().map(|(_, block)| *block).collect();
        pool.mark_written(0, &blocks, None).expect("reserved");
        assert_eq!(pool.publish(&blocks).expect("written"), 128);
        let extents = pool.core().extents(ns).to_vec();
        (pool, keys, extents)
    }

    #[test]
    fn a_block_in_use_in_an_extent_that_is_being_taken_costs_no_other_block() {
        let (pool, keys, extents) = full_pool();
        let ns = Namespace(extents[0].namespace);
        let leased = pool.lease(ns, &keys[5..6], 0, 1).expect("a namespace");
        assert!(extents[0].slots().contains(&leased[0].slot()));
        assert!(!pool.core().evacuate(&extents[0], true));
        let present = pool.contains(ns, &keys).expect("a namespace");
        assert_eq!(present.iter().filter(|present| **present).count(), 128);
        pool.release(&leased).expect("leased");
        assert!(pool.core().evacuate(&extents[0], true));
    }

    #[test]
    fn a_lease_that_ends_soon_keeps_no_extent() {
        let (pool, keys, extents) = full_pool();
        let ns = Namespace(extents[0].namespace);
        // A thread without a CPU may give it back when it is waited for no more.
        let is_taken = (0..50).any(|_| {
            let leased = pool.lease(ns, &keys[5..6], 0, 1).expect("a namespace");
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while extents[0].is_current(&pool.core().control) {
                        std::thread::yield_now();
                    }
                    pool.release(&leased).expect("leased");
                });
                pool.core().evacuate(&extents[0], true)
            })
        });
        assert!(is_taken);
        let present = pool.contains(ns, &keys).expect("a namespace");
        assert_eq!(present.iter().filter(|present| **present).count(), 64, "one extent's blocks are lost");
    }

    #[test]
    fn lists_of_candidates_stay_good_while_an_extent_is_copied() {
        let (pool, keys, extents) = full_pool();
        let core = pool.core();
        // Half of the extent is used last, and so moves.
        keys[..32].iter().for_each(|key| assert_eq!(pool.touch(Namespace(0), &[*key]).expect("a namespace"), 1));
        let moves = &core.control.namespaces()[extents[0].namespace as usize].moves;
        let taken = core.claim_for_retiring(&extents[0], true).expect("nobody else takes it");
        let mut work = Evacuation {
            extent: &taken,
            leaving: Leaving { extent: extents[0].index, any: true },
            queue: EvictQueue::default(),
            owned: HashMap::new(),
            elsewhere: Vec::new(),
            twins: Vec::new(),
            moved: Moved::default(),
            patient_until: Instant::now(),
        };
        let before = moves.load(SeqCst);
        assert!(core.make_room(&mut work) && core.copy_out(&mut work));
        assert_eq!(moves.load(SeqCst), before, "nothing has moved yet");
        let copied = work.twins.len() as u64;
        assert!(copied == 32 && core.move_over(&mut work));
        assert_eq!(moves.load(SeqCst), before + copied);
        assert_eq!(work.owned.len(), 64);
        assert!(core.end_retiring(&taken, work.owned.into_iter().collect(), true));
    }

    #[test]
    fn a_child_whose_parent_moves_beside_a_search_for_orphans_is_none() {
        let (pool, keys, extents) = parent_and_child();
        let core = pool.core();
        let version = core.control.header().extents_version.load(SeqCst);
        let seen = core.all_extents();
        let taken = core.claim_for_retiring(&extents[0], true).expect("nobody else takes it");
        core.search_from(Namespace(extents[0].namespace), extents[2].first_slot);
        let ns = Namespace(extents[0].namespace);
        let target = core.take_free(ns, &core.extents(ns)).expect("a free slot");
        let mut moved = Moved::default();
        let parent = extents[0].first_slot;
        let twin = core.copy_to_twin(parent, target).expect("a block");
        let left = core.switch_to_twin(&twin, &mut moved).expect("nobody uses it");
        assert_ne!(core.drop_orphans_once(&seen, version), 0, "it has to look again");
        core.rename_moved_parents(ns, &moved);
        core.end_retiring(&taken, vec![left], false);
        assert_eq!(pool.lookup(ns, &keys, 0).expect("a namespace"), 2);
    }

    #[test]
    fn stamps_of_an_extent_that_is_being_made_are_not_read() {
        let (pool, _, extents) = parent_and_child();
        let core = pool.core();
        let ns = Namespace(extents[0].namespace);
        let oldest = core.oldest_in(ns, &core.all_extents()).expect("two blocks");
        core.control.stamp(extents[2].first_slot).store(1, SeqCst);
        core.move_on(&extents[2], core.me.row, ExtentState::Creating).expect("it is nobody else's");
        assert_eq!(core.oldest_in(ns, &core.all_extents()), Some(oldest));
    }
}
