//! Leases: a process sets its bit in the slot's lease words, then looks whether the slot is still sealed. An evictor
//! marks the slot EVICTING, then looks at the lease words. One of the two always sees the other.
//!
//! The bits say which process pins a slot, so the pins of a dead process can be found and dropped. How often a process
//! pins a slot is its own business and lives in its own memory.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::error::{Error, Result};
use crate::key::{BlockRef, Key};
use crate::limits::{MOVES_FOLLOWED_MAX, few};
use crate::shm::core::Core;
use crate::shm::namespace::{Identity, Namespace};
use crate::shm::rows::SlotHeader;
use crate::shm::state::{NOBODY, SlotState, State, sealed_word};
use crate::sync::{LocalU32, Relaxed, SeqCst};

const PIN_LOCKS: usize = 64;

/// Slots whose counts are allocated together, at first use.
const PIN_CHUNK: usize = few(4096, 4);

/// How often this process pins each slot.
pub(crate) struct Pins {
    counts: Vec<OnceLock<Vec<LocalU32>>>,
    locks: Vec<Mutex<()>>,
}

impl Pins {
    pub(crate) fn new(slots_max: usize) -> Self {
        Self {
            counts: std::iter::repeat_with(OnceLock::new).take(slots_max.div_ceil(PIN_CHUNK)).collect(),
            locks: std::iter::repeat_with(Mutex::default).take(PIN_LOCKS).collect(),
        }
    }

    fn count(&self, slot: u32) -> &LocalU32 {
        let chunk = self.counts[slot as usize / PIN_CHUNK]
            .get_or_init(|| std::iter::repeat_with(|| LocalU32::new(0)).take(PIN_CHUNK).collect());
        &chunk[slot as usize % PIN_CHUNK]
    }

    fn lock(&self, slot: u32) -> MutexGuard<'_, ()> {
        self.locks[slot as usize % PIN_LOCKS].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether any process leases the slot.
pub(crate) fn is_leased(header: &SlotHeader) -> bool {
    header.leases.iter().any(|word| word.load(SeqCst) != 0)
}

impl Core {
    /// Pin a sealed block; `false` if it is not sealed at this generation.
    pub(crate) fn pin(&self, block: BlockRef) -> bool {
        let Some(header) = self.control.slot(block.slot()) else { return false };
        let _turn = self.pins.lock(block.slot());
        let count = self.pins.count(block.slot());
        let first = count.load(Relaxed) == 0;
        if first {
            self.set_lease_bit(header);
            crate::crash_point::pass("lease.marked");
        }
        // As for a reserved slot: who was reaped meanwhile has no lease, and takes back what nobody else does.
        if header.state.load(SeqCst) == sealed_word(block.generation()) && self.is_member() {
            count.fetch_add(1, Relaxed);
            return true;
        }
        if first {
            self.clear_lease_bit(header);
            self.settle_doomed(block.slot());
        }
        false
    }

    /// Pin the block of a key that was found there. It may be moving to another slot, and is not absent meanwhile: it
    /// is looked for again.
    pub(crate) fn pin_found(&self, identity: &Identity, key: &Key, found: BlockRef) -> Option<BlockRef> {
        if self.pin(found) {
            return Some(found);
        }
        for _ in 0..MOVES_FOLLOWED_MAX {
            let block = self.find(identity, key)?;
            if self.pin(block) {
                return Some(block);
            }
        }
        None
    }

    /// Give one pin back.
    pub(crate) fn unpin(&self, block: BlockRef) -> Result<()> {
        let stale = || Error::invalid("a block was released that this process has not leased");
        let header = self.control.slot(block.slot()).ok_or_else(stale)?;
        let _turn = self.pins.lock(block.slot());
        let count = self.pins.count(block.slot());
        let held = SlotState::decode(header.state.load(SeqCst)).is_some_and(|s| s.generation == block.generation());
        if count.load(Relaxed) == 0 || !held || !self.is_member() {
            return Err(stale());
        }
        if count.fetch_sub(1, Relaxed) == 1 {
            self.clear_lease_bit(header);
            crate::crash_point::pass("lease.released");
            self.settle_doomed(block.slot());
        }
        Ok(())
    }

    fn set_lease_bit(&self, header: &SlotHeader) {
        header.leases[self.me.row as usize / 64].fetch_or(1 << (self.me.row % 64), SeqCst);
    }

    fn clear_lease_bit(&self, header: &SlotHeader) {
        header.leases[self.me.row as usize / 64].fetch_and(!(1 << (self.me.row % 64)), SeqCst);
    }

    /// Free a slot that is out of the index and that nobody leases any more.
    pub(crate) fn settle_doomed(&self, slot: u32) {
        let Some(header) = self.control.slot(slot) else { return };
        let word = header.state.load(SeqCst);
        let Some(state) = SlotState::decode(word).filter(|state| state.state == State::Doomed) else { return };
        if is_leased(header) {
            return;
        }
        let freeing = SlotState::new(state.generation, self.me.row, State::Freeing);
        if header.state.compare_exchange(word, freeing.encode(), SeqCst, Relaxed).is_ok() {
            crate::crash_point::pass("doom.freeing");
            self.give_back(slot, freeing);
        }
    }

    /// Take an EVICTING slot out of use that the caller has unlinked from the index: free, or doomed until its last
    /// lease ends.
    pub(crate) fn doom(&self, slot: u32, evicting: SlotState) {
        let header = self.control.slot_unchecked(slot);
        let doomed = SlotState::new(evicting.generation, NOBODY, State::Doomed).encode();
        if header.state.compare_exchange(evicting.encode(), doomed, SeqCst, Relaxed).is_err() {
            return;
        }
        crate::crash_point::pass("doom.marked");
        self.settle_doomed(slot);
    }

    /// Pin the longest run of present `keys[start..stop]`; refresh that run and what is present before it.
    pub(crate) fn lease(&self, ns: Namespace, keys: &[Key], start: usize, stop: usize) -> Result<Vec<BlockRef>> {
        let identity = self.identity(ns)?;
        let stop = stop.min(keys.len());
        let start = start.min(stop);
        self.stats.lookups.add(1);
        let mut leased = Vec::with_capacity(stop - start);
        self.find_many(&identity, &keys[start..stop], |found| {
            let pinned = found.and_then(|block| self.pin_found(&identity, &keys[start + leased.len()], block));
            leased.extend(pinned);
            pinned.is_some()
        });
        self.stats.lookup_blocks_hit.add(leased.len() as u64);
        let mut before = Vec::new();
        if !leased.is_empty() {
            self.pin_present(&identity, &keys[..start], &mut before);
        }
        let chain: Vec<BlockRef> = before.iter().chain(&leased).copied().collect();
        self.stamp_chain(&chain);
        for block in before {
            self.unpin(block)?;
        }
        Ok(leased)
    }

    /// Pin all keys that are present.
    fn pin_present(&self, identity: &Identity, keys: &[Key], pinned: &mut Vec<BlockRef>) {
        let mut position = 0;
        self.find_many(identity, keys, |found| {
            pinned.extend(found.and_then(|block| self.pin_found(identity, &keys[position], block)));
            position += 1;
            true
        });
    }

    /// Refresh what is present of a chain. Returns how many blocks were.
    pub(crate) fn touch(&self, ns: Namespace, keys: &[Key]) -> Result<usize> {
        let identity = self.identity(ns)?;
        let mut chain = Vec::new();
        self.pin_present(&identity, keys, &mut chain);
        self.stamp_chain(&chain);
        for block in &chain {
            self.unpin(*block)?;
        }
        Ok(chain.len())
    }
}
