//! Recency: one stamp per slot from a clock shared by all processes.
//!
//! The rule that keeps prefixes whole: **a block's stamp is always lower than that of the block before it in its
//! chain**. Touching a chain gives the head the highest stamp, and stores heads first; stamps only rise while a block
//! is sealed; a new block starts just below its parent. So eviction in the order of stamps eats tails before heads.

use crate::key::BlockRef;
use crate::shm::core::Core;
use crate::sync::SeqCst;

/// Times that a chain is touched again because there is another block before it now.
const TOUCHES_MAX: usize = 4;

/// A block of a chain that is being touched.
struct Link {
    block: BlockRef,
    /// What its header said is before it.
    before: BlockRef,
    /// Not one of those that the caller holds.
    pinned_here: bool,
}

impl Core {
    /// Give a chain (head first; all pinned by the caller) new stamps, and the blocks before it higher ones. The caller
    /// may not have found all of the chain: those between are touched with it.
    pub(crate) fn stamp_chain(&self, chain: &[BlockRef]) {
        for _ in 0..TOUCHES_MAX {
            let links = self.links_of(chain);
            let newest = self.tick(links.len() as u64);
            for (position, link) in links.iter().enumerate() {
                let stamp = newest.saturating_sub(position as u64);
                self.control.stamp(link.block.slot()).fetch_max(stamp, SeqCst);
                crate::crash_point::pass("touch.stamped");
            }
            // A rebuild of the index may have put another block before one of these.
            let same = links.iter().all(|link| self.before(link.block) == link.before);
            for link in links.iter().filter(|link| link.pinned_here) {
                if let Err(error) = self.unpin(link.block) {
                    log::error!("pegaflow: {error}");
                }
            }
            if same {
                return;
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

    /// The chain with all that its headers say is before and between its blocks, head first; what is added is pinned.
    fn links_of(&self, chain: &[BlockRef]) -> Vec<Link> {
        let mut links: Vec<Link> = Vec::with_capacity(chain.len());
        let mut last = BlockRef(0);
        for block in chain {
            let start = links.len();
            links.push(Link { block: *block, before: self.before(*block), pinned_here: false });
            // Damaged links may form a circle: whoever comes back to a place that is looked at again and again is in
            // one.
            let mut landmark = *block;
            while let Some(Link { before, .. }) = links.last()
                && before.0 != 0
                && *before != last
                && *before != landmark
                && self.pin(*before)
            {
                let block = *before;
                links.push(Link { block, before: self.before(block), pinned_here: true });
                if (links.len() - start).is_power_of_two() {
                    landmark = block;
                }
            }
            links[start..].reverse();
            last = *block;
        }
        links
    }

    /// The block before this one, as its header says; 0 for none.
    fn before(&self, block: BlockRef) -> BlockRef {
        BlockRef(self.control.slot(block.slot()).map_or(0, |header| header.parent.load(SeqCst)))
    }

    /// Stamp of a new block: newest of all without a parent, else just below its parent.
    pub(crate) fn stamp_of_child(&self, parent: Option<BlockRef>) -> u64 {
        match parent {
            None => self.tick(1),
            Some(parent) => self.control.stamp(parent.slot()).load(SeqCst).saturating_sub(1).max(1),
        }
    }
}
