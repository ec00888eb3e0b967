//! Recency: one stamp per slot from a clock shared by all processes.
//!
//! The rule that keeps prefixes whole: **a block's stamp is always lower than that of the block before it in its
//! chain**. Touching a chain gives the head the highest stamp, and stores heads first; stamps only rise while a block
//! is sealed; a new block starts just below its parent. So eviction in the order of stamps eats tails before heads.

use crate::key::BlockRef;
use crate::shm::core::Core;
use crate::sync::{Acquire, SeqCst};

impl Core {
    /// Give a chain (head first; all pinned by the caller) new stamps, and the blocks before it higher ones.
    pub(crate) fn stamp_chain(&self, chain: &[BlockRef]) {
        let Some(first) = chain.first() else { return };
        let before = self.pin_blocks_before(*first);
        let count = (before.len() + chain.len()) as u64;
        let newest = self.tick(count);
        for (position, block) in before.iter().rev().chain(chain).enumerate() {
            self.control.stamp(block.slot()).fetch_max(newest.saturating_sub(position as u64), SeqCst);
        }
        for block in before {
            if let Err(error) = self.unpin(block) {
                log::error!("pegaflow: {error}");
            }
        }
    }

    /// Refresh the chain that ends in `tail`, which is pinned by the caller.
    pub(crate) fn refresh_chain_of(&self, tail: BlockRef) {
        self.stamp_chain(&[tail]);
    }

    /// Take `count` ticks of the shared clock; returns the last.
    fn tick(&self, count: u64) -> u64 {
        self.control.header().clock.fetch_add(count, SeqCst).wrapping_add(count)
    }

    /// Pin the blocks before `block` in its chain, by the headers' parent links; the nearest comes first.
    fn pin_blocks_before(&self, mut block: BlockRef) -> Vec<BlockRef> {
        let mut before: Vec<BlockRef> = Vec::new();
        // Damaged links may form a circle: whoever comes back to a place that is looked at again and again is in one.
        let mut landmark = block;
        while let Some(header) = self.control.slot(block.slot()) {
            block = BlockRef(header.parent.load(Acquire));
            if block.0 == 0 || block == landmark || !self.pin(block) {
                break;
            }
            before.push(block);
            if before.len().is_power_of_two() {
                landmark = block;
            }
        }
        before
    }

    /// Stamp of a new block: newest of all without a parent, else just below its parent.
    pub(crate) fn stamp_of_child(&self, parent: Option<BlockRef>) -> u64 {
        match parent {
            None => self.tick(1),
            Some(parent) => self.control.stamp(parent.slot()).load(SeqCst).saturating_sub(1).max(1),
        }
    }
}
