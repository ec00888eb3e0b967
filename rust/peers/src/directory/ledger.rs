//! What an owner has registered: 12 bytes for each slot of its pool that was ever used.

use std::collections::HashSet;
use std::ops::Range;

use pegaflow_engine::BlockRef;

use super::names::Layout;

/// One entry per slot, in memory that the kernel gives when it is first written.
pub(super) struct Ledger {
    /// Hash of the block that is registered; 0: none.
    hashes: Vec<u64>,
    /// Generation of the slot when it was looked at; 0: there was no block.
    generations: Vec<u32>,
    /// No slot from here on has been used.
    end: u32,
    blocks: usize,
}

impl Ledger {
    pub(super) fn new(slots_max: u64) -> Self {
        let slots = slots_max as usize;
        Self { hashes: vec![0; slots], generations: vec![0; slots], end: 0, blocks: 0 }
    }

    /// Blocks that are registered.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Slots that have been used.
    pub(super) fn end(&self) -> u32 {
        self.end
    }

    /// Nothing is registered.
    pub(super) fn clear(&mut self) {
        let used = 0..self.end as usize;
        self.hashes[used.clone()].fill(0);
        self.generations[used].fill(0);
        (self.end, self.blocks) = (0, 0);
    }

    /// Whether this very block has been looked at.
    pub(super) fn knows(&self, block: BlockRef) -> bool {
        self.generations.get(block.slot() as usize) == Some(&block.generation())
    }

    /// Take down the block in its slot; `None`: there is one, but it is not to be registered. Returns what was
    /// registered for the slot before.
    pub(super) fn set(&mut self, block: BlockRef, hash: Option<u64>) -> Option<u64> {
        let slot = block.slot() as usize;
        let before = self.take(slot);
        if slot < self.hashes.len() {
            self.hashes[slot] = hash.unwrap_or(0);
            self.generations[slot] = block.generation();
            self.end = self.end.max(block.slot() + 1);
            self.blocks += usize::from(hash.is_some());
        }
        before
    }

    /// There is no block in these slots. Hands over what was registered for them.
    pub(super) fn drop_all(&mut self, slots: Range<u32>, mut gone: impl FnMut(u64)) {
        for slot in slots.start..slots.end.min(self.end) {
            if let Some(hash) = self.take(slot as usize) {
                gone(hash);
            }
        }
    }

    fn take(&mut self, slot: usize) -> Option<u64> {
        *self.generations.get_mut(slot)? = 0;
        let hash = std::mem::take(self.hashes.get_mut(slot)?);
        self.blocks -= usize::from(hash != 0);
        (hash != 0).then_some(hash)
    }

    /// Hash that is registered for a slot.
    pub(super) fn hash_at(&self, slot: u32) -> Option<u64> {
        self.hashes.get(slot as usize).copied().filter(|hash| *hash != 0)
    }

    /// Leave only those of `hashes` that no slot has, going by what `layout` shows of them: a block may have moved to
    /// another slot, and then its entry stays.
    pub(super) fn retain_absent(&self, layout: Layout, hashes: &mut HashSet<u64>) {
        if hashes.is_empty() {
            return;
        }
        for hash in &self.hashes[..self.end as usize] {
            // Most slots end here: a set is asked only for what is there.
            if *hash != 0 {
                hashes.remove(&layout.visible(*hash));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(slot: u32, generation: u32) -> BlockRef {
        BlockRef(u64::from(generation) << 32 | u64::from(slot))
    }

    #[test]
    fn a_slot_gives_back_what_was_registered_for_it() {
        let mut ledger = Ledger::new(8);
        assert_eq!(ledger.set(block(3, 1), Some(77)), None);
        assert!(ledger.knows(block(3, 1)) && !ledger.knows(block(3, 2)));
        assert_eq!(ledger.set(block(3, 2), None), Some(77));
        assert_eq!((ledger.blocks(), ledger.hash_at(3), ledger.end()), (0, None, 4));
        assert!(ledger.knows(block(3, 2)), "it is not looked at again");
        ledger.set(block(3, 3), Some(5));
        let mut gone = Vec::new();
        ledger.drop_all(0..8, |hash| gone.push(hash));
        assert_eq!((gone, ledger.blocks()), (vec![5], 0));
        ledger.set(block(1, 1), Some(6));
        ledger.clear();
        assert!(!ledger.knows(block(1, 1)) && ledger.blocks() == 0);
        assert_eq!(ledger.set(block(8, 1), Some(1)), None, "a slot that there is not");
        assert_eq!((ledger.blocks(), ledger.knows(block(8, 1))), (0, false));
    }

    #[test]
    fn a_block_that_moved_is_not_absent() {
        let (layout, mut ledger) = (Layout::for_entries(0), Ledger::new(8));
        ledger.set(block(0, 1), Some(100));
        ledger.set(block(1, 1), Some(200));
        let mut gone = HashSet::from([layout.visible(100), layout.visible(300)]);
        ledger.retain_absent(layout, &mut gone);
        assert_eq!(gone, HashSet::from([layout.visible(300)]));
    }
}
