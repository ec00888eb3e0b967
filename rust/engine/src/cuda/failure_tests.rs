//! Every call of the driver fails once, at every time it is made: each job ends once, what is reported as copied is,
//! and nothing is left behind.

use std::sync::Arc;
use std::time::Duration;

use crate::copy::CopyDone;

use super::copier_tests::{copier, only, small_options, until};
use super::driver::{ILLEGAL_ADDRESS, OUT_OF_MEMORY};
use super::fake_driver::{FOREIGN_STREAM, FakeDriver, Random};
use super::fake_space::{Cache, FakeSpace, NAMESPACE, PART, block};
use super::{Backend, CudaCopier, CudaOptions};

const BLOCKS: u32 = 12;

struct World {
    driver: Arc<FakeDriver>,
    space: Arc<FakeSpace>,
    caches: [Cache; 3],
}

fn world(seed: u64) -> World {
    let mut random = Random(seed);
    let driver = Arc::new(FakeDriver::new(seed));
    let caches = [(); 3].map(|()| Cache::new(&driver, &[(4096, 4096), (4096, 2048)], BLOCKS, &mut random));
    let space = FakeSpace::new(3 * BLOCKS as usize, 6144, 8192, 8);
    World { driver, space, caches }
}

/// Three saves at once; what became of each.
fn run(world: &World, copier: &CudaCopier) -> Vec<CopyDone> {
    let start = |(number, cache): (usize, &Cache)| {
        let refs = (0..BLOCKS).map(|id| block(number as u32 * BLOCKS + id)).collect();
        copier.save(PART, &cache.layout, refs, (0..BLOCKS).collect(), Some(FOREIGN_STREAM)).unwrap()
    };
    let jobs: Vec<u64> = world.caches.iter().enumerate().map(start).collect();
    let mut done = Vec::new();
    while done.len() < jobs.len() {
        let more = copier.wait(Duration::from_secs(120)).unwrap();
        assert!(!more.is_empty(), "a job never ended");
        done.extend(more);
    }
    assert_eq!(done.iter().map(|done| done.job).collect::<Vec<_>>(), jobs);
    done
}

fn check(world: &World, done: &[CopyDone]) {
    for (number, done) in done.iter().enumerate() {
        for id in 0..BLOCKS {
            let slot = number as u32 * BLOCKS + id;
            let marked = world.space.marks().get(&slot).copied().unwrap_or(0);
            if done.failed.contains(&id) {
                assert!(done.error.is_some(), "a failure without a reason");
                continue;
            }
            assert_eq!(marked, 1);
            assert_eq!(world.space.content(slot), world.caches[number].block(id), "job {number}, block {id}");
        }
    }
}

fn options(backend: Backend, register: bool) -> CudaOptions {
    CudaOptions { backend, register, copy_streams: 2, direct_bytes_min: 1, ..small_options() }
}

fn ways() -> [CudaOptions; 4] {
    let staged = options(Backend::Staged, true);
    [staged, options(Backend::Staged, false), options(Backend::Direct, true), options(Backend::Kernel, true)]
}

/// A copier whose segments are page-locked, or that gave up on that.
fn settled(world: &World, options: &CudaOptions) -> Option<CudaCopier> {
    let copier =
        CudaCopier::with_driver(Arc::clone(&world.driver) as _, Arc::clone(&world.space) as _, options.clone()).ok()?;
    copier.register(NAMESPACE, PART).unwrap();
    until("page-locking is over", || {
        let progress = copier.registration();
        let complete = progress.segments > 0 && progress.bytes_registered == progress.bytes_seen;
        !options.register || complete || progress.problem.is_some()
    });
    Some(copier)
}

#[test]
fn a_call_that_fails_once_fails_no_more_than_its_job() {
    for (number, options) in ways().iter().enumerate() {
        let clean = world(number as u64);
        let copier = settled(&clean, options).unwrap();
        assert!(run(&clean, &copier).iter().all(CopyDone::ok));
        drop(copier);
        for (call, made) in clean.driver.calls() {
            for works in (0..made).step_by(1 + made / 12) {
                let world = world(works as u64);
                world.driver.trap(call, works, OUT_OF_MEMORY);
                if let Some(copier) = settled(&world, options) {
                    let done = run(&world, &copier);
                    check(&world, &done);
                    let failed = done.iter().filter(|done| !done.ok()).count();
                    let lost = copier.problem().is_some();
                    assert!(lost && call == "enter" || failed <= 1, "{call} after {works}: {done:?}");
                    if !lost {
                        assert!(run_again_is_ok(&world, &copier), "{call} after {works}: no recovery");
                    }
                }
                world.driver.assert_nothing_is_left();
            }
        }
    }
}

fn run_again_is_ok(world: &World, copier: &CudaCopier) -> bool {
    let refs = (0..BLOCKS).map(block).collect();
    world.space.seal();
    let job = copier.load(PART, &world.caches[1].layout, refs, (0..BLOCKS).collect(), None).unwrap();
    only(copier, job).ok() && (0..BLOCKS).all(|id| world.caches[1].block(id) == world.space.content(id))
}

#[test]
fn a_lost_device_fails_every_job_and_says_so() {
    for (number, options) in ways().iter().enumerate() {
        for call in ["copy", "launch", "record", "record_foreign", "wait", "query"] {
            for works in [0, 1, 7, 20] {
                let world = world(number as u64);
                let Some(copier) = settled(&world, options) else { continue };
                world.driver.trap(call, works, ILLEGAL_ADDRESS);
                let done = run(&world, &copier);
                check(&world, &done);
                if done.iter().all(CopyDone::ok) {
                    assert_eq!(copier.problem(), None);
                    continue;
                }
                let again = run(&world, &copier);
                assert!(again.iter().all(|done| done.failed.len() == BLOCKS as usize && done.bytes == 0));
                let reason = again[0].error.clone().unwrap();
                assert!(reason.contains("700"), "{reason}");
                copier.close().unwrap();
                drop(copier);
                world.driver.assert_nothing_is_left();
            }
        }
    }
}

#[test]
fn a_failed_job_is_not_over_while_the_device_works_on_it() {
    let world = world(1);
    let copier = copier(&world.driver, &world.space, small_options());
    world.driver.lock().held.insert(FOREIGN_STREAM as usize);
    // The first piece's gather is queued, its copies are not.
    world.driver.trap("copy", 1, OUT_OF_MEMORY);
    let refs: Vec<_> = (0..BLOCKS).map(block).collect();
    let cache = &world.caches[0];
    let job = copier.save(PART, &cache.layout, refs, (0..BLOCKS).collect(), Some(FOREIGN_STREAM)).unwrap();
    until("the copy fails", || world.driver.calls().get("copy").is_some_and(|made| *made >= 2));
    assert!(copier.wait(Duration::from_millis(30)).unwrap().is_empty());
    world.driver.lock().held.clear();
    let done = only(&copier, job);
    assert_eq!(done.failed.len(), BLOCKS as usize);
    assert!(done.error.unwrap().contains("copy answered 2"));
    assert!(world.space.marks().is_empty());
}

#[test]
fn a_defect_of_the_thread_is_told_when_the_device_is_done_with_all_blocks_and_slots() {
    for number in 0..4 {
        let options = CudaOptions { register: false, ..ways()[number].clone() };
        let world = world(number as u64);
        let copier = copier(&world.driver, &world.space, options);
        world.driver.lock().held.insert(FOREIGN_STREAM as usize);
        let cache = &world.caches[0];
        let start = |part, first: u32| {
            let refs = (first..first + BLOCKS).map(block).collect();
            copier.save(part, &cache.layout, refs, (0..BLOCKS).collect(), Some(FOREIGN_STREAM)).unwrap()
        };
        let good = start(PART, 0);
        until("work is queued", || world.driver.calls().contains_key("launch"));
        let queued_before = world.driver.calls()["record"];
        let bad = start(PART + 1, BLOCKS); // the space has no such part, and says so by a panic
        until("the device is asked for", || world.driver.calls()["record"] > queued_before + 2);
        assert!(copier.wait(Duration::from_millis(30)).unwrap().is_empty(), "told while the device may still copy");
        world.driver.lock().held.clear();
        let mut done = Vec::new();
        while done.len() < 2 {
            done.extend(copier.wait(Duration::from_secs(120)).unwrap());
        }
        assert_eq!(done.iter().map(|done| (done.job, done.failed.len())).collect::<Vec<_>>(), [(good, 12), (bad, 12)]);
        assert!(copier.problem().unwrap().contains("a defect"));
        copier.close().unwrap();
        drop(copier);
        world.driver.assert_nothing_is_left();
    }
}

#[test]
fn a_load_that_fails_underway_leaves_nothing_behind_that_gets_into_the_next_one() {
    for seed in 20..45 {
        for (call, works) in [("copy", 3), ("record", 3), ("record", 5)] {
            let mut random = Random(seed);
            let world = world(seed);
            // Several runs per piece, so that pieces are spread over the streams.
            let options = CudaOptions { ring_buffers: 2, copy_streams: 3, ..options(Backend::Staged, true) };
            let copier = settled(&world, &options).unwrap();
            assert!(run(&world, &copier).iter().all(CopyDone::ok));
            world.space.seal();
            world.driver.trap(call, works, OUT_OF_MEMORY);
            let targets: Vec<Cache> =
                (0..3).map(|_| Cache::new(&world.driver, &[(4096, 4096), (4096, 2048)], BLOCKS, &mut random)).collect();
            let start = |(number, cache): (usize, &Cache)| {
                let refs = (0..BLOCKS).rev().map(|id| block(number as u32 * BLOCKS + id)).collect();
                copier.load(PART, &cache.layout, refs, (0..BLOCKS).rev().collect(), None).unwrap()
            };
            let jobs = targets.iter().enumerate().map(start).count();
            let mut done = Vec::new();
            while done.len() < jobs {
                done.extend(copier.wait(Duration::from_secs(120)).unwrap());
            }
            for (number, done) in done.iter().enumerate() {
                for id in (0..BLOCKS).filter(|id| !done.failed.contains(&(BLOCKS - 1 - id))) {
                    let expected = world.caches[number].block(id);
                    assert!(targets[number].block(id) == expected, "seed {seed}, {call} after {works}, block {id}");
                }
            }
        }
    }
}
