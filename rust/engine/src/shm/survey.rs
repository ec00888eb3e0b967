//! A walk over all slots of a pool, a bounded part of it at a time: which blocks can be found now. For those who tell
//! others about them.

use std::ops::Range;

use crate::error::Result;
use crate::key::{BlockRef, Key};
use crate::shm::core::Core;
use crate::shm::evict::name_of;
use crate::shm::extent::{Extent, ExtentState};
use crate::shm::namespace::{Identity, Namespace, is_kept};
use crate::shm::pool::Pool;
use crate::shm::rows::load4;
use crate::shm::state::{SlotState, State};
use crate::sync::{Acquire, Relaxed, fence};

/// What a walk saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sight {
    /// No block that could be found is in these slots.
    Nothing(Range<u32>),
    /// A sealed block of the present epoch of its namespace.
    Block(BlockRef),
}

/// Where a walk is. A new one begins at the first slot.
#[derive(Default)]
pub struct Survey {
    /// In the order of their slots; `None`: a pass is to begin.
    extents: Option<Vec<Extent>>,
    position: usize,
    slot: u32,
}

/// Name of a block: the same on every host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockName {
    /// Fingerprint of its namespace.
    pub fingerprint: [u8; 32],
    /// Group of its namespace.
    pub group: u32,
    /// Key in its namespace.
    pub key: Key,
}

impl Pool {
    /// Go on with a walk over at most `slots_max` slots, in their order, and hand what is seen to `see` until that says
    /// that it was enough. Blocks that are kept for their users alone do not count. Returns whether that was the end of
    /// a pass over all slots there are; the next call begins another one.
    pub fn survey(&self, survey: &mut Survey, slots_max: usize, mut see: impl FnMut(Sight) -> bool) -> Result<bool> {
        let core = self.core();
        core.check_usable()?;
        let extents = survey.extents.get_or_insert_with(|| extents_of(core));
        let mut left = slots_max;
        while let Some(extent) = extents.get(survey.position) {
            let slots = extent.slots();
            if survey.slot < slots.start {
                let gap = survey.slot..slots.start;
                survey.slot = slots.start;
                if !see(Sight::Nothing(gap)) {
                    return Ok(false);
                }
            }
            let identity = core.identity(Namespace(extent.namespace)).ok();
            while survey.slot < slots.end {
                if left == 0 {
                    return Ok(false);
                }
                let slot = survey.slot;
                (survey.slot, left) = (slot + 1, left - 1);
                let block = identity.as_ref().and_then(|identity| sealed_in(core, slot, identity));
                if !see(block.map_or(Sight::Nothing(slot..slot + 1), Sight::Block)) {
                    return Ok(false);
                }
            }
            survey.position += 1;
        }
        let rest = survey.slot..core.control.geometry().slots_max as u32;
        *survey = Survey::default();
        see(Sight::Nothing(rest));
        Ok(true)
    }

    /// Name of a sealed block; `None` if it is gone, or holds a value of an object store.
    pub fn block_name(&self, block: BlockRef) -> Option<BlockName> {
        let core = self.core();
        let header = core.control.slot(block.slot())?;
        let before = header.state.load(Acquire);
        let state = SlotState::decode(before)?;
        let (identity, key) = name_of(header)?;
        let whole = header.used_bytes.load(Relaxed) == 0;
        fence(Acquire);
        let same = header.state.load(Relaxed) == before && state.block(block.slot()) == block;
        if !same || state.state != State::Sealed || !whole {
            return None;
        }
        let origin = core.origin_of(Namespace(identity.id))?;
        let mut fingerprint = [0; 32];
        for (chunk, word) in fingerprint.chunks_exact_mut(8).zip(origin.fingerprint) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        Some(BlockName { fingerprint, group: origin.group, key })
    }
}

/// Extents that may hold blocks which can be found, in the order of their slots.
fn extents_of(core: &Core) -> Vec<Extent> {
    let mut extents = core.all_extents();
    extents.retain(|extent| {
        matches!(extent.state, ExtentState::Ready | ExtentState::Retiring) && !is_kept(&core.control, extent.namespace)
    });
    extents.sort_unstable_by_key(|extent| extent.first_slot);
    extents
}

fn sealed_in(core: &Core, slot: u32, identity: &Identity) -> Option<BlockRef> {
    let header = core.control.slot(slot)?;
    let before = header.state.load(Acquire);
    if before as u8 != State::Sealed as u8 {
        return None;
    }
    let same = load4(&header.fingerprint) == identity.fingerprint && header.tag.load(Relaxed) >> 16 == identity.id;
    fence(Acquire);
    (same && header.state.load(Relaxed) == before).then(|| BlockRef::new(slot, (before >> 32) as u32))
}
