//! The tables of a pool in plain memory, for words that cannot lie in a mapping.

use crate::shm::geometry::Geometry;
use crate::shm::rows::{ExtentRow, NamespaceRow, PoolHeader, ProcessRow, SlotHeader, Stripe};
use crate::sync::{AtomicU32, AtomicU64, LocalU64};

/// A control file.
pub(crate) struct Memory {
    pub(crate) geometry: Geometry,
    pub(crate) header: Vec<PoolHeader>,
    pub(crate) processes: Vec<ProcessRow>,
    pub(crate) namespaces: Vec<NamespaceRow>,
    pub(crate) extents: Vec<ExtentRow>,
    pub(crate) stripes: Vec<Stripe>,
    pub(crate) ranges: Vec<AtomicU32>,
    pub(crate) buckets: Vec<AtomicU32>,
    pub(crate) free: Vec<AtomicU64>,
    pub(crate) stamps: Vec<AtomicU64>,
    pub(crate) slots: Vec<SlotHeader>,
}

/// What new shared memory consists of.
trait Zeroed: Sized {
    fn zeroed() -> Self;

    fn table(count: usize) -> Vec<Self> {
        std::iter::repeat_with(Self::zeroed).take(count).collect()
    }
}

macro_rules! zeroed {
    ($($word:ident)*) => { $(impl Zeroed for $word {
        fn zeroed() -> Self {
            Self::new(0)
        }
    })* };
    ($($row:ident { $($field:ident),* })*) => { $(impl Zeroed for $row {
        fn zeroed() -> Self {
            Self { $($field: Zeroed::zeroed()),* }
        }
    })* };
}

impl<T: Zeroed, const N: usize> Zeroed for [T; N] {
    fn zeroed() -> Self {
        std::array::from_fn(|_| T::zeroed())
    }
}

zeroed!(AtomicU32 AtomicU64 LocalU64);
zeroed! {
    PoolHeader {
        fixed, clock, last_used_unix_s, structure_lock, extents_version, quarantine_pending, rebuild_wanted, rebuilds,
        orphans_expected, segments_dir, spare
    }
    ProcessRow { state, leader, pid, started_unix_s, flags, namespaces, weight_milli, spare, label }
    NamespaceRow {
        state, epoch, fingerprint, group, parts, frees, horizon, epoch_row, moves, begun, spare, label, part_bytes
    }
    ExtentRow { state, namespace, parts, first_slot, slots, bytes, spare, segments }
    Stripe { lock, version, spare }
    SlotHeader {
        state, leases, next, tag, key, fingerprint, parts_written, checksum, parent, used_bytes, member_next
    }
}

impl Memory {
    pub(crate) fn new(geometry: Geometry) -> Self {
        let slots = geometry.slots_max as usize;
        Self {
            geometry,
            header: Zeroed::table(1),
            processes: Zeroed::table(crate::limits::PROCESSES_MAX),
            namespaces: Zeroed::table(crate::limits::NAMESPACES_MAX),
            extents: Zeroed::table(geometry.segments_max() as usize),
            stripes: Zeroed::table(crate::limits::STRIPES),
            ranges: Zeroed::table(slots.div_ceil(crate::limits::SLOTS_PER_RANGE as usize)),
            buckets: Zeroed::table(geometry.buckets()),
            free: Zeroed::table(slots.div_ceil(64)),
            stamps: Zeroed::table(slots),
            slots: Zeroed::table(slots),
        }
    }
}
