//! Cleaning up after dead processes. Whoever notices does it; the row's lock byte says who.
//!
//! Every step is idempotent, and the row is marked free last: a reaper that dies is replaced by the next one. The
//! order of a reaper is in `docs/crash-model.md`.

use std::sync::PoisonError;

use crate::limits::{PROCESSES_MAX, QUARANTINE_GRACE};
use crate::shm::clock::boot_ms;
use crate::shm::core::Core;
use crate::shm::evict::name_of;
use crate::shm::extent::{Extent, ExtentState};
use crate::shm::lease::is_leased;
use crate::shm::process::{Member, ProcessState, load, store};
use crate::shm::rows::SlotHeader;
use crate::shm::state::{NOBODY, SlotState, State, sealed_word};
use crate::sync::{Acquire, Relaxed, SeqCst};

/// What may be done with a dead process's reserved slots.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Writers {
    /// A process that copies for it is alive.
    Living,
    /// All dead, but a device may still finish a transfer.
    Device,
    /// Nobody can write any more.
    None,
}

impl Core {
    /// Clean up after every dead process. Returns how many rows became free.
    pub(crate) fn reap(&self) -> usize {
        let _one_at_a_time = self.reaping.lock().unwrap_or_else(PoisonError::into_inner);
        (0..PROCESSES_MAX as u32).filter(|row| *row != self.me.row && self.reap_if_dead(*row)).count()
    }

    fn reap_if_dead(&self, row: u32) -> bool {
        let (epoch, state) = load(&self.control.processes()[row as usize]);
        if state == ProcessState::Free || !matches!(self.lock_file.try_lock(row), Ok(true)) {
            return false;
        }
        // Nobody else holds the byte: the process is dead, and while we hold it we are its only reaper.
        let again = load(&self.control.processes()[row as usize]);
        let done = again.0 == epoch && again.1 != ProcessState::Free && self.reap_row(Member { row, epoch });
        self.lock_file.unlock(row);
        done
    }

    /// Clean up after `dead`. `false` if something has to wait for a living follower.
    pub(crate) fn reap_row(&self, dead: Member) -> bool {
        let row = &self.control.processes()[dead.row as usize];
        store(row, dead.epoch, ProcessState::Reaping);
        crate::crash_point::pass("reap.claimed");
        let writers = if self.has_living_follower(dead) {
            Writers::Living
        } else if self.device_writes(dead.row) {
            Writers::Device
        } else {
            Writers::None
        };
        self.break_locks(dead);
        let extents = self.all_extents();
        let usable = |extent: &&Extent| matches!(extent.state, ExtentState::Ready | ExtentState::Retiring);
        for slot in extents.iter().filter(usable).flat_map(Extent::slots) {
            self.reap_slot(slot, dead.row, writers);
        }
        // Members whose head is gone, found after all heads were settled.
        for slot in extents.iter().filter(usable).flat_map(Extent::slots) {
            self.free_orphan(slot);
        }
        self.reap_extents(dead.row, &extents);
        // Slots went free or were hinted anew: whoever had found nothing looks again.
        (0..self.control.namespaces().len() as u32).for_each(|id| self.namespace_freed(id));
        crate::crash_point::pass("reap.scanned");
        if writers == Writers::Living {
            return false;
        }
        store(row, dead.epoch, ProcessState::Free);
        self.stats.processes_reaped.add(1);
        true
    }

    /// Take over and drop every lock that the dead process holds.
    fn break_locks(&self, dead: Member) {
        let header = self.control.header();
        let words = std::iter::once(&header.structure_lock).chain(self.control.stripes().iter().map(|s| &s.lock));
        for word in words.filter(|word| word.load(Acquire) == dead.encode()) {
            drop(self.lock(word));
        }
        for (number, stripe) in self.control.stripes().iter().enumerate() {
            if stripe.version.load(Acquire) % 2 == 1 {
                // Its lowest bucket has the number of the stripe.
                drop(self.lock_bucket(number));
            }
        }
    }

    fn reap_slot(&self, slot: u32, row: u32, writers: Writers) {
        let Some(header) = self.control.slot(slot) else { return };
        let bit = 1u64 << (row % 64);
        if header.leases[row as usize / 64].load(Relaxed) & bit != 0 {
            header.leases[row as usize / 64].fetch_and(!bit, SeqCst);
        }
        let Some(state) = SlotState::decode(header.state.load(Acquire)) else {
            self.want_rebuild("a slot has an impossible state");
            return;
        };
        match state.state {
            State::Free => self.hint_free(slot),
            State::Doomed => self.settle_doomed(slot),
            State::Reserved | State::Quarantined if state.owner == row && writers != Writers::Living => {
                self.reap_reserved(slot, header, state, writers);
            }
            State::Evicting if state.owner == row => self.reap_evicting(slot, header, state),
            State::Freeing if state.owner == row && self.give_back(slot, state) => self.stats.slots_reaped.add(1),
            _ => {}
        }
    }

    /// A reserved slot may already be linked (its publisher died before the seal): off the chain first.
    fn reap_reserved(&self, slot: u32, header: &SlotHeader, state: SlotState, writers: Writers) {
        if !self.unlink_for_reaping(slot, header) {
            return;
        }
        if writers == Writers::Device {
            let due = boot_ms() + QUARANTINE_GRACE.as_millis() as u64;
            header.checksum.store(due, Relaxed);
            let waiting = SlotState::new(state.generation, NOBODY, State::Quarantined);
            if header.state.compare_exchange(state.encode(), waiting.encode(), SeqCst, Relaxed).is_ok() {
                self.stats.slots_quarantined.add(1);
                self.control.header().quarantine_pending.fetch_max(1, SeqCst);
            }
        } else if self.free_dead(slot, header, state) {
            self.stats.slots_reaped.add(1);
        }
    }

    fn free_dead(&self, slot: u32, header: &SlotHeader, state: SlotState) -> bool {
        let freeing = SlotState::new(state.generation, self.me.row, State::Freeing);
        header.state.compare_exchange(state.encode(), freeing.encode(), SeqCst, Relaxed).is_ok()
            && self.give_back(slot, freeing)
    }

    /// Its evictor died holding the bucket's lock: finish if nobody leases the block or a newer one has its key, else
    /// bring it back.
    fn reap_evicting(&self, slot: u32, header: &SlotHeader, state: SlotState) {
        let Some((identity, key)) = name_of(header) else { return };
        let Some(bucket) = self.lock_bucket(self.bucket_of(&identity, &key)) else { return };
        bucket.begin();
        if is_leased(header) && bucket.find(&identity, &key).is_none() {
            if !bucket.is_linked(slot) {
                bucket.link(slot);
            }
            header.state.store(sealed_word(state.generation), SeqCst);
        } else {
            bucket.unlink(slot);
            self.doom(slot, state.generation);
            self.stats.slots_reaped.add(1);
        }
        bucket.finish();
    }

    fn unlink_for_reaping(&self, slot: u32, header: &SlotHeader) -> bool {
        let Some((identity, key)) = name_of(header) else { return true };
        let bucket_number = self.bucket_of(&identity, &key);
        let Some(bucket) = self.lock_bucket(bucket_number) else { return false };
        if bucket.is_linked(slot) {
            bucket.begin();
            bucket.unlink(slot);
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

    /// Extents that the dead process was creating or retiring.
    fn reap_extents(&self, row: u32, extents: &[Extent]) {
        for extent in extents.iter().filter(|extent| extent.owner == row) {
            match extent.state {
                ExtentState::Creating | ExtentState::Dropping => self.drop_extent(extent),
                ExtentState::Retiring => self.reopen(extent),
                ExtentState::Free | ExtentState::Ready => {}
            }
        }
    }

    /// Free what has been in quarantine long enough.
    pub(crate) fn end_quarantines(&self) {
        let pending = &self.control.header().quarantine_pending;
        if pending.swap(0, SeqCst) == 0 {
            return;
        }
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
                self.stats.slots_reaped.add(1);
            }
        }
        if left {
            pending.fetch_max(1, SeqCst);
        }
    }
}
