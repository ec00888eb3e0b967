//! Cleaning up after dead processes. Whoever notices does it; the row's lock byte says who.
//!
//! Every step is idempotent, and the row is marked free last: a reaper that dies is replaced by the next one. The
//! order of a reaper is in `docs/crash-model.md`.

use std::collections::HashMap;
use std::sync::{MutexGuard, PoisonError};
use std::time::Instant;

use crate::limits::{EXTENT_LOOKS_MAX, MAINTENANCE_INTERVAL, PROCESSES_MAX, QUARANTINE_GRACE};
use crate::shm::clock::boot_ms;
use crate::shm::core::Core;
use crate::shm::evict::name_of;
use crate::shm::extent::{Extent, ExtentState};
use crate::shm::notice;
use crate::shm::process::{Member, ProcessState, free_row, load, store};
use crate::shm::rows::SlotHeader;
use crate::shm::state::{NOBODY, SlotState, State, sealed_word};
use crate::sync::{Acquire, AtomicU64, Relaxed, SeqCst, fence};

/// What may be done with the slots that a dead process reserved or leased.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Writers {
    /// A process that copies for it, from or to these slots, is alive.
    Living,
    /// All dead, but a device may still finish a transfer.
    Device,
    /// Nobody can write any more.
    None,
}

impl Core {
    /// Clean up after every dead process. Returns how many rows became free.
    pub(crate) fn reap(&self) -> usize {
        self.reap_of(|_, _| true)
    }

    /// As [`Self::reap`], but without those that could not be settled a moment ago: each try costs all processes.
    pub(crate) fn reap_when_due(&self) -> usize {
        self.reap_of(|row, epoch| {
            let known = self.lock_unsettled().get(&row).copied();
            known.is_none_or(|(tried, at)| tried != epoch || at.elapsed() >= MAINTENANCE_INTERVAL)
        })
    }

    fn reap_of(&self, is_due: impl Fn(u32, u64) -> bool) -> usize {
        let _one_at_a_time = self.reaping.lock().unwrap_or_else(PoisonError::into_inner);
        let others = (0..PROCESSES_MAX as u32).filter(|row| *row != self.me.row);
        others.filter(|row| self.reap_if_dead(*row, &is_due)).count()
    }

    fn reap_if_dead(&self, row: u32, is_due: impl Fn(u32, u64) -> bool) -> bool {
        let (epoch, state) = load(&self.control.processes()[row as usize]);
        if state != ProcessState::Free && !is_due(row, epoch) {
            return false;
        }
        // Who is taken for dead himself cannot tell who lives.
        if !self.is_member() {
            return false;
        }
        if state == ProcessState::Free || !matches!(self.lock_file.try_lock(row), Ok(true)) {
            return false;
        }
        // Nobody else holds the byte: the process is dead, and while we hold it we are its only reaper.
        let again = load(&self.control.processes()[row as usize]);
        let done = again.0 == epoch && again.1 != ProcessState::Free && self.reap_row(Member { row, epoch });
        self.lock_file.unlock(row);
        done
    }

    /// Clean up after `dead`. `false` if something has to wait, for a living follower or a lock: then the row stays
    /// with what it owns, until somebody tries again.
    pub(crate) fn reap_row(&self, dead: Member) -> bool {
        let row = &self.control.processes()[dead.row as usize];
        let leaving = dead == self.me;
        store(row, dead.epoch, if leaving { ProcessState::Leaving } else { ProcessState::Reaping });
        crate::crash_point::pass("reap.claimed");
        let writers = if self.has_living_follower(dead) {
            Writers::Living
        } else if self.device_writes(dead.row) {
            Writers::Device
        } else {
            Writers::None
        };
        if writers == Writers::Living && self.is_settled_beside_followers(dead) {
            return false;
        }
        let settled = self.settle(dead, writers);
        crate::crash_point::pass("reap.scanned");
        if writers == Writers::Living && settled {
            self.lock_settled_leaders().insert(dead.row, dead.epoch);
        }
        if !settled {
            self.lock_unsettled().insert(dead.row, (dead.epoch, Instant::now()));
        }
        if writers == Writers::Living || !settled {
            return false;
        }
        if !free_row(row, dead.epoch) {
            return false;
        }
        crate::crash_point::pass("reap.freed");
        self.stats.processes_reaped.add(1);
        true
    }

    /// Whether this process has done for the dead leader what there is to do while followers of it live.
    fn is_settled_beside_followers(&self, dead: Member) -> bool {
        self.lock_settled_leaders().get(&dead.row) == Some(&dead.epoch)
    }

    fn lock_settled_leaders(&self) -> MutexGuard<'_, HashMap<u32, u64>> {
        self.settled_leaders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_unsettled(&self) -> MutexGuard<'_, HashMap<u32, (u64, Instant)>> {
        self.unsettled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Clean this process's own row of what a dead member left there.
    pub(crate) fn clear_inherited(&self, dead: Member) {
        let writers = if self.device_writes(dead.row) { Writers::Device } else { Writers::None };
        // What cannot be settled now stays until this process ends.
        if self.settle(dead, writers) {
            self.forget_device_writes();
        }
        self.stats.processes_reaped.add(1);
    }

    /// Drop locks, slots, leases and extents of a dead member. `false` if a lock could not be had.
    fn settle(&self, dead: Member, writers: Writers) -> bool {
        // Who is taken for dead himself reaps nobody: the row may be another's already, and so may what it says.
        if !self.is_member() {
            return false;
        }
        self.break_locks();
        crate::crash_point::pass("reap.locks_broken");
        let extents = self.all_extents();
        let usable = |extent: &&Extent| !matches!(extent.state, ExtentState::Free | ExtentState::Dropping);
        let mut settled = true;
        for slot in extents.iter().filter(usable).flat_map(Extent::slots) {
            settled &= self.reap_slot(slot, dead.row, writers);
        }
        // Members whose head is gone, found after all heads were settled.
        for slot in extents.iter().filter(usable).flat_map(Extent::slots) {
            self.free_orphan(slot);
        }
        settled &= self.reap_extents(dead.row);
        crate::crash_point::pass("reap.extents_settled");
        if dead != self.me {
            // It may have died just after it had published a block whose parent was going, and what it was evicting is
            // back without the block before it if that went meanwhile. Said when all is in its place: whoever looks
            // before does not see it.
            self.expect_orphans();
        }
        // Slots went free or were hinted anew: whoever had found nothing looks again.
        (0..self.control.namespaces().len() as u32).for_each(|id| self.namespace_freed(id));
        // It may have died between making an extent ready and saying so.
        self.extents_changed();
        settled
    }

    /// Take over and drop every lock whose holder is dead. What a living one is changing it finishes itself.
    fn break_locks(&self) {
        let header = self.control.header();
        let dead = |word: &&AtomicU64| {
            let holder = word.load(Acquire);
            holder != 0 && self.is_dead(holder)
        };
        let words = std::iter::once(&header.structure_lock).chain(self.control.stripes().iter().map(|s| &s.lock));
        for word in words.filter(dead) {
            drop(self.lock(word));
        }
        for (number, stripe) in self.control.stripes().iter().enumerate() {
            if stripe.version.load(Acquire) % 2 == 1 && stripe.lock.load(Acquire) == 0 {
                // Its lowest bucket has the number of the stripe.
                drop(self.lock_bucket(number));
            }
        }
    }

    /// `false` if the slot still belongs to the dead process since a lock could not be had.
    fn reap_slot(&self, slot: u32, row: u32, writers: Writers) -> bool {
        let Some(header) = self.control.slot(slot) else { return true };
        if !self.is_member() {
            return false;
        }
        self.disown(slot, row);
        let bit = 1u64 << (row % 64);
        // A living follower may still be reading what its leader leased.
        if writers != Writers::Living && header.leases[row as usize / 64].load(Relaxed) & bit != 0 {
            header.leases[row as usize / 64].fetch_and(!bit, SeqCst);
            crate::crash_point::pass("reap.released");
        }
        let Some(state) = SlotState::decode(header.state.load(Acquire)) else {
            self.want_rebuild("a slot has an impossible state");
            return true;
        };
        match state.state {
            State::Free => self.hint_free(slot),
            // Its reaper may have died before it said so.
            State::Quarantined if state.owner == NOBODY => {
                notice::raise(&self.control.header().quarantine_pending);
            }
            State::Doomed => self.settle_doomed(slot),
            State::Reserved | State::Quarantined if state.owner == row && writers != Writers::Living => {
                return self.reap_reserved(slot, header, state, writers);
            }
            State::Evicting if state.owner == row => return self.reap_evicting(slot, header, state),
            State::Freeing if state.owner == row && self.give_back(slot, state) => self.stats.slots_reaped.add(1),
            _ => {}
        }
        true
    }

    /// A reserved slot may already be linked (its publisher died before the seal): off the chain first.
    fn reap_reserved(&self, slot: u32, header: &SlotHeader, state: SlotState, writers: Writers) -> bool {
        if !self.unlink_for_reaping(slot, header) {
            return false;
        }
        if writers == Writers::Device || state.state == State::Quarantined {
            let due = boot_ms() + QUARANTINE_GRACE.as_millis() as u64;
            header.checksum.store(due, Relaxed);
            let waiting = SlotState::new(state.generation, NOBODY, State::Quarantined);
            if header.state.compare_exchange(state.encode(), waiting.encode(), SeqCst, Relaxed).is_ok() {
                self.stats.slots_quarantined.add(1);
                crate::crash_point::pass("quarantine.waiting");
                notice::raise(&self.control.header().quarantine_pending);
            }
        } else if self.free_dead(slot, header, state) {
            self.stats.slots_reaped.add(1);
        }
        true
    }

    fn free_dead(&self, slot: u32, header: &SlotHeader, state: SlotState) -> bool {
        let freeing = SlotState::new(state.generation, self.me.row, State::Freeing);
        if header.state.compare_exchange(state.encode(), freeing.encode(), SeqCst, Relaxed).is_err() {
            return false;
        }
        crate::crash_point::pass("reap.freeing");
        self.give_back(slot, freeing)
    }

    /// Its evictor died holding the bucket's lock: bring the block back, since it may have been leased or given a child
    /// meanwhile; but not if it was off its chain already, nor beside a newer one of its key.
    fn reap_evicting(&self, slot: u32, header: &SlotHeader, state: SlotState) -> bool {
        let Some((identity, key)) = name_of(header) else { return true };
        let Some(bucket) = self.lock_bucket(self.bucket_of(&identity, &key)) else { return false };
        crate::crash_point::pass("reap.locked");
        if header.state.load(SeqCst) != state.encode() {
            // Who stored its key was here first.
            return true;
        }
        bucket.begin();
        // Whoever takes a block off its chain has decided; a sibling may have stored and removed the key since.
        if bucket.is_linked(slot) && bucket.find(&identity, &key).is_none() {
            let _settled =
                header.state.compare_exchange(state.encode(), sealed_word(state.generation), SeqCst, Relaxed);
            crate::crash_point::pass("reap.restored");
        } else {
            bucket.unlink(slot);
            crate::crash_point::pass("reap.outdated");
            self.expect_orphans();
            self.doom(slot, state);
            self.stats.slots_reaped.add(1);
        }
        bucket.finish();
        true
    }

    fn unlink_for_reaping(&self, slot: u32, header: &SlotHeader) -> bool {
        let Some((identity, key)) = name_of(header) else { return true };
        let bucket_number = self.bucket_of(&identity, &key);
        let Some(bucket) = self.lock_bucket(bucket_number) else { return false };
        crate::crash_point::pass("reap.locked");
        if bucket.is_linked(slot) {
            bucket.begin();
            bucket.unlink(slot);
            crate::crash_point::pass("reap.unlinked");
            bucket.finish();
        }
        true
    }

    /// Free a member slot whose head is no longer the block that it belongs to.
    fn free_orphan(&self, slot: u32) {
        let Some(header) = self.control.slot(slot) else { return };
        let word = header.state.load(Acquire);
        let Some(state) = SlotState::decode(word).filter(|state| state.state == State::Member) else { return };
        if self.head_lives(header) {
            return;
        }
        let freeing = SlotState::new(state.generation, self.me.row, State::Freeing);
        if header.state.compare_exchange(word, freeing.encode(), SeqCst, Relaxed).is_ok() {
            crate::crash_point::pass("reap.member_freeing");
            header.member_next.store(0, Relaxed);
            self.give_back(slot, freeing);
            self.stats.slots_reaped.add(1);
        }
    }

    /// Whether the head named by a member's header is still that block.
    pub(crate) fn head_lives(&self, member: &SlotHeader) -> bool {
        let head = crate::key::BlockRef(member.parent.load(Relaxed));
        self.control.slot(head.slot()).is_some_and(|header| {
            SlotState::decode(header.state.load(SeqCst)).is_some_and(|state| {
                state.generation == head.generation() && !matches!(state.state, State::Free | State::Member)
            })
        })
    }

    /// Extents that the dead process was creating or retiring. If it only lost its lock, it may be at its last step
    /// with one of them: then there is another look. `false` if that was not enough.
    fn reap_extents(&self, row: u32) -> bool {
        // Who claims one stores its word, then looks whether it is reaped.
        fence(SeqCst);
        let in_work = |extent: &Extent| extent.owner == row && extent.state != ExtentState::Ready;
        (0..EXTENT_LOOKS_MAX).any(|_| {
            let left: Vec<Extent> = self.all_extents().into_iter().filter(in_work).collect();
            for extent in &left {
                if extent.state == ExtentState::Retiring { self.reopen(extent) } else { self.drop_extent(extent) }
            }
            left.is_empty()
        })
    }

    /// Free what has been in quarantine long enough.
    pub(crate) fn end_quarantines(&self) {
        let pending = &self.control.header().quarantine_pending;
        let Some(seen) = notice::read(pending) else { return };
        let now = boot_ms();
        let mut left = false;
        for slot in self.all_extents().iter().flat_map(Extent::slots) {
            let Some(header) = self.control.slot(slot) else { continue };
            let Some(state) = SlotState::decode(header.state.load(Acquire)) else { continue };
            if state.state != State::Quarantined || state.owner != NOBODY {
                continue;
            }
            if header.checksum.load(Relaxed) > now {
                left = true;
            } else if self.free_dead(slot, header, state) {
                crate::crash_point::pass("quarantine.ended");
                self.stats.slots_reaped.add(1);
            }
        }
        if !left {
            // Unless more went into quarantine meanwhile.
            notice::take_back(pending, seen);
            crate::crash_point::pass("quarantine.settled");
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::key::Key;
    use crate::{OpenOptions, Pool};

    #[test]
    fn who_could_not_be_settled_is_not_tried_again_at_once() {
        let options = OpenOptions { pool_bytes: Some(1 << 20), private: true, ..OpenOptions::default() };
        let pool = Pool::open("p", &options).expect("a private pool");
        let core = pool.core();
        // Its own threads would reap at times of their own.
        core.ask_to_stop();
        while std::sync::Arc::strong_count(pool.shared_core()) > 1 {
            std::thread::yield_now();
        }
        let ns = pool.namespace(&[1; 32], 0, &[512], "test").expect("a namespace");
        core.grow(ns).expect("room");
        let block = pool.reserve(ns, &[Key::new(&[1; 16]).expect("a key")], None, true).expect("a slot")[0].1;
        // What this process has reserved is that of a dead one, and its bucket is locked by this one.
        let dead = Member { row: core.me.row + 1, epoch: 5 };
        let header = core.control.slot(block.slot()).expect("a slot");
        core.forget(block);
        header.state.store(SlotState::new(block.generation(), dead.row, State::Reserved).encode(), SeqCst);
        store(&core.control.processes()[dead.row as usize], dead.epoch, ProcessState::Alive);
        let (identity, key) = name_of(header).expect("a name");
        let stripe = &core.control.stripes()[core.bucket_of(&identity, &key) % core.control.stripes().len()];
        stripe.lock.store(core.me.encode(), SeqCst);
        let version = || core.control.header().extents_version.load(SeqCst);
        assert_eq!(core.reap_when_due(), 0);
        let row = &core.control.processes()[dead.row as usize];
        assert_eq!(load(row).1, ProcessState::Reaping, "tried");
        let much_later = Instant::now() + MAINTENANCE_INTERVAL * 1000;
        core.lock_unsettled().get_mut(&dead.row).expect("known").1 = much_later;
        let tried = version();
        assert_eq!((core.reap_when_due(), version()), (0, tried), "nobody has to look again");
        stripe.lock.store(0, SeqCst);
        core.lock_unsettled().clear();
        core.reap_when_due();
        assert_eq!(load(row).1, ProcessState::Free);
    }
}
