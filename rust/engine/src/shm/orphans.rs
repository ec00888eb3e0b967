//! Blocks whose chain lost a block before them: nobody gets to them any more, so they go too.
//!
//! Eviction takes tails before heads and leaves none. Taking a whole extent out of use does: it says so in the pool's
//! header before it evicts the first block, and whoever is alive afterwards cleans up.

use crate::key::BlockRef;
use crate::shm::core::Core;
use crate::shm::extent::{Extent, ExtentState};
use crate::shm::notice;
use crate::shm::state::{SlotState, State, sealed_word};
use crate::sync::{Acquire, Relaxed, SeqCst};

/// Scans within one call; a scan finds more only if somebody was storing meanwhile.
const SCANS_MAX: usize = 8;

impl Core {
    /// Say that blocks may lose the block before them from now on.
    pub(crate) fn expect_orphans(&self) {
        notice::raise(&self.control.header().orphans_expected);
        crate::crash_point::pass("orphans.expected");
    }

    /// Take every block out of the index whose parent is gone, if somebody said that there may be some.
    pub(crate) fn drop_orphans(&self) {
        let expected = &self.control.header().orphans_expected;
        let Some(seen) = notice::read(expected) else { return };
        for _ in 0..SCANS_MAX {
            if !self.is_member() {
                return;
            }
            let version = self.control.header().extents_version.load(SeqCst);
            let extents = self.all_extents();
            // Who is still taking an extent makes more, says so before it begins, and may be about to tell the children
            // of blocks that it has moved where those are now.
            if extents.iter().any(|extent| matches!(extent.state, ExtentState::Retiring | ExtentState::Dropping)) {
                return;
            }
            if self.drop_orphans_once(&extents, version) == 0 {
                notice::take_back(expected, seen);
                crate::crash_point::pass("orphans.settled");
                return;
            }
        }
    }

    /// Returns how many were found. Heads come first, so one scan goes down whole chains. `version` is that of the
    /// extents before they were read.
    pub(crate) fn drop_orphans_once(&self, extents: &[Extent], version: u64) -> usize {
        let ready = extents.iter().filter(|extent| extent.state == ExtentState::Ready);
        let mut children: Vec<(u64, BlockRef)> =
            ready.flat_map(Extent::slots).filter_map(|s| self.child_in(s)).collect();
        children.sort_unstable_by(|one, other| other.cmp(one));
        let mut found = 0;
        for (_, block) in children {
            let header = self.control.slot_unchecked(block.slot());
            let parent = BlockRef(header.parent.load(Relaxed));
            if header.state.load(Acquire) == sealed_word(block.generation()) && !self.may_be_found(parent) {
                found += 1;
                if self.control.header().extents_version.load(SeqCst) != version {
                    // An extent may be on its way out since, and the parent elsewhere without its child's knowing yet.
                    break;
                }
                let of = self.namespace_in(block.slot());
                if self.expel(block) {
                    self.count_evicted(of);
                }
                crate::crash_point::pass("orphans.dropped");
            }
        }
        found
    }

    /// The sealed block in `slot` with its stamp, if it has a parent.
    fn child_in(&self, slot: u32) -> Option<(u64, BlockRef)> {
        let header = self.control.slot(slot)?;
        let state = SlotState::decode(header.state.load(Acquire)).filter(|state| state.state == State::Sealed)?;
        (header.parent.load(Relaxed) != 0).then(|| (self.control.stamp(slot).load(Relaxed), state.block(slot)))
    }

    /// Whether the block is in the index, or will be again if its evictor finds it in use.
    pub(crate) fn may_be_found(&self, block: BlockRef) -> bool {
        let header = self.control.slot(block.slot());
        header.and_then(|header| SlotState::decode(header.state.load(SeqCst))).is_some_and(|state| {
            state.generation == block.generation() && matches!(state.state, State::Sealed | State::Evicting)
        })
    }
}
