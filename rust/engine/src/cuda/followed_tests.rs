//! Loads in stages over the fake driver: what a stream sees that follows them, and what nobody may follow.

use std::sync::Arc;
use std::time::Duration;

use crate::copy::CopyDone;

use super::copier_tests::{copier, only, refs, register_all, shapes, shuffled, small_options, until};
use super::driver::{CopyOp, Driver, Stream, Way};
use super::fake_driver::{FOREIGN_STREAM, FakeDriver, Random};
use super::fake_space::{Cache, FakeSpace, PART};
use super::{Backend, CudaCopier, CudaOptions};

/// Wait until all of a load is handed to the device. Returns its outcome if it is over by then.
fn queued(copier: &CudaCopier, job: u64) -> Option<CopyDone> {
    let (mut told, mut done) = (Vec::new(), Vec::new());
    until("all is handed to the device", || {
        told.extend(copier.take_queued().unwrap());
        done.extend(copier.poll().unwrap());
        !told.is_empty() || !done.is_empty()
    });
    assert!(copier.take_queued().unwrap().is_empty(), "told twice");
    assert!(told.iter().all(|told| *told == job));
    done.pop()
}

/// Ascending ends of up to four stages.
fn some_stages(random: &mut Random, block_bytes: usize) -> Vec<usize> {
    let mut ends: Vec<usize> = (0..random.below(4)).map(|_| 1 + random.below(block_bytes)).collect();
    ends.push(block_bytes);
    ends.sort_unstable();
    ends.dedup();
    ends
}

/// Queue, on the foreign stream, copies of the bytes `from..to` of all blocks as they are then.
fn peek(driver: &FakeDriver, cache: &Cache, blocks: u32, from: usize, to: usize) -> Vec<(CopyOp, usize, u32)> {
    let mut peeked = Vec::new();
    let mut offset = 0;
    for region in cache.layout.regions() {
        let (begin, end) = (offset.max(from), (offset + region.length_bytes).min(to));
        for id in (0..blocks).filter(|_| begin < end) {
            let device = (region.address + id as usize * region.stride_bytes + begin - offset) as u64;
            let host = driver.allocate_host(end - begin).unwrap();
            let copy = CopyOp { host, device, bytes: end - begin };
            driver.copy(Way::ToHost, &[copy], Stream(FOREIGN_STREAM as usize)).unwrap();
            peeked.push((copy, begin, id));
        }
        offset += region.length_bytes;
    }
    peeked
}

fn run_all(driver: &FakeDriver) {
    let event = driver.create_event().unwrap();
    driver.record(event, Stream(FOREIGN_STREAM as usize)).unwrap();
    until("the foreign stream is done", || driver.query(event).unwrap());
    driver.destroy_event(event);
}

#[test]
fn a_stream_behind_a_stage_sees_its_bytes() {
    for round in 0..120u64 {
        let mut random = Random(round + 1000);
        let driver = Arc::new(FakeDriver::new(round));
        let shapes = shapes(&mut random, [1, 4, 8, 16][round as usize % 4]);
        let blocks = 1 + random.below(12) as u32;
        let source = Cache::new(&driver, &shapes, blocks, &mut random);
        let target = Cache::new(&driver, &shapes, blocks, &mut random);
        let bytes = source.layout.block_bytes();
        let space = FakeSpace::new(blocks as usize, bytes, bytes.next_multiple_of(64), 1 + random.below(9));
        if random.below(3) == 0 {
            driver.lock().lockable_bytes = Some(random.below(100_000));
        }
        let options = CudaOptions {
            backend: [Backend::Staged, Backend::Direct, Backend::Kernel][random.below(3)],
            ring_buffers: 2 + random.below(2),
            ring_buffer_bytes: 4096 * (1 + random.below(4)),
            copy_streams: 1 + random.below(3),
            ..small_options()
        };
        let copier = copier(&driver, &space, options);
        if driver.lock().lockable_bytes.is_none() {
            register_all(&copier, &space);
        }
        let (ids, slots) = (shuffled(blocks, &mut random), shuffled(blocks, &mut random));
        assert!(only(&copier, copier.save(PART, &source.layout, refs(slots.clone()), ids.clone(), None).unwrap()).ok());
        space.seal();
        let ends = some_stages(&mut random, bytes);
        let job = copier.load_in_stages(PART, &target.layout, refs(slots), ids, Some(FOREIGN_STREAM), &ends).unwrap();
        let over = queued(&copier, job);
        let (mut from, mut peeked) = (0, Vec::new());
        for (stage, to) in ends.iter().enumerate() {
            copier.wait_stage(job, stage, FOREIGN_STREAM).unwrap();
            peeked.extend(peek(&driver, &target, blocks, from, *to));
            from = *to;
        }
        run_all(&driver);
        for (copy, begin, id) in peeked {
            // SAFETY: allocated above and filled by now.
            let seen = unsafe {
                std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(copy.host), copy.bytes).to_vec()
            };
            driver.free_host(copy.host);
            assert_eq!(seen, source.block(id)[begin..begin + copy.bytes], "round {round}, block {id} from {begin}");
        }
        assert!(over.unwrap_or_else(|| only(&copier, job)).ok());
        (0..blocks).for_each(|id| assert_eq!(target.block(id), source.block(id), "round {round}, block {id}"));
        drop(copier);
        driver.assert_nothing_is_left();
    }
}

#[test]
fn a_load_is_queued_as_a_whole_long_before_it_is_over() {
    let mut random = Random(1);
    let driver = Arc::new(FakeDriver::new(1));
    let cache = Cache::new(&driver, &[(4096, 4096), (4096, 4096)], 64, &mut random);
    let space = FakeSpace::new(64, 8192, 8192, 64);
    space.seal();
    let copier = copier(&driver, &space, small_options());
    register_all(&copier, &space);
    driver.lock().held.insert(FOREIGN_STREAM as usize);
    let (slots, ids) = (refs(0..64), (0..64).collect());
    let job =
        copier.load_in_stages(PART, &cache.layout, slots, ids, Some(FOREIGN_STREAM), &[2048, 4096, 8192]).unwrap();
    assert!(queued(&copier, job).is_none());
    assert_eq!((copier.in_flight().unwrap(), copier.poll().unwrap().len()), (1, 0));
    assert!(copier.wait_stage(job, 3, FOREIGN_STREAM).is_err(), "there is no such stage");
    driver.lock().held.clear();
    assert!(only(&copier, job).ok());
    copier.wait_stage(job, 0, FOREIGN_STREAM).unwrap();
    drop(copier);
    driver.assert_nothing_is_left();
}

#[test]
fn nobody_is_told_to_follow_a_load_that_fails() {
    let mut random = Random(1);
    for trap in [None, Some("copy"), Some("record"), Some("launch"), Some("create_event")] {
        let driver = Arc::new(FakeDriver::new(1));
        let cache = Cache::new(&driver, &[(4096, 4096)], 8, &mut random);
        let space = FakeSpace::new(8, 4096, 4096, 8);
        space.seal();
        let copier = copier(&driver, &space, small_options());
        register_all(&copier, &space);
        match trap {
            Some(call) => driver.trap(call, 1, 1),
            None => space.make_stale(5),
        }
        let (slots, ids) = (refs(0..8), (0..8).collect());
        let job = copier.load_in_stages(PART, &cache.layout, slots, ids, None, &[1024, 4096]).unwrap();
        let done = only(&copier, job);
        assert!(!done.ok() && !done.failed.is_empty(), "{trap:?}: {done:?}");
        assert!(copier.take_queued().unwrap().is_empty(), "{trap:?}");
        drop(copier);
        driver.assert_nothing_is_left();
    }
}

#[test]
fn a_stage_that_is_not_queued_cannot_be_waited_for() {
    let mut random = Random(1);
    let driver = Arc::new(FakeDriver::new(1));
    let cache = Cache::new(&driver, &[(4096, 4096)], 8, &mut random);
    let space = FakeSpace::new(8, 4096, 4096, 8);
    space.seal();
    let copier = copier(&driver, &space, small_options());
    driver.lock().held.insert(FOREIGN_STREAM as usize);
    // Nothing is page-locked, so that the second piece but two waits for a ring buffer's last use to end.
    let (slots, ids) = (refs(0..8), (0..8).collect());
    let options = [512, 1024, 2048, 4096];
    let job = copier.load_in_stages(PART, &cache.layout, slots, ids, Some(FOREIGN_STREAM), &options).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert!(copier.take_queued().unwrap().is_empty());
    assert!(copier.wait_stage(job, 3, FOREIGN_STREAM).is_err());
    driver.lock().held.clear();
    assert!(only(&copier, job).ok());
}
