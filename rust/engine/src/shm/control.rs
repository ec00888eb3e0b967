//! The mapped control file: its tables, with every index checked.

use std::fs::File;

use crate::error::Result;
use crate::limits::{NAMESPACES_MAX, PROCESSES_MAX, SLOTS_PER_RANGE, STRIPES};
use crate::shm::geometry::{Geometry, Offsets};
use crate::shm::mapping::{Mapping, Table};
use crate::shm::rows::{ExtentRow, NamespaceRow, PoolHeader, ProcessRow, SlotHeader, Stripe};
use crate::sync::{Acquire, AtomicU32, AtomicU64};

/// Tables of one pool.
pub(crate) struct Control {
    geometry: Geometry,
    offsets: Offsets,
    header: Table<PoolHeader>,
    processes: Table<ProcessRow>,
    namespaces: Table<NamespaceRow>,
    extents: Table<ExtentRow>,
    stripes: Table<Stripe>,
    ranges: Table<AtomicU32>,
    buckets: Table<AtomicU32>,
    free: Table<AtomicU64>,
    stamps: Table<AtomicU64>,
    slots: Table<SlotHeader>,
    /// What the tables lie in; dropped with them.
    #[cfg(not(loom))]
    _map: Mapping,
    #[cfg(loom)]
    _memory: std::sync::Arc<crate::shm::models::memory::Memory>,
}

/// The records of a table of `self`.
macro_rules! records {
    ($self:ident . $table:ident) => {
        // SAFETY: made of the mapping that lives in the same struct and is never replaced.
        unsafe { $self.$table.records() }
    };
}

impl Control {
    /// Map a control file whose superblock has been checked.
    #[cfg(not(loom))]
    pub(crate) fn map(file: &File, geometry: Geometry) -> Result<Self> {
        let offsets = geometry.offsets();
        let map = Mapping::new(file, offsets.end)?;
        let slots = geometry.slots_max as usize;
        Ok(Self {
            geometry,
            offsets,
            header: map.table(0, 1),
            processes: map.table(offsets.processes, PROCESSES_MAX),
            namespaces: map.table(offsets.namespaces, NAMESPACES_MAX),
            extents: map.table(offsets.extents, geometry.segments_max() as usize),
            stripes: map.table(offsets.stripes, STRIPES),
            ranges: map.table(offsets.ranges, slots / SLOTS_PER_RANGE as usize),
            buckets: map.table(offsets.buckets, geometry.buckets()),
            free: map.table(offsets.free, slots / 64),
            stamps: map.table(offsets.stamps, slots),
            slots: map.table(offsets.slots, slots),
            _map: map,
        })
    }

    /// Nothing that a model uses has files.
    #[cfg(loom)]
    pub(crate) fn map(_file: &File, _geometry: Geometry) -> Result<Self> {
        Err(crate::Error::refused("a model's pool has no files"))
    }

    /// Tables in plain memory.
    #[cfg(loom)]
    pub(crate) fn of(memory: std::sync::Arc<crate::shm::models::memory::Memory>) -> Self {
        Self {
            geometry: memory.geometry,
            offsets: memory.geometry.offsets(),
            header: Table::of(&memory.header),
            processes: Table::of(&memory.processes),
            namespaces: Table::of(&memory.namespaces),
            extents: Table::of(&memory.extents),
            stripes: Table::of(&memory.stripes),
            ranges: Table::of(&memory.ranges),
            buckets: Table::of(&memory.buckets),
            free: Table::of(&memory.free),
            stamps: Table::of(&memory.stamps),
            slots: Table::of(&memory.slots),
            _memory: memory,
        }
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    pub(crate) fn offsets(&self) -> &Offsets {
        &self.offsets
    }

    pub(crate) fn header(&self) -> &PoolHeader {
        &records!(self.header)[0]
    }

    pub(crate) fn processes(&self) -> &[ProcessRow] {
        records!(self.processes)
    }

    pub(crate) fn namespaces(&self) -> &[NamespaceRow] {
        records!(self.namespaces)
    }

    pub(crate) fn extents(&self) -> &[ExtentRow] {
        records!(self.extents)
    }

    pub(crate) fn stripes(&self) -> &[Stripe] {
        records!(self.stripes)
    }

    /// Extent (plus one) of each range of slots; 0 where no header memory is claimed.
    pub(crate) fn ranges(&self) -> &[AtomicU32] {
        records!(self.ranges)
    }

    /// Head slot (plus one) of each chain.
    pub(crate) fn buckets(&self) -> &[AtomicU32] {
        records!(self.buckets)
    }

    /// One bit per slot that may be free: a hint.
    pub(crate) fn free_words(&self) -> &[AtomicU64] {
        records!(self.free)
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

    /// Header of a slot whose range is known to be claimed. Panics behind the table.
    pub(crate) fn slot_unchecked(&self, slot: u32) -> &SlotHeader {
        &records!(self.slots)[slot as usize]
    }

    /// Recency of `slot`, 0 if it is not evictable. The slot's range is claimed.
    pub(crate) fn stamp(&self, slot: u32) -> &AtomicU64 {
        &records!(self.stamps)[slot as usize]
    }
}
