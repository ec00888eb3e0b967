//! The seam between the pool and whoever moves bytes: where a slot's bytes are, and how to say that they are there.

use std::any::Any;
use std::sync::Arc;

use crate::key::BlockRef;
use crate::shm::namespace::Namespace;

/// The bytes of one part of one slot in this process's address space.
#[derive(Clone, Copy, Debug)]
pub struct SlotBytes {
    /// First byte.
    pub address: *mut u8,
    /// Length of the part.
    pub bytes: usize,
    /// Stored checksum of the part, when reading and if there is one.
    pub checksum: Option<u64>,
}

/// A mapped file of slots. It stays mapped for as long as this value, or a clone of it, lives.
#[derive(Clone)]
pub struct Segment {
    /// First byte; no two living segments have the same.
    pub address: usize,
    /// Length.
    pub bytes: usize,
    /// Whatever keeps it mapped.
    pub mapping: Arc<dyn Any + Send + Sync>,
}

/// Slots as a copy engine sees them. `Pool` implements it; tests use a fake.
pub trait SlotSpace: Send + Sync {
    /// Where to write `part` of a block: `Some` only while the slot is reserved at this generation.
    fn write_target(&self, block: BlockRef, part: u32) -> Option<SlotBytes>;

    /// Where to read `part` of a block: `Some` only while the slot is sealed (or superseded, but still leased) at this
    /// generation. The caller or its leader holds a lease, so the bytes do not change while it copies.
    fn read_source(&self, block: BlockRef, part: u32) -> Option<SlotBytes>;

    /// Record that `part` is complete in memory. `false` if the block is no longer reserved at this generation.
    fn mark_part(&self, block: BlockRef, part: u32, checksum: Option<u64>) -> bool;

    /// Whether `read_source` would still give the same bytes.
    fn is_readable(&self, block: BlockRef) -> bool;

    /// All segments in use for `part` of a namespace's blocks, mapped. A segment in which a slot is reserved or leased
    /// is among them. None where slots do not lie in segments.
    fn segments(&self, namespace: Namespace, part: u32) -> Vec<Segment> {
        let _unused = (namespace, part);
        Vec::new()
    }

    /// Changes whenever `segments` may answer something else.
    fn segments_version(&self) -> u64 {
        0
    }
}
