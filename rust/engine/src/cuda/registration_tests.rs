//! Page-locking over a fake driver: in which order, by whom, and what is undone.

use std::sync::Arc;

use super::CudaOptions;
use super::copier_tests::{copier, only, small_options, until};
use super::driver::Driver;
use super::fake_driver::{FOREIGN_STREAM, FakeDriver, Random};
use super::fake_space::{Cache, FakeSpace, NAMESPACE, PART, block};
use super::locked_segment::{Chunk, LockedSegment};
use super::touch::touch_meanwhile;
use crate::slot_space::SlotSpace;

const CHUNK_BYTES: usize = 1 << 20;
const CHUNKS: usize = 24;

/// A segment of chunks that hold a slot each, and the address of its first byte.
fn one_slot_per_chunk() -> (Arc<FakeSpace>, usize) {
    let space = FakeSpace::new(CHUNKS, CHUNK_BYTES, CHUNK_BYTES, CHUNKS);
    let start = space.segments(NAMESPACE, PART)[0].address;
    (space, start)
}

fn order(driver: &FakeDriver, start: usize) -> Vec<usize> {
    driver.lock().registrations.iter().map(|address| (address - start) / CHUNK_BYTES).collect()
}

#[test]
fn chunks_that_a_job_needs_are_locked_before_all_others_and_its_last_ones_first() {
    let (mut random, driver) = (Random(1), Arc::new(FakeDriver::new(1)));
    let (space, start) = one_slot_per_chunk();
    let cache = Cache::new(&driver, &[(CHUNK_BYTES, CHUNK_BYTES)], 3, &mut random);
    let copier = copier(&driver, &space, small_options());
    driver.lock().registering_held = true;
    copier.register(NAMESPACE, PART).unwrap();
    until("the first chunk is being locked", || driver.calls().contains_key("register_host"));
    space.seal();
    for slots in [[9, 10, 11], [20, 21, 10]] {
        let refs = slots.map(block).to_vec();
        let job = copier.load(PART, &cache.layout, refs, vec![0, 1, 2], None).unwrap();
        assert!(only(&copier, job).ok(), "a job does not wait for page-locking");
    }
    driver.lock().registering_held = false;
    until("everything is locked", || driver.lock().registered.len() == CHUNKS);
    let expected: Vec<usize> = [0, 10, 21, 20, 11, 9].into_iter().chain(1..9).chain(12..20).chain(22..CHUNKS).collect();
    assert_eq!(order(&driver, start), expected);
}

#[test]
fn chunks_that_a_save_will_write_are_locked_first_too() {
    let (mut random, driver) = (Random(2), Arc::new(FakeDriver::new(2)));
    let (space, start) = one_slot_per_chunk();
    let cache = Cache::new(&driver, &[(CHUNK_BYTES, CHUNK_BYTES)], 1, &mut random);
    let copier = copier(&driver, &space, small_options());
    driver.lock().registering_held = true;
    copier.register(NAMESPACE, PART).unwrap();
    until("the first chunk is being locked", || driver.calls().contains_key("register_host"));
    let job = copier.save(PART, &cache.layout, vec![block(17)], vec![0], None).unwrap();
    assert!(only(&copier, job).ok());
    driver.lock().registering_held = false;
    until("everything is locked", || driver.lock().registered.len() == CHUNKS);
    assert_eq!(order(&driver, start)[..3], [0, 17, 1]);
}

#[test]
fn copies_use_what_is_locked_and_buffers_for_the_rest_whatever_the_order() {
    let (mut random, driver) = (Random(3), Arc::new(FakeDriver::new(3)));
    // Slots that lie across the borders of chunks.
    let bytes = 3 * CHUNK_BYTES / 2;
    let space = FakeSpace::new(16, bytes, bytes, 16);
    let cache = Cache::new(&driver, &[(bytes, bytes)], 2, &mut random);
    let copier = copier(&driver, &space, small_options());
    copier.register(NAMESPACE, PART).unwrap();
    driver.lock().lockable_bytes = Some(5 * CHUNK_BYTES);
    for slot in [14, 6, 1, 10] {
        let job = copier.save(PART, &cache.layout, vec![block(slot), block(slot + 1)], vec![0, 1], None).unwrap();
        assert!(only(&copier, job).ok());
        for id in [0, 1] {
            assert!(space.content(slot + id) == cache.block(id), "slot {}", slot + id);
        }
    }
}

#[test]
fn a_part_that_is_not_wanted_any_more_is_unlocked() {
    let driver = Arc::new(FakeDriver::new(4));
    let (space, _) = one_slot_per_chunk();
    let copier = copier(&driver, &space, small_options());
    copier.register(NAMESPACE, PART).unwrap();
    until("everything is locked", || driver.lock().registered.len() == CHUNKS);
    copier.unregister(NAMESPACE, PART).unwrap();
    until("nothing is locked", || driver.lock().registered.is_empty());
    assert_eq!(copier.registration().bytes_seen, 0);
    assert_eq!(copier.registration().bytes_total, (CHUNKS * CHUNK_BYTES) as u64);
}

#[test]
fn a_part_that_is_wanted_again_while_a_copy_keeps_it_locked_is_not_locked_twice() {
    let (mut random, driver) = (Random(7), Arc::new(FakeDriver::new(7)));
    let (space, _) = one_slot_per_chunk();
    let cache = Cache::new(&driver, &[(CHUNK_BYTES, CHUNK_BYTES)], 1, &mut random);
    let options = CudaOptions { ring_buffer_bytes: CHUNK_BYTES, ..small_options() };
    let copier = copier(&driver, &space, options);
    let whole = || driver.lock().registered.len() == CHUNKS;
    copier.register(NAMESPACE, PART).unwrap();
    until("everything is locked", whole);
    driver.lock().held.insert(FOREIGN_STREAM as usize);
    let job = copier.save(PART, &cache.layout, vec![block(3)], vec![0], Some(FOREIGN_STREAM)).unwrap();
    until("the copy is queued", || driver.calls().contains_key("copy"));
    for _ in 0..3 {
        copier.unregister(NAMESPACE, PART).unwrap();
        until("the thread has let go", || copier.registration().bytes_seen == 0);
        copier.register(NAMESPACE, PART).unwrap();
        until("the thread has it again", || copier.registration().bytes_seen > 0);
    }
    assert!(whole(), "a copy was using it");
    driver.lock().held.clear();
    assert!(only(&copier, job).ok());
    assert_eq!(copier.registration().problem, None);
    copier.unregister(NAMESPACE, PART).unwrap();
    until("nothing is locked", || driver.lock().registered.is_empty());
    drop(copier);
    driver.assert_nothing_is_left();
}

#[test]
fn buffers_are_there_before_the_first_job() {
    let driver = Arc::new(FakeDriver::new(5));
    let (space, _) = one_slot_per_chunk();
    let copier = copier(&driver, &space, small_options());
    let all = small_options().ring_bytes() as u64;
    until("all buffers are there", || copier.stats().contains(&("bounce_bytes", all)));
}

#[test]
fn helpers_map_memory_ahead_and_nothing_is_locked_twice() {
    let driver = Arc::new(FakeDriver::new(6));
    let (space, _) = one_slot_per_chunk();
    let shared: Arc<dyn Driver> = Arc::clone(&driver) as _;
    let segment = Arc::new(LockedSegment::new(shared, space.segments(NAMESPACE, PART).remove(0), CHUNK_BYTES));
    let chunks: Vec<Chunk> = (0..CHUNKS).map(|index| Chunk { segment: Arc::clone(&segment), index }).collect();
    touch_meanwhile(&chunks, 3, || {
        until("helpers come to the end", || segment.is_touched(CHUNKS - 1));
        assert_eq!(segment.unlocked().count(), CHUNKS);
        for round in 0..2 {
            chunks.iter().for_each(|chunk| {
                let busy = segment.lock_chunk(chunk.index).unwrap();
                assert!(round == 0 || busy.is_zero());
            });
        }
    });
    assert_eq!((segment.unlocked().count(), segment.locked_bytes()), (0, CHUNKS * CHUNK_BYTES));
    drop((chunks, segment));
    driver.assert_nothing_is_left();
}
