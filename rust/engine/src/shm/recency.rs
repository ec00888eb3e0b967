//! Recency: one stamp per slot from a clock shared by all processes.
//!
//! The rule that keeps prefixes whole: **a block's stamp is always lower than that of the block before it in its
//! chain**. Touching a chain gives the head the highest stamp, and stores heads first; stamps only rise while a block
//! is sealed; a new block starts just below its parent. So eviction in the order of stamps eats tails before heads.

use crate::key::BlockRef;
use crate::shm::core::Core;
use crate::shm::state::sealed_word;
use crate::sync::{Acquire, Relaxed, SeqCst};

impl Core {
    /// Give a chain (head first; all pinned by the caller) new stamps.
    pub(crate) fn stamp_chain(&self, chain: &[BlockRef]) {
        if chain.is_empty() {
            return;
        }
        let count = chain.len() as u64;
        let newest = self.control.header().clock.fetch_add(count, SeqCst) + count;
        for (position, block) in chain.iter().enumerate() {
            self.control.stamp(block.slot()).fetch_max(newest - position as u64, SeqCst);
        }
    }

    /// Refresh the chain that ends in `tail` by following the headers' parent links. `tail` is pinned by the caller;
    /// the others are pinned meanwhile.
    pub(crate) fn refresh_chain_of(&self, tail: BlockRef) {
        let mut chain = vec![tail];
        let mut block = tail;
        for _ in 0..self.control.geometry().slots_max {
            let Some(header) = self.control.slot(block.slot()) else { break };
            let parent = BlockRef(header.parent.load(Relaxed));
            let sealed =
                |header: &crate::shm::rows::SlotHeader| header.state.load(Acquire) == sealed_word(parent.generation());
            if parent.0 == 0 || !self.control.slot(parent.slot()).is_some_and(sealed) || !self.pin(parent) {
                break;
            }
            chain.push(parent);
            block = parent;
        }
        chain.reverse();
        self.stamp_chain(&chain);
        for block in &chain[..chain.len() - 1] {
            if let Err(error) = self.unpin(*block) {
                log::error!("pegaflow: {error}");
            }
        }
    }

    /// Stamp of a new block: newest of all without a parent, else just below its parent.
    pub(crate) fn stamp_of_child(&self, parent: Option<BlockRef>) -> u64 {
        match parent {
            None => self.control.header().clock.fetch_add(1, SeqCst) + 1,
            Some(parent) => self.control.stamp(parent.slot()).load(SeqCst).saturating_sub(1).max(1),
        }
    }
}
