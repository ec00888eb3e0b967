//! Blocks for peers on other hosts: found without using their namespace, held without being refreshed, and where their
//! bytes lie.

use std::any::Any;
use std::sync::Arc;

use crate::error::Result;
use crate::key::{BlockRef, Key};
use crate::limits::PARTS_MAX;
use crate::shm::core::Core;
use crate::shm::extent::ExtentState;
use crate::shm::mapping::Mapping;
use crate::shm::namespace::Namespace;
use crate::shm::pool::Pool;
use crate::shm::superblock::POOL_ID_WORD;
use crate::sync::{Acquire, Relaxed};

/// Where one part of a lent block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LentPlace {
    /// Number of the segment in this process; no other segment ever has it here.
    pub segment: u32,
    /// Offset in the segment.
    pub offset: u64,
    /// Length of the part.
    pub bytes: u64,
}

/// A segment of the pool, mapped in this process for as long as the value or a clone of its mapping lives.
#[derive(Clone)]
pub struct DataSegment {
    /// As in [`LentPlace`].
    pub segment: u32,
    /// Whose blocks are in it.
    pub namespace: Namespace,
    /// Of these, which part.
    pub part: u32,
    /// First byte.
    pub address: usize,
    /// Length.
    pub bytes: usize,
    /// Keeps it mapped.
    pub mapping: Arc<dyn Any + Send + Sync>,
}

/// A leased block whose bytes others may read until the value is dropped. Nobody's use of the pool is noted.
pub struct Lent {
    core: Arc<Core>,
    block: BlockRef,
    parts: Vec<(LentPlace, Arc<Mapping>)>,
}

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lent").field("block", &self.block).finish_non_exhaustive()
    }
}

impl Lent {
    /// Which block.
    pub fn block(&self) -> BlockRef {
        self.block
    }

    /// Where its parts are.
    pub fn places(&self) -> impl Iterator<Item = LentPlace> {
        self.parts.iter().map(|(place, _)| *place)
    }

    /// Bytes of all parts.
    pub fn bytes_all(&self) -> u64 {
        self.places().map(|place| place.bytes).sum()
    }

    /// Sum of the xxh3-64 of its parts (seed: the part), if each part had one when it was written.
    pub fn checksum(&self) -> Option<u64> {
        self.core.control.slot(self.block.slot()).and_then(Core::checksum_of)
    }

    /// Whether this process still leases it: not if it was taken for dead.
    pub fn is_held(&self) -> bool {
        self.core.is_member()
    }

    /// Bytes of one part; `None` if there is no such part or the block is not held any more.
    pub fn bytes(&self, part: u32) -> Option<&[u8]> {
        let (place, mapping) = self.parts.get(part as usize).filter(|_| self.is_held())?;
        mapping.sealed_bytes(place.offset as usize, place.bytes as usize)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // Who was taken for dead, or is a fork, has nothing to give back.
        if self.core.is_member() {
            let _held = self.core.unpin(self.block);
        }
    }
}

impl Core {
    /// What there is to tell about a block that this process has pinned just now; given back if that cannot be told.
    fn lend(self: &Arc<Self>, block: BlockRef, parts: usize) -> Option<Lent> {
        let mut lent = Lent { core: Arc::clone(self), block, parts: Vec::with_capacity(parts) };
        for part in 0..parts as u32 {
            let (extent, offset, bytes) = self.place_of(block, part)?;
            let mapping = self.segment_of(&extent, part)?;
            mapping.address(offset as usize, bytes as usize)?;
            lent.parts.push((LentPlace { segment: mapping.number(), offset, bytes }, mapping));
        }
        // Values of an object store are of one process's making and have other checksums.
        (self.control.slot(block.slot())?.used_bytes.load(Relaxed) == 0).then_some(lent)
    }
}

impl Pool {
    /// Random number of the pool: another one has another.
    pub fn pool_id(&self) -> u64 {
        self.core().control.header().fixed[POOL_ID_WORD].load(Relaxed)
    }

    /// The namespace of a fingerprint and group whose parts have these sizes, if there is one; this process does not
    /// count as its user for that.
    pub fn find_namespace(&self, fingerprint: &[u8; 32], group: u32, part_bytes: &[u64]) -> Result<Option<Namespace>> {
        self.core().check_usable()?;
        Ok(self.core().known_namespace(fingerprint, group, part_bytes))
    }

    /// Fingerprint and group of a namespace, as given when it was made.
    pub fn namespace_name(&self, ns: Namespace) -> Result<([u8; 32], u32)> {
        self.core().check_usable()?;
        self.core().name_of_namespace(ns)
    }

    /// Lease blocks for others, without noting any use: per key, in order, those that are present. `chained`: up to the
    /// first that is not. At most `bytes_max` bytes.
    pub fn lend(&self, ns: Namespace, keys: &[Key], chained: bool, bytes_max: u64) -> Result<Vec<(usize, Lent)>> {
        self.core().check_usable()?;
        let core = self.shared_core();
        let (identity, info) = (core.identity(ns)?, core.namespace_info(ns)?);
        let block_bytes: u64 = info.part_bytes.iter().sum();
        let count_max = usize::try_from(bytes_max / block_bytes.max(1)).unwrap_or(usize::MAX);
        let mut lent = Vec::new();
        let mut position = 0;
        core.find_many(&identity, keys, |found| {
            if lent.len() >= count_max {
                return false;
            }
            let pinned = found.and_then(|block| core.pin_found(&identity, &keys[position], block));
            let block = pinned.and_then(|block| core.lend(block, info.parts as usize));
            let goes_on = block.is_some() || !chained;
            lent.extend(block.map(|block| (position, block)));
            position += 1;
            goes_on
        });
        Ok(lent)
    }

    /// All segments in use, mapped.
    pub fn data_segments(&self) -> Result<Vec<DataSegment>> {
        self.core().check_usable()?;
        let core = self.core();
        let in_use = |state| matches!(state, ExtentState::Ready | ExtentState::Retiring);
        let mut segments = Vec::new();
        for extent in core.all_extents().into_iter().filter(|extent| in_use(extent.state)) {
            for part in 0..extent.segments.len().min(PARTS_MAX) as u32 {
                let Some(mapping) = core.segment_of(&extent, part) else { continue };
                let Some(address) = mapping.address(0, mapping.len()) else { continue };
                segments.push(DataSegment {
                    segment: mapping.number(),
                    namespace: Namespace(extent.namespace),
                    part,
                    address: address.expose_provenance(),
                    bytes: mapping.len(),
                    mapping,
                });
            }
        }
        Ok(segments)
    }

    /// Changes whenever [`Self::data_segments`] may answer something else.
    pub fn data_segments_version(&self) -> u64 {
        self.core().control.header().extents_version.load(Acquire)
    }
}
