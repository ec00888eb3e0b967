//! A pool and KV caches for the tests of the transfer engine.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::copy::{KvLayout, Region};
use crate::key::BlockRef;
use crate::shm::namespace::Namespace;
use crate::slot_space::{Segment, SlotBytes, SlotSpace};
use crate::sync::{AtomicU64, SeqCst};

use super::fake_driver::{FakeDriver, Random};

pub(super) const PART: u32 = 3;
pub(super) const NAMESPACE: Namespace = Namespace(5);

#[derive(Default)]
struct Slots {
    segments: Vec<Segment>,
    /// Address of each slot.
    addresses: Vec<usize>,
    sealed: bool,
    stale: Vec<u32>,
    unreadable: Vec<u32>,
    marks: BTreeMap<u32, usize>,
}

/// Slots of `bytes` bytes, `stride` apart, in segments of `slots_per_segment`.
pub(super) struct FakeSpace {
    bytes: usize,
    slots: Mutex<Slots>,
    version: AtomicU64,
}

pub(super) fn block(slot: u32) -> BlockRef {
    BlockRef::new(slot, 1)
}

impl FakeSpace {
    pub(super) fn new(slots: usize, bytes: usize, stride: usize, slots_per_segment: usize) -> Arc<Self> {
        let mut all = Slots::default();
        for _ in 0..slots.div_ceil(slots_per_segment) {
            let segment_bytes = (slots_per_segment * stride).next_multiple_of(4096);
            let mut memory = vec![0u64; segment_bytes / 8 + 512].into_boxed_slice();
            let address = memory.as_mut_ptr().expose_provenance().next_multiple_of(4096);
            all.addresses.extend((0..slots_per_segment).map(|slot| address + slot * stride));
            all.segments.push(Segment { address, bytes: segment_bytes, mapping: Arc::new(memory) });
        }
        Arc::new(Self { bytes, slots: Mutex::new(all), version: 1.into() })
    }

    pub(super) fn seal(&self) {
        self.slots.lock().unwrap().sealed = true;
    }

    pub(super) fn make_stale(&self, slot: u32) {
        self.slots.lock().unwrap().stale.push(slot);
    }

    pub(super) fn make_unreadable(&self, slot: u32) {
        self.slots.lock().unwrap().unreadable.push(slot);
    }

    pub(super) fn marks(&self) -> BTreeMap<u32, usize> {
        self.slots.lock().unwrap().marks.clone()
    }

    /// Take a segment out of use.
    pub(super) fn retire(&self, index: usize) -> Segment {
        let segment = self.slots.lock().unwrap().segments.remove(index);
        self.version.fetch_add(1, SeqCst);
        segment
    }

    pub(super) fn segment_count(&self) -> usize {
        self.slots.lock().unwrap().segments.len()
    }

    pub(super) fn content(&self, slot: u32) -> Vec<u8> {
        let address = self.slots.lock().unwrap().addresses[slot as usize];
        // SAFETY: inside a segment of this space; tests look when nothing is being copied.
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), self.bytes) }.to_vec()
    }

    fn find(&self, block: BlockRef, sealed: bool) -> Option<SlotBytes> {
        let slots = self.slots.lock().unwrap();
        if slots.sealed != sealed || slots.stale.contains(&block.slot()) || block.generation() != 1 {
            return None;
        }
        let address = std::ptr::with_exposed_provenance_mut(*slots.addresses.get(block.slot() as usize)?);
        Some(SlotBytes { address, bytes: self.bytes, checksum: None })
    }
}

impl SlotSpace for FakeSpace {
    fn write_target(&self, block: BlockRef, part: u32) -> Option<SlotBytes> {
        assert_eq!(part, PART);
        self.find(block, false)
    }

    fn read_source(&self, block: BlockRef, part: u32) -> Option<SlotBytes> {
        assert_eq!(part, PART);
        self.find(block, true)
    }

    fn mark_part(&self, block: BlockRef, _part: u32, checksum: Option<u64>) -> bool {
        assert_eq!(checksum, None);
        let mut slots = self.slots.lock().unwrap();
        let stale = slots.stale.contains(&block.slot());
        if !stale {
            *slots.marks.entry(block.slot()).or_default() += 1;
        }
        !stale
    }

    fn is_readable(&self, block: BlockRef) -> bool {
        !self.slots.lock().unwrap().unreadable.contains(&block.slot())
    }

    fn segments(&self, namespace: Namespace, part: u32) -> Vec<Segment> {
        assert_eq!((namespace, part), (NAMESPACE, PART));
        self.slots.lock().unwrap().segments.clone()
    }

    fn segments_version(&self) -> u64 {
        self.version.load(SeqCst)
    }
}

/// A KV cache in the fake's device memory: one buffer per region.
pub(super) struct Cache {
    buffers: Vec<Vec<u64>>,
    regions: Vec<Region>,
    pub(super) layout: Arc<KvLayout>,
}

impl Cache {
    /// Regions of `(stride, length)` bytes, with random content.
    pub(super) fn new(driver: &FakeDriver, shapes: &[(usize, usize)], blocks: u32, random: &mut Random) -> Self {
        let (mut buffers, mut regions) = (Vec::new(), Vec::new());
        for &(stride_bytes, length_bytes) in shapes {
            let words = (stride_bytes * blocks as usize).div_ceil(8) + 2;
            let mut buffer: Vec<u64> =
                (0..words).map(|_| (random.below(1 << 31) as u64) << 33 ^ random.below(1 << 31) as u64).collect();
            let start = buffer.as_mut_ptr().expose_provenance();
            driver.lock().caches.push((start, words * 8));
            regions.push(Region { address: start.next_multiple_of(16), stride_bytes, length_bytes });
            buffers.push(buffer);
        }
        // SAFETY: each test keeps the cache until its jobs are done and leaves the buffers alone until then.
        let layout = Arc::new(unsafe { KvLayout::new(&regions, u64::from(blocks)) }.unwrap());
        Self { buffers, regions, layout }
    }

    /// Packed bytes of a block.
    pub(super) fn block(&self, id: u32) -> Vec<u8> {
        assert_eq!(self.buffers.len(), self.regions.len());
        let fragment = |region: &Region| {
            let address = region.address + id as usize * region.stride_bytes;
            // SAFETY: inside the region's buffer; tests look when nothing is being copied.
            unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), region.length_bytes) }
                .to_vec()
        };
        self.regions.iter().flat_map(fragment).collect()
    }

    /// All bytes, also those between the blocks.
    pub(super) fn everything(&self) -> Vec<Vec<u64>> {
        self.buffers.clone()
    }
}
