//! The copier over a fake driver and a fake pool: what arrives, in which order, and what is given back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::copy::CopyDone;
use crate::error::ErrorKind;
use crate::key::BlockRef;

use super::driver::OUT_OF_MEMORY;
use super::fake_driver::{FOREIGN_STREAM, FakeDriver, Random};
use super::fake_space::{Cache, FakeSpace, NAMESPACE, PART, block};
use super::{Backend, CudaCopier, CudaOptions};

/// Whatever is waited for comes long before.
const PATIENCE: Duration = Duration::from_secs(120);
const BACKENDS: [Backend; 4] = [Backend::Auto, Backend::Staged, Backend::Direct, Backend::Kernel];

pub(super) fn small_options() -> CudaOptions {
    CudaOptions { ring_buffer_bytes: 16384, register_chunk_bytes: 1 << 20, ..CudaOptions::default() }
}

pub(super) fn copier(driver: &Arc<FakeDriver>, space: &Arc<FakeSpace>, options: CudaOptions) -> CudaCopier {
    CudaCopier::with_driver(Arc::clone(driver) as _, Arc::clone(space) as _, options).unwrap()
}

pub(super) fn only(copier: &CudaCopier, job: u64) -> CopyDone {
    let mut all = copier.wait(PATIENCE).unwrap();
    assert_eq!(all.iter().map(|done| done.job).collect::<Vec<_>>(), [job]);
    all.remove(0)
}

pub(super) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(super) fn refs(slots: impl IntoIterator<Item = u32>) -> Vec<BlockRef> {
    slots.into_iter().map(block).collect()
}

fn stat(copier: &CudaCopier, name: &str) -> u64 {
    copier.stats().into_iter().find(|(known, _)| *known == name).unwrap().1
}

/// Wait until everything is page-locked.
pub(super) fn register_all(copier: &CudaCopier, space: &FakeSpace) {
    copier.register(NAMESPACE, PART).unwrap();
    until("segments are page-locked", || {
        let progress = copier.registration();
        progress.segments == space.segment_count() && progress.bytes_registered == progress.bytes_seen
    });
}

/// Shapes whose fragments are aligned to `unit` bytes.
pub(super) fn shapes(random: &mut Random, unit: usize) -> Vec<(usize, usize)> {
    let equal = random.below(2) == 0;
    let first = (1 + random.below(5000 / unit)) * unit;
    (0..1 + random.below(7))
        .map(|_| {
            let length_bytes = if equal { first } else { (1 + random.below(5000 / unit)) * unit };
            (length_bytes + random.below(20) * unit, length_bytes)
        })
        .collect()
}

pub(super) fn shuffled(count: u32, random: &mut Random) -> Vec<u32> {
    let mut all: Vec<u32> = (0..count).collect();
    (0..all.len()).for_each(|index| all.swap(index, random.below(count as usize)));
    all
}

#[test]
fn blocks_come_back_equal_over_random_layouts() {
    for round in 0..160u64 {
        let mut random = Random(round);
        let driver = Arc::new(FakeDriver::new(round));
        let shapes = shapes(&mut random, [1, 4, 8, 16][round as usize % 4]);
        let blocks = 1 + random.below(40) as u32;
        let source = Cache::new(&driver, &shapes, blocks, &mut random);
        let target = Cache::new(&driver, &shapes, blocks, &mut random);
        let bytes = source.layout.block_bytes();
        let stride = bytes.next_multiple_of([64, 4096][random.below(2)]);
        let space = FakeSpace::new(blocks as usize, bytes, stride, 1 + random.below(9));
        if random.below(3) == 0 {
            driver.lock().lockable_bytes = Some(random.below(200_000));
        }
        let options = CudaOptions {
            backend: BACKENDS[random.below(4)],
            ring_buffers: 2 + random.below(3),
            ring_buffer_bytes: 4096 * (1 + random.below(8)),
            copy_streams: 1 + random.below(3),
            direct_bytes_min: 1000,
            register: random.below(4) > 0,
            ..small_options()
        };
        let copier = copier(&driver, &space, options);
        copier.register(NAMESPACE, PART).unwrap();
        let (ids, slots) = (shuffled(blocks, &mut random), shuffled(blocks, &mut random));
        let saved =
            only(&copier, copier.save(PART, &source.layout, refs(slots.clone()), ids.clone(), Some(1)).unwrap());
        assert!(saved.ok(), "round {round}: {saved:?}");
        assert_eq!(saved.bytes, u64::from(blocks) * bytes as u64);
        assert_eq!(space.marks().into_values().collect::<Vec<_>>(), vec![1; blocks as usize]);
        space.seal();
        let loaded = only(&copier, copier.load(PART, &target.layout, refs(slots.clone()), ids.clone(), None).unwrap());
        assert!(loaded.ok(), "round {round}: {loaded:?}");
        for (id, slot) in ids.iter().zip(slots) {
            assert_eq!(space.content(slot), source.block(*id), "round {round}, block {id} in its slot");
            assert_eq!(target.block(*id), source.block(*id), "round {round}, block {id}");
        }
        drop(copier);
        driver.assert_nothing_is_left();
    }
}

#[test]
fn bytes_between_and_beside_the_loaded_blocks_stay() {
    let mut random = Random(5);
    let driver = Arc::new(FakeDriver::new(5));
    let cache = Cache::new(&driver, &[(96, 64), (128, 64)], 9, &mut random);
    let space = FakeSpace::new(3, 128, 128, 8);
    space.seal();
    let before = cache.everything();
    let copier = copier(&driver, &space, small_options());
    assert!(only(&copier, copier.load(PART, &cache.layout, refs([0, 1, 2]), vec![2, 4, 6], None).unwrap()).ok());
    for id in [2, 4, 6] {
        assert_eq!(cache.block(id), vec![0; 128]);
    }
    let changed = cache.everything().iter().zip(&before).map(|(now, then)| differing(now, then)).sum::<usize>();
    assert_eq!(changed, 3 * 128 / 8);
}

fn differing(left: &[u64], right: &[u64]) -> usize {
    left.iter().zip(right).filter(|(left, right)| left != right).count()
}

#[test]
fn many_jobs_both_ways_share_the_rings() {
    let mut random = Random(11);
    let driver = Arc::new(FakeDriver::new(11));
    let shapes = [(4096, 4096), (8192, 4096)];
    let space = FakeSpace::new(64, 8192, 8192, 16);
    let copier = copier(&driver, &space, CudaOptions { copy_streams: 2, ..small_options() });
    let caches: Vec<Cache> = (0..8).map(|_| Cache::new(&driver, &shapes, 8, &mut random)).collect();
    register_all(&copier, &space);
    let start = |number: u32, cache: &Cache| {
        let slots = number * 8..number * 8 + 8;
        copier.save(PART, &cache.layout, refs(slots), (0..8).collect(), None).unwrap()
    };
    let jobs: Vec<u64> = caches.iter().enumerate().map(|(number, cache)| start(number as u32, cache)).collect();
    let mut done = Vec::new();
    while done.len() < jobs.len() {
        done.extend(copier.wait(PATIENCE).unwrap());
    }
    assert!(done.iter().all(CopyDone::ok));
    assert_eq!(done.iter().map(|done| done.job).collect::<Vec<_>>(), jobs);
    for (number, cache) in caches.iter().enumerate() {
        (0..8).for_each(|id| assert_eq!(space.content(number as u32 * 8 + id), cache.block(id)));
    }
}

#[test]
fn stale_blocks_fail_alone() {
    let mut random = Random(2);
    let driver = Arc::new(FakeDriver::new(2));
    let cache = Cache::new(&driver, &[(512, 512)], 8, &mut random);
    let space = FakeSpace::new(8, 512, 512, 8);
    let copier = copier(&driver, &space, small_options());
    space.make_stale(3);
    let mut slots = refs(0..8);
    slots[6] = BlockRef::new(6, 2);
    let done = only(&copier, copier.save(PART, &cache.layout, slots.clone(), (0..8).collect(), None).unwrap());
    assert_eq!((done.failed, done.bytes, done.error), (vec![3, 6], 6 * 512, None));
    space.seal();
    space.make_unreadable(1);
    let done = only(&copier, copier.load(PART, &cache.layout, slots, (0..8).collect(), None).unwrap());
    assert_eq!((done.failed, done.bytes, done.error), (vec![1, 3, 6], 5 * 512, None));
}

#[test]
fn slots_of_another_length_fail() {
    let mut random = Random(2);
    let driver = Arc::new(FakeDriver::new(2));
    let cache = Cache::new(&driver, &[(512, 512)], 2, &mut random);
    let space = FakeSpace::new(2, 1024, 1024, 8);
    let copier = copier(&driver, &space, small_options());
    let done = only(&copier, copier.save(PART, &cache.layout, refs(0..2), vec![0, 1], None).unwrap());
    assert_eq!((done.failed, done.bytes), (vec![0, 1], 0));
    assert!(space.marks().is_empty());
}

#[test]
fn copies_wait_for_the_stream_and_stay_owned_until_then() {
    for backend in BACKENDS {
        let mut random = Random(3);
        let driver = Arc::new(FakeDriver::new(3));
        let cache = Cache::new(&driver, &[(512, 512)], 4, &mut random);
        let space = FakeSpace::new(4, 512, 512, 8);
        let copier = copier(&driver, &space, CudaOptions { backend, direct_bytes_min: 1, ..small_options() });
        register_all(&copier, &space);
        driver.lock().held.insert(FOREIGN_STREAM as usize);
        let job = copier.save(PART, &cache.layout, refs(0..4), (0..4).collect(), Some(FOREIGN_STREAM)).unwrap();
        assert!(copier.wait(Duration::from_millis(30)).unwrap().is_empty());
        assert_eq!((copier.in_flight().unwrap(), space.content(0)), (1, vec![0; 512]));
        driver.lock().held.clear();
        assert!(only(&copier, job).ok());
        space.seal();
        let before = cache.everything();
        let other = Cache::new(&driver, &[(512, 512)], 4, &mut random);
        let untouched = other.everything();
        driver.lock().held.insert(FOREIGN_STREAM as usize);
        let job = copier.load(PART, &other.layout, refs(0..4), (0..4).collect(), Some(FOREIGN_STREAM)).unwrap();
        assert!(copier.wait(Duration::from_millis(30)).unwrap().is_empty());
        assert_eq!(other.everything(), untouched, "{backend:?}");
        driver.lock().held.clear();
        assert!(only(&copier, job).ok());
        assert_eq!(cache.everything(), before);
        (0..4).for_each(|id| assert_eq!(other.block(id), cache.block(id)));
    }
}

#[test]
fn backends_are_chosen_by_the_length_of_runs_and_by_what_is_locked() {
    for (backend, direct_bytes_min, blind, expected) in [
        (Backend::Auto, 4096, false, "pieces_direct"),
        (Backend::Auto, 4097, false, "pieces_staged"),
        (Backend::Staged, 1, false, "pieces_staged"),
        (Backend::Direct, 1 << 20, false, "pieces_direct"),
        (Backend::Kernel, 1, false, "pieces_kernel"),
        (Backend::Kernel, 1, true, "pieces_staged"),
    ] {
        let mut random = Random(3);
        let driver = Arc::new(FakeDriver { blind_kernels: blind, ..FakeDriver::new(3) });
        let cache = Cache::new(&driver, &[(4096, 4096), (8192, 4096)], 2, &mut random);
        let space = FakeSpace::new(4, 8192, 8192, 8);
        let copier = copier(&driver, &space, CudaOptions { backend, direct_bytes_min, ..small_options() });
        assert!(only(&copier, copier.save(PART, &cache.layout, refs(0..1), vec![0], None).unwrap()).ok());
        assert_eq!((stat(&copier, "pieces_staged"), stat(&copier, "bytes_bounced")), (1, 8192));
        register_all(&copier, &space);
        let before = stat(&copier, expected);
        assert!(only(&copier, copier.save(PART, &cache.layout, refs(1..2), vec![1], None).unwrap()).ok());
        assert_eq!(stat(&copier, expected), before + 1, "{backend:?}");
        assert_eq!((stat(&copier, "bytes_bounced"), stat(&copier, "bytes_saved")), (8192, 16384));
    }
}

#[test]
fn memory_that_cannot_be_locked_is_reported_and_goes_through_the_ring() {
    let mut random = Random(4);
    let driver = Arc::new(FakeDriver::new(4));
    driver.lock().lockable_bytes = Some(1 << 20);
    let cache = Cache::new(&driver, &[(4096, 4096)], 512, &mut random);
    let space = FakeSpace::new(512, 4096, 4096, 512);
    let copier = copier(&driver, &space, small_options());
    copier.register(NAMESPACE, PART).unwrap();
    until("page-locking ends", || copier.registration().problem.is_some());
    assert_eq!((copier.registration().bytes_registered, copier.problem()), (1 << 20, None));
    assert!(only(&copier, copier.save(PART, &cache.layout, refs(0..512), (0..512).collect(), None).unwrap()).ok());
    assert_eq!(stat(&copier, "bytes_bounced"), (512 << 12) - (1 << 20));
    (0..512).for_each(|id| assert_eq!(space.content(id), cache.block(id)));
}

#[test]
fn copies_do_not_cross_from_one_registration_to_the_next() {
    let mut random = Random(14);
    let driver = Arc::new(FakeDriver::new(14));
    let cache = Cache::new(&driver, &[(409_600, 409_600)], 8, &mut random);
    let space = FakeSpace::new(8, 409_600, 409_600, 8);
    for backend in [Backend::Staged, Backend::Direct] {
        let copier = copier(&driver, &space, CudaOptions { backend, ring_buffer_bytes: 2 << 20, ..small_options() });
        register_all(&copier, &space);
        let done = only(&copier, copier.save(PART, &cache.layout, refs(0..8), (0..8).collect(), None).unwrap());
        assert_eq!((done.error, done.failed), (None, vec![]));
        assert_eq!(stat(&copier, "bytes_bounced"), 0);
        (0..8).for_each(|id| assert!(space.content(id) == cache.block(id)));
    }
}

#[test]
fn a_segment_out_of_use_is_unlocked_but_not_under_a_copy() {
    let mut random = Random(6);
    let driver = Arc::new(FakeDriver::new(6));
    let cache = Cache::new(&driver, &[(4096, 4096)], 4, &mut random);
    let space = FakeSpace::new(4, 4096, 4096, 2);
    let copier = copier(&driver, &space, small_options());
    register_all(&copier, &space);
    driver.lock().held.insert(FOREIGN_STREAM as usize);
    let job = copier.save(PART, &cache.layout, refs(0..4), (0..4).collect(), Some(FOREIGN_STREAM)).unwrap();
    until("the copy is queued", || stat(&copier, "pieces_staged") == 1);
    let mapping = space.retire(0).mapping;
    until("the segment is forgotten", || copier.registration().segments == 1);
    assert_eq!(driver.lock().registered.len(), 2);
    assert!(Arc::strong_count(&mapping) > 1, "unmapped under a copy");
    driver.lock().held.clear();
    assert!(only(&copier, job).ok());
    until("the segment is unlocked", || driver.lock().registered.len() == 1 && Arc::strong_count(&mapping) == 1);
}

#[test]
fn the_time_of_moving_leaves_out_what_was_waited_for() {
    let mut random = Random(8);
    let driver = Arc::new(FakeDriver::new(8));
    let cache = Cache::new(&driver, &[(4096, 4096)], 64, &mut random);
    let space = FakeSpace::new(64, 4096, 4096, 64);
    let copier = copier(&driver, &space, small_options());
    register_all(&copier, &space);
    driver.lock().held.insert(FOREIGN_STREAM as usize);
    let job = copier.save(PART, &cache.layout, refs(0..64), (0..64).collect(), Some(FOREIGN_STREAM)).unwrap();
    assert!(copier.wait(Duration::from_millis(30)).unwrap().is_empty());
    assert_eq!(stat(&copier, "save_moving_us"), 0, "the stream has not produced them");
    driver.lock().held.clear();
    assert!(only(&copier, job).ok());
    assert!(stat(&copier, "save_moving_us") > 0);
    assert_eq!(stat(&copier, "load_moving_us"), 0);
}

#[test]
fn saves_keep_to_their_rate_and_loads_do_not_wait_for_them() {
    let mut random = Random(7);
    let driver = Arc::new(FakeDriver::new(7));
    let cache = Cache::new(&driver, &[(4096, 4096)], 64, &mut random);
    let space = FakeSpace::new(64, 4096, 4096, 64);
    let rate = CudaOptions { save_bytes_per_second_max: 1_000_000, ..small_options() };
    let copier = copier(&driver, &space, rate);
    // Who gets no CPU between the two calls finds the save over.
    let load_is_first = (0..20).any(|_| {
        let started = Instant::now();
        let save = copier.save(PART, &cache.layout, refs(0..64), (0..64).collect(), None).unwrap();
        let load = copier.load(PART, &cache.layout, refs(0..1), vec![0], None).unwrap();
        let mut done = copier.wait(PATIENCE).unwrap();
        while done.len() < 2 {
            done.extend(copier.wait(PATIENCE).unwrap());
        }
        // The first piece of 16 KiB goes at once.
        assert!(started.elapsed() > Duration::from_micros(15 * 16_384), "{:?}", started.elapsed());
        let [load_done, save_done] = [load, save].map(|job| done.iter().position(|done| done.job == job).unwrap());
        assert_eq!(done[load_done].failed, [0], "nothing is sealed yet");
        assert!(done[save_done].ok());
        load_done < save_done
    });
    assert!(load_is_first);
}

#[test]
fn an_idle_copier_leaves_the_driver_alone() {
    let mut random = Random(8);
    let driver = Arc::new(FakeDriver::new(8));
    let cache = Cache::new(&driver, &[(4096, 4096)], 1, &mut random);
    let space = FakeSpace::new(1, 4096, 4096, 1);
    let copier = copier(&driver, &space, small_options());
    register_all(&copier, &space);
    assert!(only(&copier, copier.save(PART, &cache.layout, refs(0..1), vec![0], None).unwrap()).ok());
    // It may be at the end of something.
    until("it makes no calls any more", || {
        let before = driver.calls();
        std::thread::sleep(Duration::from_millis(300));
        driver.calls() == before
    });
}

#[test]
fn layouts_are_uploaded_once_and_their_memory_is_used_again() {
    let mut random = Random(9);
    let driver = Arc::new(FakeDriver::new(9));
    let space = FakeSpace::new(1, 4096, 4096, 1);
    let copier = copier(&driver, &space, small_options());
    let allocations = || driver.calls()["allocate"];
    let before = allocations();
    for _ in 0..3 {
        let cache = Cache::new(&driver, &[(4096, 4096)], 1, &mut random);
        for _ in 0..2 {
            assert!(only(&copier, copier.save(PART, &cache.layout, refs(0..1), vec![0], None).unwrap()).ok());
        }
    }
    assert_eq!(allocations(), before + 1);
}

#[test]
fn impossible_jobs_are_refused() {
    let mut random = Random(10);
    let driver = Arc::new(FakeDriver::new(10));
    let cache = Cache::new(&driver, &[(4096, 4096)], 2, &mut random);
    let space = FakeSpace::new(2, 4096, 4096, 2);
    let copier = copier(&driver, &space, small_options());
    let kind = |refs, ids| copier.save(PART, &cache.layout, refs, ids, None).unwrap_err().kind();
    assert_eq!(kind(refs(0..2), vec![0]), ErrorKind::InvalidArgument);
    assert_eq!(kind(refs(0..1), vec![2]), ErrorKind::InvalidArgument);
    let empty = copier.save(PART, &cache.layout, vec![], vec![], Some(FOREIGN_STREAM)).unwrap();
    assert!(only(&copier, empty).ok());
    copier.close().unwrap();
    assert_eq!(kind(refs(0..1), vec![0]), ErrorKind::Closed);
}

#[test]
fn a_device_without_room_for_the_rings_is_an_error_that_says_what_to_lower() {
    let driver = Arc::new(FakeDriver::new(13));
    let space = FakeSpace::new(1, 4096, 4096, 1);
    driver.trap("allocate", 3, OUT_OF_MEMORY);
    let outcome = CudaCopier::with_driver(Arc::clone(&driver) as _, Arc::clone(&space) as _, CudaOptions::default());
    let text = outcome.err().unwrap().to_string();
    assert!(text.contains("100 MB") && text.contains("lower gpu_memory_utilization"), "{text}");
    driver.assert_nothing_is_left();
}

#[test]
fn closing_finishes_what_is_queued() {
    let mut random = Random(12);
    let driver = Arc::new(FakeDriver::new(12));
    let cache = Cache::new(&driver, &[(4096, 4096)], 64, &mut random);
    let space = FakeSpace::new(64, 4096, 4096, 64);
    let copier = copier(&driver, &space, small_options());
    let job = copier.save(PART, &cache.layout, refs(0..64), (0..64).collect(), None).unwrap();
    copier.close().unwrap();
    assert!(only(&copier, job).ok());
    (0..64).for_each(|id| assert_eq!(space.content(id), cache.block(id)));
    driver.assert_nothing_is_left();
}
