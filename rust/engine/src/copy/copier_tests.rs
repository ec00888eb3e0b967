//! The copier against a fake pool: what arrives, what fails, and that every job completes once.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::checksum::part_checksum;
use crate::error::ErrorKind;
use crate::key::BlockRef;
use crate::limits::COPY_JOBS_IN_FLIGHT_MAX;
use crate::slot_space::{SlotBytes, SlotSpace};

use super::{CopyDone, HostCopier, KvLayout, Region};

const PART: u32 = 2;
/// Whatever is waited for comes long before.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, PartialEq, Debug)]
enum State {
    Reserved,
    Sealed,
}

struct FakeSlot {
    bytes: Vec<u8>,
    state: State,
    checksum: Option<u64>,
    marks: u32,
}

/// Slots by number; a ref of another generation than 1 is stale.
#[derive(Default)]
struct FakeSpace {
    slots: Mutex<HashMap<u32, FakeSlot>>,
    /// Slots that vanish between the copy and the last look.
    recycled_while_copied: Vec<u32>,
    /// Slots whose mere mention panics.
    cursed: Vec<u32>,
    /// While closed, every copy waits.
    gate_closed: Mutex<bool>,
    gate: Condvar,
}

fn block(slot: u32) -> BlockRef {
    BlockRef::new(slot, 1)
}

impl FakeSpace {
    fn with_slots(count: u32, bytes: usize, state: State) -> Self {
        let slot = |number: u32| {
            let content = vec![number as u8; bytes];
            (number, FakeSlot { bytes: content, state, checksum: None, marks: 0 })
        };
        Self { slots: Mutex::new((0..count).map(slot).collect()), ..Self::default() }
    }

    fn find(&self, block: BlockRef, state: State) -> Option<SlotBytes> {
        assert!(!self.cursed.contains(&block.slot()), "cursed slot");
        let open = self.gate_closed.lock().unwrap();
        drop(self.gate.wait_while(open, |closed| *closed).unwrap());
        let mut slots = self.slots.lock().unwrap();
        let slot = slots.get_mut(&block.slot()).filter(|slot| slot.state == state && block.generation() == 1)?;
        let address = slot.bytes.as_mut_ptr();
        Some(SlotBytes { address, bytes: slot.bytes.len(), checksum: slot.checksum })
    }

    fn set_gate(&self, closed: bool) {
        *self.gate_closed.lock().unwrap() = closed;
        self.gate.notify_all();
    }

    fn seal_all(&self) {
        self.slots.lock().unwrap().values_mut().for_each(|slot| slot.state = State::Sealed);
    }
}

impl SlotSpace for FakeSpace {
    fn write_target(&self, block: BlockRef, part: u32) -> Option<SlotBytes> {
        assert_eq!(part, PART);
        self.find(block, State::Reserved)
    }

    fn read_source(&self, block: BlockRef, part: u32) -> Option<SlotBytes> {
        assert_eq!(part, PART);
        self.find(block, State::Sealed)
    }

    fn mark_part(&self, block: BlockRef, _part: u32, checksum: Option<u64>) -> bool {
        let mut slots = self.slots.lock().unwrap();
        let Some(slot) = slots.get_mut(&block.slot()).filter(|slot| slot.state == State::Reserved) else {
            return false;
        };
        slot.checksum = checksum;
        slot.marks += 1;
        true
    }

    fn is_readable(&self, block: BlockRef) -> bool {
        !self.recycled_while_copied.contains(&block.slot())
    }
}

/// A repeatable source of odd numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

/// A KV cache: one buffer per region, and the layout that describes them.
struct Cache {
    buffers: Vec<Vec<u8>>,
    regions: Vec<Region>,
    layout: Arc<KvLayout>,
}

impl Cache {
    fn new(shapes: &[(usize, usize)], blocks: u32, random: &mut Random) -> Self {
        let mut buffers = Vec::new();
        let mut regions = Vec::new();
        for &(stride_bytes, length_bytes) in shapes {
            let mut buffer: Vec<u8> = (0..stride_bytes * blocks as usize).map(|_| random.below(256) as u8).collect();
            regions.push(Region { address: buffer.as_mut_ptr().expose_provenance(), stride_bytes, length_bytes });
            buffers.push(buffer);
        }
        // SAFETY: each test keeps the cache until its jobs are done and leaves the buffers alone until then.
        let layout = Arc::new(unsafe { KvLayout::new(&regions, u64::from(blocks)) }.unwrap());
        Self { buffers, regions, layout }
    }

    fn block(&self, id: u32) -> Vec<u8> {
        let fragment = |(buffer, region): (&Vec<u8>, &Region)| {
            let start = id as usize * region.stride_bytes;
            buffer[start..start + region.length_bytes].to_vec()
        };
        self.buffers.iter().zip(&self.regions).flat_map(fragment).collect()
    }
}

fn only(copier: &HostCopier, job: u64) -> CopyDone {
    let mut all = copier.wait(PATIENCE).unwrap();
    assert_eq!(all.iter().map(|done| done.job).collect::<Vec<_>>(), [job]);
    all.remove(0)
}

fn small_cache(blocks: u32) -> Cache {
    Cache::new(&[(512, 512)], blocks, &mut Random(1))
}

fn copier(space: &Arc<FakeSpace>, threads: usize) -> HostCopier {
    HostCopier::new(Arc::clone(space) as Arc<dyn SlotSpace>, threads, true).unwrap()
}

#[test]
fn blocks_come_back_equal_over_random_layouts() {
    let mut random = Random(7);
    for round in 0..40 {
        let blocks = 1 + random.below(20) as u32;
        let shapes: Vec<_> = (0..1 + random.below(6))
            .map(|_| {
                let length_bytes = 1 + random.below(5000);
                (length_bytes + random.below(300), length_bytes)
            })
            .collect();
        let source = Cache::new(&shapes, blocks, &mut random);
        let target = Cache::new(&shapes, blocks, &mut random);
        let mut ids: Vec<u32> = (0..blocks).collect();
        (0..ids.len()).for_each(|index| ids.swap(index, random.below(blocks as usize)));
        let refs: Vec<_> = ids.iter().map(|&id| block(blocks - 1 - id)).collect();
        let space = Arc::new(FakeSpace::with_slots(blocks, source.layout.block_bytes(), State::Reserved));
        let copier = HostCopier::new(Arc::clone(&space) as _, 1 + round % 3, round % 4 != 0).unwrap();
        let saved = only(&copier, copier.save(PART, &source.layout, refs.clone(), ids.clone()).unwrap());
        assert!(saved.ok());
        assert_eq!(saved.bytes, u64::from(blocks) * source.layout.block_bytes() as u64);
        space.seal_all();
        let loaded = only(&copier, copier.load(PART, &target.layout, refs, ids).unwrap());
        assert!(loaded.ok());
        for id in 0..blocks {
            assert_eq!(target.block(id), source.block(id), "round {round}, block {id}");
            let slots = space.slots.lock().unwrap();
            let slot = &slots[&(blocks - 1 - id)];
            assert_eq!((&slot.bytes, slot.marks), (&source.block(id), 1));
            let expected = (round % 4 != 0).then(|| part_checksum(PART, &slot.bytes));
            assert_eq!(slot.checksum, expected);
        }
    }
}

#[test]
fn large_jobs_come_back_equal() {
    let mut random = Random(3);
    let shapes = [(65_536, 65_536), (70_000, 60_032)];
    let source = Cache::new(&shapes, 64, &mut random);
    let target = Cache::new(&shapes, 64, &mut random);
    let space = Arc::new(FakeSpace::with_slots(64, source.layout.block_bytes(), State::Reserved));
    let copier = copier(&space, 4);
    let refs: Vec<_> = (0..64).map(block).collect();
    assert!(only(&copier, copier.save(PART, &source.layout, refs.clone(), (0..64).collect()).unwrap()).ok());
    space.seal_all();
    assert!(only(&copier, copier.load(PART, &target.layout, refs, (0..64).rev().collect()).unwrap()).ok());
    (0..64).for_each(|id| assert!(target.block(63 - id) == source.block(id), "block {id}"));
}

#[test]
fn a_stale_ref_fails_only_its_index() {
    let cache = small_cache(8);
    let mut space = FakeSpace::with_slots(8, 512, State::Sealed);
    space.recycled_while_copied = vec![5];
    let space = Arc::new(space);
    let copier = copier(&space, 2);
    let mut refs: Vec<_> = (0..8).map(block).collect();
    refs[3] = BlockRef::new(3, 2);
    let done = only(&copier, copier.load(PART, &cache.layout, refs, (0..8).collect()).unwrap());
    assert_eq!((done.failed, done.bytes), (vec![3, 5], 6 * 512));
    for id in [0u32, 1, 2, 4, 6, 7] {
        assert_eq!(cache.block(id), vec![id as u8; 512]);
    }
}

#[test]
fn a_slot_of_another_length_or_state_is_neither_copied_nor_marked() {
    let cache = small_cache(3);
    let space = Arc::new(FakeSpace::with_slots(3, 512, State::Reserved));
    space.slots.lock().unwrap().get_mut(&0).unwrap().bytes.pop();
    space.slots.lock().unwrap().get_mut(&1).unwrap().state = State::Sealed;
    let copier = copier(&space, 1);
    let done = only(&copier, copier.save(PART, &cache.layout, (0..3).map(block).collect(), vec![0, 1, 2]).unwrap());
    assert_eq!(done.failed, [0, 1]);
    let slots = space.slots.lock().unwrap();
    assert_eq!([slots[&0].marks, slots[&1].marks, slots[&2].marks], [0, 0, 1]);
    assert_eq!(slots[&1].bytes, vec![1; 512]);
}

#[test]
fn a_wrong_byte_is_found_by_its_checksum() {
    let cache = small_cache(4);
    let space = Arc::new(FakeSpace::with_slots(4, 512, State::Sealed));
    for slot in space.slots.lock().unwrap().values_mut() {
        slot.checksum = Some(part_checksum(PART, &slot.bytes));
    }
    space.slots.lock().unwrap().get_mut(&2).unwrap().bytes[511] ^= 1;
    let refs: Vec<_> = (0..4).map(block).collect();
    let checking = copier(&space, 2);
    let done = only(&checking, checking.load(PART, &cache.layout, refs.clone(), vec![0, 1, 2, 3]).unwrap());
    assert_eq!(done.failed, [2]);
    let trusting = HostCopier::new(Arc::clone(&space) as _, 2, false).unwrap();
    assert!(only(&trusting, trusting.load(PART, &cache.layout, refs, vec![0, 1, 2, 3]).unwrap()).ok());
}

#[test]
fn a_job_without_blocks_completes() {
    let cache = small_cache(1);
    let copier = copier(&Arc::new(FakeSpace::default()), 1);
    let job = copier.load(PART, &cache.layout, vec![], vec![]).unwrap();
    let done = only(&copier, job);
    assert!(done.ok());
    assert_eq!(done.bytes, 0);
}

#[test]
fn many_jobs_on_many_threads_complete_once_each() {
    let cache = small_cache(64);
    let space = Arc::new(FakeSpace::with_slots(64, 512, State::Reserved));
    let copier = copier(&space, 4);
    let mut expected: Vec<u64> = std::thread::scope(|scope| {
        let start = |first: u32| {
            let (copier, layout) = (&copier, &cache.layout);
            move || {
                let one = |id| copier.save(PART, layout, vec![block(id)], vec![id]).unwrap();
                (0..160).map(|turn| one(first + turn % 16)).collect::<Vec<_>>()
            }
        };
        let threads: Vec<_> = (0..4).map(|number| scope.spawn(start(number * 16))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let mut seen = Vec::new();
    while seen.len() < expected.len() {
        let done = copier.wait(PATIENCE).unwrap();
        assert!(!done.is_empty(), "a job was lost");
        assert!(done.iter().all(CopyDone::ok));
        seen.extend(done.iter().map(|done| done.job));
    }
    seen.sort_unstable();
    expected.sort_unstable();
    assert_eq!(seen, expected);
    assert_eq!(copier.in_flight().unwrap(), 0);
    assert!(copier.wait(PATIENCE).unwrap().is_empty(), "nothing in flight: no reason to wait");
}

#[test]
fn a_panic_fails_its_batch_and_not_the_copier() {
    let cache = small_cache(4);
    let mut space = FakeSpace::with_slots(4, 512, State::Reserved);
    space.cursed = vec![1];
    let copier = copier(&Arc::new(space), 4);
    let refs: Vec<_> = (0..4).map(block).collect();
    let done = only(&copier, copier.save(PART, &cache.layout, refs, vec![0, 1, 2, 3]).unwrap());
    assert_eq!(done.failed, [1]);
    assert!(only(&copier, copier.save(PART, &cache.layout, vec![block(3)], vec![3]).unwrap()).ok());
}

#[test]
fn a_full_queue_says_busy_and_recovers() {
    let cache = small_cache(1);
    let space = Arc::new(FakeSpace::with_slots(1, 512, State::Reserved));
    let copier = copier(&space, 1);
    space.set_gate(true);
    let save = || copier.save(PART, &cache.layout, vec![block(0)], vec![0]);
    for _ in 0..COPY_JOBS_IN_FLIGHT_MAX {
        save().unwrap();
    }
    assert_eq!(save().unwrap_err().kind(), ErrorKind::Busy);
    assert!(copier.wait(Duration::from_millis(1)).unwrap().is_empty());
    space.set_gate(false);
    assert!(!copier.wait(PATIENCE).unwrap().is_empty());
    save().unwrap();
}

#[test]
fn closing_finishes_what_is_queued_and_refuses_the_rest() {
    let cache = small_cache(16);
    let space = Arc::new(FakeSpace::with_slots(16, 512, State::Reserved));
    let copier = copier(&space, 2);
    space.set_gate(true);
    for id in 0..16 {
        copier.save(PART, &cache.layout, vec![block(id)], vec![id]).unwrap();
    }
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| copier.close());
        space.set_gate(false);
        closing.join().unwrap().unwrap();
    });
    assert_eq!(copier.poll().unwrap().len(), 16);
    let refused = copier.save(PART, &cache.layout, vec![], vec![]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Closed);
    copier.close().unwrap();
}

#[test]
fn lists_that_do_not_match_the_layout_are_refused() {
    let cache = small_cache(2);
    let copier = copier(&Arc::new(FakeSpace::default()), 1);
    let lengths = copier.save(PART, &cache.layout, vec![block(0)], vec![]).unwrap_err();
    let range = copier.save(PART, &cache.layout, vec![block(0)], vec![2]).unwrap_err();
    assert_eq!([lengths.kind(), range.kind()], [ErrorKind::InvalidArgument; 2]);
    assert_eq!(copier.in_flight().unwrap(), 0);
}
