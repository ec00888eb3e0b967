//! The SSD tier of the pool that the processes of a test share, on files beside the pool.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pegaflow_engine::ssd::{Backend, StoreOptions};
use pegaflow_engine::tier::{Admission, Tier, TierOptions, TierState};
use pegaflow_engine::{Key, Namespace, Pool};

use super::patience::PATIENCE;

/// Where the files of the pool in `dir` are.
pub fn ssd_dir(dir: &Path) -> PathBuf {
    dir.with_extension("ssd")
}

pub fn options(dir: &Path) -> TierOptions {
    let files = ssd_dir(dir);
    std::fs::create_dir_all(&files).unwrap();
    let store = StoreOptions {
        directories: vec![files],
        capacity_bytes: Some((64 << 10) + (64 << 16)),
        zone_bytes: Some(64 << 10),
        chunk_bytes: 16 << 10,
        read_depth: 4,
        write_depth: 2,
        backend: Backend::Threads,
        ..StoreOptions::default()
    };
    TierOptions { store, admission: Admission::All, write_bytes_per_second_max: 0 }
}

/// Serve the tier of the pool in `dir` from now on.
pub fn serve(pool: &Pool, dir: &Path) {
    pool.serve_ssd(options(dir)).unwrap();
}

pub fn state(pool: &Pool) -> TierState {
    pool.ssd().unwrap().map_or(TierState::None, |facts| facts.state)
}

pub fn count(pool: &Pool, name: &str) -> u64 {
    let numbers = pool.ssd().unwrap().unwrap().numbers;
    numbers.iter().find(|(known, _)| *known == name).unwrap().1
}

/// Whether it comes about in time.
pub fn comes_about(limit: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    while !holds() {
        if started.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    true
}

pub fn until(what: &str, holds: impl FnMut() -> bool) {
    assert!(comes_about(PATIENCE, holds), "{what} does not come about");
}

/// How many of these are on SSD and not in memory.
pub fn on_ssd(pool: &Pool, ns: Namespace, keys: &[Key]) -> usize {
    pool.tiers(ns, keys).unwrap().iter().filter(|tier| **tier == Tier::Ssd).count()
}

/// Have a chain brought into memory, waiting for it at most so long. How many blocks were found.
pub fn fetch(pool: &Pool, ns: Namespace, chain: &[Key], limit: Duration) -> usize {
    let mut request = None;
    // A leader without a CPU is not asked.
    comes_about(limit, || {
        request = pool.prefetch(ns, chain, None, true).unwrap();
        request.is_some()
    });
    let Some(request) = request else { return 0 };
    comes_about(limit, || request.poll().is_some());
    request.found()
}
