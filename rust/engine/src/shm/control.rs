//! The mapped control file: its tables, with every index checked.

use std::fs::File;

use crate::error::Result;
use crate::limits::{NAMESPACES_MAX, PROCESSES_MAX, SLOTS_PER_RANGE, STRIPES};
use crate::shm::geometry::{Geometry, Offsets};
use crate::shm::mapping::Mapping;
use crate::shm::rows::{ExtentRow, NamespaceRow, PoolHeader, ProcessRow, SlotHeader, Stripe};
use crate::sync::{Acquire, AtomicU32, AtomicU64};

/// Tables of one pool.
pub(crate) struct Control {
    map: Mapping,
    geometry: Geometry,
    offsets: Offsets,
}

impl Control {
    /// Map a control file whose superblock has been checked.
    pub(crate) fn map(file: &File, geometry: Geometry) -> Result<Self> {
        let offsets = geometry.offsets();
        Ok(Self { map: Mapping::new(file, offsets.end)?, geometry, offsets })
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    pub(crate) fn offsets(&self) -> &Offsets {
        &self.offsets
    }

    pub(crate) fn header(&self) -> &PoolHeader {
        &self.map.records(0, 1)[0]
    }

    pub(crate) fn processes(&self) -> &[ProcessRow] {
        self.map.records(self.offsets.processes, PROCESSES_MAX)
    }

    pub(crate) fn namespaces(&self) -> &[NamespaceRow] {
        self.map.records(self.offsets.namespaces, NAMESPACES_MAX)
    }

    pub(crate) fn extents(&self) -> &[ExtentRow] {
        self.map.records(self.offsets.extents, self.geometry.segments_max() as usize)
    }

    pub(crate) fn stripes(&self) -> &[Stripe] {
        self.map.records(self.offsets.stripes, STRIPES)
    }

    /// Extent (plus one) of each range of slots; 0 where no header memory is claimed.
    pub(crate) fn ranges(&self) -> &[AtomicU32] {
        self.map.records(self.offsets.ranges, (self.geometry.slots_max / SLOTS_PER_RANGE) as usize)
    }

    /// Head slot (plus one) of each chain.
    pub(crate) fn buckets(&self) -> &[AtomicU32] {
        self.map.records(self.offsets.buckets, self.geometry.buckets())
    }

    /// One bit per slot that may be free: a hint.
    pub(crate) fn free_words(&self) -> &[AtomicU64] {
        self.map.records(self.offsets.free, self.geometry.slots_max as usize / 64)
    }

    /// Extent of a slot, if its headers are in use.
    pub(crate) fn extent_of(&self, slot: u32) -> Option<u32> {
        self.ranges().get(slot as usize / SLOTS_PER_RANGE as usize)?.load(Acquire).checked_sub(1)
    }

    /// Header of `slot`; `None` for a number that no extent has.
    pub(crate) fn slot(&self, slot: u32) -> Option<&SlotHeader> {
        self.extent_of(slot)?;
        Some(self.slot_unchecked(slot))
    }

    /// Header of a slot whose range is known to be claimed. Still inside the mapping for any number.
    pub(crate) fn slot_unchecked(&self, slot: u32) -> &SlotHeader {
        &self.map.records::<SlotHeader>(self.offsets.slots, self.geometry.slots_max as usize)[slot as usize]
    }

    /// Recency of `slot`, 0 if it is not evictable. The slot's range is claimed.
    pub(crate) fn stamp(&self, slot: u32) -> &AtomicU64 {
        &self.map.records::<AtomicU64>(self.offsets.stamps, self.geometry.slots_max as usize)[slot as usize]
    }
}
