//! Publishing: a block becomes visible once, whole. The one store that does it is the state word going to SEALED.

use crate::error::{Error, Result};
use crate::key::BlockRef;
use crate::shm::core::Core;
use crate::shm::namespace::Identity;
use crate::shm::recency::tick_of;
use crate::shm::reserve::Pending;
use crate::shm::rows::SlotHeader;
use crate::shm::state::{NOBODY, SlotState, State, sealed_word};
use crate::sync::{AcqRel, Acquire, Relaxed, SeqCst};

/// Times that a new block is stamped again because somebody listed candidates for eviction meanwhile.
const STAMPS_MAX: usize = 16;

/// What became of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Published {
    Visible,
    Duplicate,
    /// The block before it is not in the pool: nobody would ever get to it.
    Orphan,
    /// Parts are missing, the namespace was reset, or a lock could not be had in time.
    Not,
}

impl Core {
    /// Publish reserved blocks in the order given; what cannot be published is freed.
    pub(crate) fn publish(&self, blocks: &[BlockRef]) -> usize {
        blocks.iter().filter(|block| self.publish_counted(**block) == Published::Visible).count()
    }

    fn publish_counted(&self, block: BlockRef) -> Published {
        let Some(pending) = self.forget(block) else { return Published::Not };
        let outcome = self.publish_one(block, &pending, false);
        let counter = match outcome {
            Published::Visible => &self.stats.blocks_published,
            Published::Duplicate => &self.stats.blocks_duplicate,
            Published::Orphan => &self.stats.blocks_orphaned,
            Published::Not => &self.stats.blocks_unpublished,
        };
        counter.add(1);
        #[cfg(not(loom))]
        if outcome == Published::Visible {
            self.note_stored(pending.ns, &pending.key);
        }
        if outcome != Published::Visible {
            self.give_back(block.slot(), self.reserved_state(block));
        }
        outcome
    }

    pub(crate) fn reserved_state(&self, block: BlockRef) -> SlotState {
        SlotState::new(block.generation(), self.me.row, State::Reserved)
    }

    /// Make one reserved block visible. With `replace`, an older block of the key makes way; else it wins.
    pub(crate) fn publish_one(&self, block: BlockRef, pending: &Pending, replace: bool) -> Published {
        let Some(header) = self.control.slot(block.slot()) else { return Published::Not };
        let (Ok(identity), Ok(info)) = (self.identity(pending.ns), self.namespace_info(pending.ns)) else {
            return Published::Not;
        };
        let all_parts = u64::MAX >> (64 - info.parts);
        if header.state.load(Acquire) != self.reserved_state(block).encode()
            || header.parts_written.load(Acquire) != all_parts
            || crate::shm::rows::load4(&header.fingerprint) != identity.fingerprint
        {
            return Published::Not;
        }
        let parent = match &pending.parent {
            None => None,
            Some(key) => match self.find(&identity, key).and_then(|parent| self.pin_found(&identity, key, parent)) {
                Some(parent) => Some(parent),
                None => return Published::Orphan,
            },
        };
        let mut outcome = self.publish_below(block, header, &identity, pending, parent, replace);
        let Some(parent) = parent else { return outcome };
        // A pinned block is not evicted, but its extent may have lost what was before it.
        if outcome == Published::Visible && !self.may_be_found(parent) && self.expel(block) {
            outcome = Published::Orphan;
        }
        if let Err(error) = self.unpin(parent) {
            log::error!("pegaflow: {error}");
        }
        outcome
    }

    /// As [`Self::publish_one`], with the parent pinned.
    fn publish_below(
        &self,
        block: BlockRef,
        header: &SlotHeader,
        identity: &Identity,
        pending: &Pending,
        parent: Option<BlockRef>,
        replace: bool,
    ) -> Published {
        header.parent.store(parent.map_or(0, |parent| parent.0), Relaxed);
        if !self.stamp_below(block, identity, parent, pending) {
            return Published::Not;
        }
        crate::crash_point::pass("publish.stamped");
        let Some(bucket) = self.lock_bucket(self.bucket_of(identity, &pending.key)) else { return Published::Not };
        crate::crash_point::pass("publish.locked");
        bucket.restore_abandoned(identity, &pending.key);
        let older = bucket.find(identity, &pending.key);
        if older.is_some() && !replace {
            return Published::Duplicate;
        }
        bucket.begin();
        crate::crash_point::pass("publish.odd");
        bucket.link(block.slot());
        crate::crash_point::pass("publish.linked");
        let reserved = self.reserved_state(block).encode();
        let sealed = sealed_word(block.generation());
        if header.state.compare_exchange(reserved, sealed, AcqRel, Relaxed).is_err() {
            bucket.unlink(block.slot());
            bucket.finish();
            return Published::Not;
        }
        crate::crash_point::pass("publish.sealed");
        if let Some(older) = older {
            self.supersede(older, |slot| bucket.unlink(slot));
        }
        bucket.finish();
        crate::crash_point::pass("publish.even");
        drop(bucket);
        crate::crash_point::pass("publish.unlocked");
        Published::Visible
    }

    /// Give a block that is about to be sealed its stamp: the time that the policy says, or less, so that it is below
    /// its parent. Whoever lists candidates for eviction either lists it before its parent, or does not list the parent
    /// at the stamp that it has now: so nothing is left to do after the seal, where this process may die. Nor is its
    /// own time on any list, where it could be that of an earlier block in this slot. `false` if somebody lists
    /// candidates all the time.
    fn stamp_below(&self, block: BlockRef, identity: &Identity, parent: Option<BlockRef>, pending: &Pending) -> bool {
        let returns = pending.used || self.went_lately(identity, &pending.key);
        for _ in 0..STAMPS_MAX {
            let horizon = self.horizon(pending.ns);
            let time = self.first_time(pending.ns, horizon, returns);
            if let Some(parent) = parent
                && tick_of(self.control.stamp(parent.slot()).load(SeqCst)) <= horizon.saturating_add(1)
            {
                self.raise_chain_of(parent, pending.account, time, horizon);
            }
            self.control.stamp(block.slot()).store(self.stamp_below_parent(time, parent, pending.account), SeqCst);
            if parent.is_none() || self.horizon(pending.ns) == horizon {
                return true;
            }
        }
        false
    }

    /// Take an older block of the same key out of the index, under the bucket's lock.
    pub(crate) fn supersede(&self, older: BlockRef, unlink: impl Fn(u32)) {
        let header = self.control.slot_unchecked(older.slot());
        let evicting = SlotState::new(older.generation(), self.me.row, State::Evicting);
        if header.state.compare_exchange(sealed_word(older.generation()), evicting.encode(), SeqCst, Relaxed).is_ok() {
            crate::crash_point::pass("replace.claimed");
            unlink(older.slot());
            crate::crash_point::pass("replace.superseded");
            self.doom(older.slot(), evicting);
        }
    }

    /// Free reserved blocks that nobody can still write.
    pub(crate) fn abort(&self, blocks: &[BlockRef]) {
        for block in blocks {
            if self.forget(*block).is_some() {
                self.give_back(block.slot(), self.reserved_state(*block));
            }
        }
    }

    /// Put reserved blocks out of use until this process and its followers are dead, plus the grace period.
    pub(crate) fn quarantine(&self, blocks: &[BlockRef]) {
        for block in blocks {
            if self.forget(*block).is_none() {
                continue;
            }
            let reserved = self.reserved_state(*block);
            let Some(header) = self.control.slot(block.slot()) else { continue };
            let word = reserved.to(State::Quarantined).encode();
            if header.state.compare_exchange(reserved.encode(), word, AcqRel, Relaxed).is_ok() {
                self.stats.slots_quarantined.add(1);
                crate::crash_point::pass("quarantine.given_up");
            }
        }
    }

    /// Record that one part is complete in memory; by any process that copies for the owner.
    pub(crate) fn mark_part_written(&self, block: BlockRef, part: u32, checksum: Option<u64>) -> Result<bool> {
        let header = self
            .control
            .slot(block.slot())
            .ok_or_else(|| Error::invalid(format!("there is no slot {}", block.slot())))?;
        if !is_reserved(header, block) || part >= 64 {
            return Ok(false);
        }
        let bit = 1u64 << part;
        if header.parts_written.load(Acquire) & bit != 0 {
            return Ok(false);
        }
        match checksum {
            Some(checksum) => {
                header.checksum.fetch_add(checksum, Relaxed);
            }
            None => {
                header.tag.fetch_or(FLAG_UNCHECKED, Relaxed);
            }
        }
        crate::crash_point::pass("part.copied");
        header.parts_written.fetch_or(bit, AcqRel);
        crate::crash_point::pass("part.written");
        Ok(true)
    }

    /// Checksum of a sealed block over all its parts, if every part had one.
    pub(crate) fn checksum_of(header: &SlotHeader) -> Option<u64> {
        (header.tag.load(Relaxed) & FLAG_UNCHECKED == 0).then(|| header.checksum.load(Relaxed))
    }
}

/// In a slot's tag: some part was written without a checksum.
pub(crate) const FLAG_UNCHECKED: u32 = 1 << 8;

/// Whether the slot is reserved at this generation, by whomever.
pub(crate) fn is_reserved(header: &SlotHeader, block: BlockRef) -> bool {
    SlotState::decode(header.state.load(Acquire)).is_some_and(|state| {
        state.generation == block.generation() && state.state == State::Reserved && state.owner != NOBODY
    })
}
