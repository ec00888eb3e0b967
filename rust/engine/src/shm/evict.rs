//! Eviction: oldest stamps first, which by the rule in `recency.rs` takes tails before their heads.
//!
//! Candidates are the oldest part of one scan over the stamps, as far as shares allow (`victims.rs`). Between scan and
//! eviction a block may be touched, leased or get a child; each of these is noticed (see [`Core::evict_one`]), and then
//! the block and the chain before it stay.

use std::sync::PoisonError;

use crate::key::{BlockRef, Key};
use crate::limits::{EVICT_BATCH_MAX, EVICT_BATCH_MIN, EVICT_SCANS_MAX, GUARDED_MAX};
use crate::shm::core::Core;
use crate::shm::extent::{Extent, ExtentState};
use crate::shm::free::TakenSlot;
use crate::shm::lease::is_leased;
use crate::shm::namespace::{Identity, Namespace};
use crate::shm::recency::tick_of;
use crate::shm::rows::{SlotHeader, load4};
use crate::shm::shares::Shares;
use crate::shm::state::{NOBODY, SlotState, State, next_generation};
use crate::shm::victims::{Choice, Evictor, Stamped, Victims, spares_own};
use crate::sync::{AcqRel, Acquire, Relaxed, SeqCst};

/// An extent that the evictor is taking out of use.
pub(crate) struct Leaving {
    pub(crate) extent: u32,
    /// Make room in its namespace whatever the shares.
    pub(crate) any: bool,
}

/// Candidates of one namespace, youngest first so that the oldest is popped.
#[derive(Default)]
pub(crate) struct EvictQueue {
    /// `moves` of the namespace before the scan.
    moves: u64,
    candidates: Vec<Stamped>,
    /// Bytes of each.
    slot_bytes: u64,
}

impl Core {
    /// Evict one block of the namespace, as the shares allow the instance `account`, and reserve its slot. `None` if
    /// nothing can go now.
    pub(crate) fn evict_into_reserved(&self, ns: Namespace, account: u32) -> Option<TakenSlot> {
        let mut queues = self.evict_queues.lock().unwrap_or_else(PoisonError::into_inner);
        self.evict_from(queues.entry((ns.0, account)).or_default(), ns, account, None)
    }

    /// As [`Self::evict_into_reserved`], with a list of candidates of the caller's own, who may be taking an extent of
    /// the namespace out of use.
    pub(crate) fn evict_from(
        &self,
        queue: &mut EvictQueue,
        ns: Namespace,
        account: u32,
        leaving: Option<&Leaving>,
    ) -> Option<TakenSlot> {
        let any = leaving.is_some_and(|leaving| leaving.any);
        let moves = &self.control.namespaces()[ns.0 as usize].moves;
        let mut scans = 0;
        while self.is_member() {
            // A block that has moved is on the list no more, but what is before it in its chain may be.
            if queue.moves != moves.load(SeqCst) {
                queue.candidates.clear();
            }
            let Some((stamp, slot)) = queue.candidates.pop() else {
                if scans == EVICT_SCANS_MAX {
                    return None;
                }
                scans += 1;
                queue.moves = moves.load(SeqCst);
                let evictor = Evictor { row: account, own: scans > 1, any };
                let shares = self.recent_shares();
                (queue.candidates, queue.slot_bytes) = self.scan_candidates(ns, &shares, evictor);
                if leaving.is_none() && account == self.me.row {
                    self.ask_for_share(ns, &shares);
                }
                continue;
            };
            let Some(stamp) = self.stamp_of_same_time(slot, stamp) else { continue };
            // Siblings have taken what its owner had beyond its share: a new list has others.
            if !any && !self.may_take(stamp, account) {
                queue.candidates.clear();
                continue;
            }
            if self.is_left_alone(slot, leaving) {
                self.keep_before_taken(slot);
                continue;
            }
            if let Some(freeing) = self.evict_one(slot, stamp, Some(ns)) {
                self.count_evicted(Some(ns));
                self.note_taken(stamp, account, queue.slot_bytes);
                #[cfg(not(loom))]
                self.note_evicted(slot);
                if let Some(taken) = self.recycle(slot, freeing) {
                    return Some(taken);
                }
            }
        }
        None
    }

    /// Candidates, and the bytes of a block.
    fn scan_candidates(&self, ns: Namespace, shares: &Shares, evictor: Evictor) -> (Vec<Stamped>, u64) {
        let (blocks, wanted, slot_bytes) = self.blocks_of(ns, u64::MAX);
        let spares_own = spares_own(&blocks, shares, evictor);
        let choice = Choice { slot_bytes, shares, evictor, spares_own, wanted };
        let first = choice.of(blocks);
        let Some(horizon) = first.victims.last().map(|(stamp, _)| tick_of(*stamp)) else {
            // Perhaps more have to stay than one scan refreshes, and nothing that may go is older.
            self.guard_all(first.guarded);
            return (Vec::new(), slot_bytes);
        };
        self.raise_horizon(ns, horizon);
        crate::crash_point::pass("evict.listed");
        // Once more, now that the horizon is raised: this has every child that was published before.
        let Victims { mut victims, guarded } = choice.of(self.blocks_of(ns, horizon).0);
        if let Some(left) = self.guard_all(guarded) {
            victims.retain(|victim| victim.0 < left);
        }
        victims.reverse();
        (victims, slot_bytes)
    }

    /// Take blocks that have to stay out of the way. Returns the stamp of the first that is left to the next scan, if
    /// chains are long or share what is before them.
    fn guard_all(&self, guarded: Vec<Stamped>) -> Option<u64> {
        let mut refreshed = 0;
        for (stamp, slot) in guarded {
            if refreshed >= GUARDED_MAX {
                return Some(stamp);
            }
            refreshed += self.guard(slot, stamp);
        }
        None
    }

    /// Blocks of the namespace with a time up to `horizon`, how many of them to take at once, and the bytes of each.
    fn blocks_of(&self, ns: Namespace, horizon: u64) -> (Vec<Stamped>, usize, u64) {
        // Blocks of an extent that is being taken are listed too: if that fails they are back.
        let mut extents = self.all_extents();
        let may_hold = |state| matches!(state, ExtentState::Ready | ExtentState::Retiring);
        extents.retain(|extent| extent.namespace == ns.0 && may_hold(extent.state));
        let slots: usize = extents.iter().map(|extent| extent.slot_count as usize).sum();
        let blocks = extents.iter().flat_map(Extent::slots).filter_map(|slot| {
            let stamp = self.control.stamp(slot).load(SeqCst);
            (stamp != 0 && tick_of(stamp) <= horizon).then_some((stamp, slot))
        });
        let slot_bytes = extents.iter().map(Extent::slot_bytes).max().unwrap_or(0);
        (blocks.collect(), (slots / 64).clamp(EVICT_BATCH_MIN, EVICT_BATCH_MAX), slot_bytes)
    }

    /// A block is leaving memory: its name is remembered, and it is counted if it is lost with that.
    #[cfg(not(loom))]
    fn note_evicted(&self, slot: u32) {
        if let Some((identity, key)) = self.control.slot(slot).and_then(name_of) {
            self.note_gone(&identity, &key);
            self.note_victim(identity, key);
        }
    }

    /// Take a block that has to stay out of the way of those that go. Returns how many blocks were refreshed for it.
    fn guard(&self, slot: u32, stamp: u64) -> usize {
        let Some(header) = self.control.slot(slot) else { return 0 };
        let word = header.state.load(Acquire);
        if self.stamp_of_same_time(slot, stamp).is_none() {
            return 0;
        }
        match SlotState::decode(word) {
            Some(state) if state.state == State::Sealed => self.keep(state.block(slot)),
            _ => self.keep_before(header, word),
        }
    }

    /// This candidate's extent is being taken, and it may stay if that fails: then so does the chain before it.
    fn keep_before_taken(&self, slot: u32) {
        let before = self.control.slot(slot).map_or(0, |header| header.parent.load(Acquire));
        if before != 0 {
            self.keep(BlockRef(before));
        }
    }

    /// Every stamp up to the horizon may be a candidate somewhere, and none above it: who publishes a child below such
    /// a parent has to refresh the chain first.
    fn raise_horizon(&self, ns: Namespace, horizon: u64) {
        self.control.namespaces()[ns.0 as usize].horizon.fetch_max(horizon, SeqCst);
    }

    pub(crate) fn horizon(&self, ns: Namespace) -> u64 {
        self.control.namespaces()[ns.0 as usize].horizon.load(SeqCst)
    }

    /// The stamp of a slot, if it has not been refreshed since it was `listed` and still is what it was. It may be on
    /// another account: what was the account of somebody who has left is nobody's, and as old as before.
    fn stamp_of_same_time(&self, slot: u32, listed: u64) -> Option<u64> {
        let now = self.control.stamp(slot).load(SeqCst);
        (tick_of(now) == tick_of(listed)).then_some(now)
    }

    /// Take a sealed block out of the index if nobody leases it and its time is still that of `stamp`. On success the
    /// slot is FREEING by this process. With `of`, it has to be a block of that namespace: since a scan, its slot may
    /// have come into other hands, and stamps are not unique.
    pub(crate) fn evict_one(&self, slot: u32, stamp: u64, of: Option<Namespace>) -> Option<SlotState> {
        let header = self.control.slot(slot)?;
        let word = header.state.load(Acquire);
        let state = SlotState::decode(word)?;
        self.keep_before(header, word);
        let sealed = Some(state).filter(|state| state.state == State::Sealed)?;
        // If the name is not that of this word's block, the word has changed and cannot be claimed below.
        let (identity, key) = name_of(header)?;
        if of.is_some_and(|ns| ns.0 != identity.id) {
            return None;
        }
        let Some(bucket) = self.lock_bucket(self.bucket_of(&identity, &key)) else {
            self.keep(sealed.block(slot));
            return None;
        };
        crate::crash_point::pass("evict.locked");
        let evicting = SlotState::new(sealed.generation, self.me.row, State::Evicting);
        if let Err(now) = header.state.compare_exchange(word, evicting.encode(), SeqCst, Relaxed) {
            // Perhaps a sibling died while it was evicting it: whoever reaps that one brings it back.
            self.keep_before(header, now);
            return None;
        }
        crate::crash_point::pass("evict.claimed");
        let leased = is_leased(header);
        if leased || self.stamp_of_same_time(slot, stamp).is_none() {
            let _mine = header.state.compare_exchange(evicting.encode(), word, SeqCst, Relaxed);
            crate::crash_point::pass("evict.restored");
            drop(bucket);
            if leased {
                self.keep(sealed.block(slot));
            }
            return None;
        }
        bucket.begin();
        bucket.unlink(slot);
        crate::crash_point::pass("evict.unlinked");
        let freeing = evicting.to(State::Freeing);
        let mine = header.state.compare_exchange(evicting.encode(), freeing.encode(), SeqCst, Relaxed).is_ok();
        bucket.finish();
        crate::crash_point::pass("evict.freeing");
        mine.then_some(freeing)
    }

    /// Whether somebody else is taking the slot's extent out of use, and moves what is in it.
    fn is_left_alone(&self, slot: u32, leaving: Option<&Leaving>) -> bool {
        self.control.extent_of(slot).is_none_or(|index| {
            let row = self.control.extents().get(index as usize);
            let ready = row.is_some_and(|row| row.state.load(Acquire) as u8 == ExtentState::Ready as u8);
            !ready && leaving.is_none_or(|leaving| leaving.extent != index)
        })
    }

    /// A sibling is trying to evict this candidate and may have to bring it back, or is about to publish it: the chain
    /// before it stays until that is decided.
    fn keep_before(&self, header: &SlotHeader, word: u64) -> usize {
        let before = BlockRef(header.parent.load(Acquire));
        let may_come_back = |state: SlotState| matches!(state.state, State::Evicting | State::Reserved);
        if !SlotState::decode(word).is_some_and(may_come_back) {
            return 0;
        }
        if before.0 != 0 && header.state.load(Acquire) == word { self.keep(before) } else { 0 }
    }

    /// A candidate stays though it was not touched: then so does the chain before it. Returns how many blocks that are.
    pub(crate) fn keep(&self, block: BlockRef) -> usize {
        if !self.pin(block) {
            return 0;
        }
        let refreshed = self.guard_chain_of(block);
        if let Err(error) = self.unpin(block) {
            log::error!("pegaflow: {error}");
        }
        refreshed
    }

    /// FREEING by this process to RESERVED by it, at the next generation, without going through FREE.
    pub(crate) fn recycle(&self, slot: u32, freeing: SlotState) -> Option<TakenSlot> {
        let header = self.control.slot_unchecked(slot);
        if header.member_next.load(Acquire) != 0 {
            // As long as the slot is this process's its extent stays; once it is free, all of it may change hands.
            let extent = Extent::load(&self.control, self.control.extent_of(slot)?).ok().flatten()?;
            self.give_back(slot, freeing);
            let (slot, state) = self.reserve_slot(slot).inspect(|_| self.unhint_free(slot))?;
            if extent.state == ExtentState::Ready && extent.is_current(&self.control) {
                return Some((slot, state));
            }
            self.give_back(slot, state);
            return None;
        }
        self.control.stamp(slot).store(0, Relaxed);
        let mine = SlotState::new(next_generation(freeing.generation), self.me.row, State::Reserved);
        header.state.compare_exchange(freeing.encode(), mine.encode(), AcqRel, Relaxed).ok()?;
        crate::crash_point::pass("reserve.recycled");
        self.still_mine(slot, mine)
    }

    /// Take a sealed block out of the index whatever its stamp; leased slots go free with their last lease. `false` if
    /// it is not sealed at this generation any more or its lock could not be had in time.
    pub(crate) fn expel(&self, block: BlockRef) -> bool {
        let Some(header) = self.control.slot(block.slot()) else { return false };
        let Some((identity, key)) = name_of(header) else { return false };
        let Some(bucket) = self.lock_bucket(self.bucket_of(&identity, &key)) else { return false };
        let sealed = SlotState::new(block.generation(), NOBODY, State::Sealed).encode();
        let evicting = SlotState::new(block.generation(), self.me.row, State::Evicting);
        if header.state.compare_exchange(sealed, evicting.encode(), SeqCst, Relaxed).is_err() {
            return false;
        }
        crate::crash_point::pass("evict.claimed");
        bucket.begin();
        bucket.unlink(block.slot());
        crate::crash_point::pass("evict.unlinked");
        self.doom(block.slot(), evicting);
        bucket.finish();
        true
    }
}

/// What a header says it holds: its identity as written, and its key.
pub(crate) fn name_of(header: &SlotHeader) -> Option<(Identity, Key)> {
    let tag = header.tag.load(Relaxed);
    let key = Key::from_parts(load4(&header.key), tag as u8)?;
    Some((Identity { id: tag >> 16, fingerprint: load4(&header.fingerprint) }, key))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::shm::shares::Share;
    use crate::{OpenOptions, Pool};

    #[test]
    fn a_candidate_whose_slot_is_in_other_hands_stays() {
        let options = OpenOptions { pool_bytes: Some(1 << 20), private: true, ..OpenOptions::default() };
        let pool = Pool::open("p", &options).expect("a private pool");
        let core = pool.core();
        let [ours, theirs] = [1, 2].map(|byte| pool.namespace(&[byte; 32], 0, &[512], "test").expect("a namespace"));
        core.grow(theirs).expect("room");
        let key = Key::new(&[7; 16]).expect("a key");
        let block = pool.reserve(theirs, &[key], None, true).expect("a slot")[0].1;
        pool.mark_written(0, &[block], None).expect("reserved");
        assert_eq!(pool.publish(&[block]).expect("written"), 1);
        let stamp = core.control.stamp(block.slot()).load(SeqCst);
        assert_eq!(core.evict_one(block.slot(), stamp, Some(ours)), None);
        assert_eq!(pool.lookup(theirs, &[key], 0).expect("a namespace"), 1);
        assert!(core.evict_one(block.slot(), stamp, Some(theirs)).is_some());
    }

    /// A block with one member in another slot; its extent.
    fn head_and_member(pool: &Pool) -> (BlockRef, Extent) {
        let core = pool.core();
        let ns = pool.namespace(&[1; 32], 0, &[512], "test").expect("a namespace");
        core.grow(ns).expect("room");
        let keys = [7, 8].map(|byte| Key::new(&[byte; 16]).expect("a key"));
        let reserved = pool.reserve(ns, &keys, None, false).expect("a namespace");
        let (head, member) = (reserved[0].1, reserved[1].1);
        core.make_member(member, head, head.slot());
        pool.mark_written(0, &[head], None).expect("reserved");
        assert_eq!(pool.publish(&[head]).expect("written"), 1);
        (head, core.extents(ns)[0].clone())
    }

    #[test]
    fn a_slot_goes_on_to_a_new_block_only_if_its_extent_stays() {
        for stays in [true, false] {
            let options = OpenOptions { pool_bytes: Some(1 << 20), private: true, ..OpenOptions::default() };
            let pool = Pool::open("p", &options).expect("a private pool");
            let core = pool.core();
            let (head, extent) = head_and_member(&pool);
            if !stays {
                assert!(core.claim_for_retiring(&extent, false).is_some());
            }
            let stamp = core.control.stamp(head.slot()).load(SeqCst);
            let freeing = core.evict_one(head.slot(), stamp, None).expect("nobody uses it");
            let recycled = core.recycle(head.slot(), freeing);
            let state = SlotState::decode(core.control.slot_unchecked(head.slot()).state.load(SeqCst));
            let expected = if stays { State::Reserved } else { State::Free };
            assert_eq!((recycled.is_some(), state.expect("a state").state), (stays, expected));
        }
    }

    #[test]
    fn a_listed_tail_whose_owner_has_left_still_goes_before_its_head() {
        let options = OpenOptions { pool_bytes: Some(1 << 20), private: true, ..OpenOptions::default() };
        let pool = Pool::open("p", &options).expect("a private pool");
        let core = pool.core();
        let ns = pool.namespace(&[1; 32], 0, &[512], "test").expect("a namespace");
        core.grow(ns).expect("room");
        let keys: Vec<Key> = (0..9u8).map(|number| Key::new(&[number; 16]).expect("a key")).collect();
        let blocks: Vec<BlockRef> =
            pool.reserve(ns, &keys, None, false).expect("a namespace").into_iter().map(|(_, block)| block).collect();
        pool.mark_written(0, &blocks, None).expect("reserved");
        assert_eq!(pool.publish(&blocks).expect("written"), blocks.len());
        let mut queue = EvictQueue::default();
        for left in (0..keys.len()).rev() {
            assert!(core.evict_from(&mut queue, ns, core.me.row, None).is_some());
            assert_eq!(pool.lookup(ns, &keys, 0).expect("a namespace"), left, "a head went before its tail");
            if let Some(tail) = left.checked_sub(1) {
                core.disown(blocks[tail].slot(), core.me.row);
            }
        }
    }

    #[test]
    fn a_block_that_must_stay_is_kept_though_its_owner_left_while_it_was_listed() {
        let options = OpenOptions { pool_bytes: Some(1 << 20), private: true, ..OpenOptions::default() };
        let pool = Pool::open("p", &options).expect("a private pool");
        let core = pool.core();
        let (block, _) = head_and_member(&pool);
        let listed = core.control.stamp(block.slot()).load(SeqCst);
        core.disown(block.slot(), core.me.row);
        assert_eq!(core.guard(block.slot(), listed), 1);
        assert!(tick_of(core.control.stamp(block.slot()).load(SeqCst)) > tick_of(listed));
    }

    #[test]
    fn one_scan_refreshes_a_bounded_number_of_blocks_whatever_chains_share() {
        const PREFIX: usize = 300;
        const TAILS: usize = 2 * GUARDED_MAX / PREFIX;
        let options = OpenOptions { pool_bytes: Some(1 << 20), private: true, ..OpenOptions::default() };
        let pool = Pool::open("p", &options).expect("a private pool");
        let core = pool.core();
        let ns = pool.namespace(&[1; 32], 0, &[64], "test").expect("a namespace");
        core.grow(ns).expect("room");
        let keys: Vec<Key> =
            (0..PREFIX + TAILS + 1).map(|number| Key::new(&number.to_le_bytes()).expect("a key")).collect();
        let store = |number: usize, parent: Option<usize>| {
            let parent = parent.map(|parent| keys[parent]);
            let block = pool.reserve(ns, &keys[number..=number], Some(&[parent]), false).expect("a namespace")[0].1;
            pool.mark_written(0, &[block], None).expect("reserved");
            assert_eq!(pool.publish(&[block]).expect("written"), 1);
            (core.control.stamp(block.slot()).load(SeqCst), block.slot())
        };
        for number in 0..PREFIX {
            store(number, number.checked_sub(1));
        }
        let tails: Vec<Stamped> = (0..TAILS).map(|tail| store(PREFIX + tail, Some(PREFIX - 1))).collect();
        let (_, nobodys) = store(PREFIX + TAILS, None);
        core.disown(nobodys, core.me.row);
        let mut rows = vec![Share::default(); 2];
        rows[core.me.row as usize] = Share { weight_milli: 1, bytes: u64::MAX, used_bytes: 1 };
        let evictor = Evictor { row: 1, own: false, any: false };
        let clock = || core.control.header().clock.load(SeqCst);
        let (mut scans, mut before) = (0, clock());
        while core.scan_candidates(ns, &Shares::of_rows(rows.clone()), evictor).0.is_empty() {
            let ticks = clock() - before;
            assert!((1..=(GUARDED_MAX + PREFIX + 1) as u64).contains(&ticks), "{ticks} blocks");
            (scans, before) = (scans + 1, clock());
        }
        assert!(scans > 0, "all of them in one scan");
        let unchanged = |(stamp, slot): &&Stamped| core.control.stamp(*slot).load(SeqCst) == *stamp;
        assert_eq!(tails.iter().filter(unchanged).count(), 0, "each is out of the way before the victim goes");
    }

    #[test]
    fn more_blocks_that_must_stay_than_one_scan_refreshes_do_not_end_eviction() {
        let options = OpenOptions { pool_bytes: Some(4 << 20), private: true, ..OpenOptions::default() };
        let options = OpenOptions { slots_max: Some(2 * GUARDED_MAX as u64), ..options };
        let pool = Pool::open("p", &options).expect("a private pool");
        let core = pool.core();
        let ns = pool.namespace(&[1; 32], 0, &[64], "test").expect("a namespace");
        let keys: Vec<Key> =
            (0..GUARDED_MAX + 6).map(|number| Key::new(&number.to_le_bytes()).expect("a key")).collect();
        while core.extents(ns).iter().map(|extent| extent.slot_count as usize).sum::<usize>() < keys.len() {
            core.grow(ns).expect("room");
        }
        let parents = vec![None; keys.len()];
        let blocks: Vec<BlockRef> = pool
            .reserve(ns, &keys, Some(&parents), false)
            .expect("a namespace")
            .into_iter()
            .map(|(_, block)| block)
            .collect();
        pool.mark_written(0, &blocks, None).expect("reserved");
        assert_eq!(pool.publish(&blocks).expect("written"), keys.len());
        let nobodys = blocks.last().expect("many").slot();
        core.disown(nobodys, core.me.row);
        let mut rows = vec![Share::default(); 2];
        rows[core.me.row as usize] = Share { weight_milli: 1, bytes: u64::MAX, used_bytes: 1 };
        let evictor = Evictor { row: 1, own: false, any: false };
        let scan = || core.scan_candidates(ns, &Shares::of_rows(rows.clone()), evictor).0;
        let victims = (0..3).map(|_| scan()).find(|victims| !victims.is_empty()).expect("a victim");
        assert_eq!(victims.iter().map(|(_, slot)| *slot).collect::<Vec<_>>(), [nobodys]);
    }

    #[test]
    fn a_child_in_an_extent_that_is_being_taken_keeps_its_parent() {
        let options = OpenOptions { pool_bytes: Some(1 << 20), private: true, ..OpenOptions::default() };
        let options = OpenOptions { segment_bytes: Some(64 << 10), ..options };
        let pool = Pool::open("p", &options).expect("a private pool");
        let core = pool.core();
        let ns = pool.namespace(&[1; 32], 0, &[1024], "test").expect("a namespace");
        let have = |extents| {
            // The background thread may be growing it too.
            while core.extents(ns).len() < extents {
                if let Err(error) = core.grow(ns) {
                    assert_eq!(error.kind(), crate::ErrorKind::Busy, "{error}");
                }
            }
        };
        have(1);
        let store = |key: &Key, parent: Option<Key>| {
            let block = pool.reserve(ns, &[*key], Some(&[parent]), false).expect("a namespace")[0].1;
            pool.mark_written(0, &[block], None).expect("reserved");
            assert_eq!(pool.publish(&[block]).expect("written"), 1);
            block
        };
        let keys: Vec<Key> = (0..66u8).map(|number| Key::new(&[number; 16]).expect("a key")).collect();
        let first: Vec<BlockRef> = keys[..64].iter().map(|key| store(key, None)).collect();
        have(2);
        let parent = store(&keys[64], None);
        assert!(core.expel(first[0]));
        core.search_from(ns, first[0].slot());
        let child = store(&keys[65], Some(keys[64]));
        assert_ne!(core.control.extent_of(parent.slot()), core.control.extent_of(child.slot()));
        let taken = Extent::load(&core.control, core.control.extent_of(child.slot()).expect("an extent"));
        let taken = taken.expect("sound").expect("in use");
        let taken = core.claim_for_retiring(&taken, false).expect("nobody else takes it");
        while core.evict_into_reserved(ns, core.me.row).is_some() {}
        core.reopen(&taken);
        assert_eq!(pool.lookup(ns, &keys[64..], 0).expect("a namespace"), 2);
    }
}
