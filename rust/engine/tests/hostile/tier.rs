//! A pool with an SSD tier whose words are damaged while a process serves it and asks it for blocks.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pegaflow_engine::ssd::{Backend, StoreOptions};
use pegaflow_engine::tier::{Admission, Prefetch, TierOptions, TierState};
use pegaflow_engine::{BlockRef, Key, Namespace, Pool};

use super::bytes::Bytes;
use super::files::Files;
use super::pool::options;

const PART_BYTES: [u64; 2] = [512, 1024];
/// Behind the superblock of the tier's file: header, namespaces, and the first of the requests.
const FIRST_WORD: u64 = 128;
const NEAR_WORDS: usize = (4096 + 8192 + 2 * 41_088 - 128) / 8;
const STEPS_MAX: usize = 24;
const REQUESTS_MAX: usize = 8;
const PATIENCE: Duration = Duration::from_secs(120);

fn keys(first: usize, count: usize) -> Vec<Key> {
    (first..first + count).map(|number| Key::new(&(number as u64 + 1).to_le_bytes()).unwrap()).collect()
}

fn content(key: &Key, bytes: usize) -> Vec<u8> {
    key.to_bytes().iter().copied().cycle().take(bytes).collect()
}

pub struct Target {
    dir: PathBuf,
    files: Files,
    tier: PathBuf,
    control: PathBuf,
    words: usize,
}

struct Session {
    pool: Arc<Pool>,
    ns: Namespace,
    requests: Vec<Prefetch>,
}

impl Target {
    pub fn new(dir: &Path) -> Self {
        std::fs::create_dir_all(dir.join("files")).unwrap();
        let session = Session::new(dir).unwrap();
        let started = Instant::now();
        let facts = || session.pool.ssd().unwrap().unwrap();
        let written = || facts().numbers.iter().any(|(name, count)| *name == "records" && *count >= 20);
        while facts().state != TierState::Serving || !written() {
            session.store(&keys(0, 20));
            assert!(started.elapsed() < PATIENCE, "nothing is written");
        }
        let path = session.pool.path().to_owned();
        drop(session);
        let (files, tier, control) = (Files::of(&path), path.join("ssd"), path.join("control"));
        let words = (files.contents(&tier).len() - FIRST_WORD as usize) / 8;
        Self { dir: dir.to_owned(), files, tier, control, words }
    }

    pub fn run(&mut self, data: &[u8]) {
        let mut bytes = Bytes::new(data);
        self.files.restore();
        for _ in 0..bytes.byte() % 6 {
            self.spoil(&mut bytes);
        }
        let Some(mut session) = Session::new(&self.dir) else { return };
        if bytes.flag() {
            session.wait_a_little_for_serving();
        }
        for _ in 0..STEPS_MAX {
            if bytes.is_empty() {
                break;
            }
            match bytes.byte() % 12 {
                0..5 => self.spoil(&mut bytes),
                step => session.step(step, &mut bytes),
            }
        }
    }

    fn spoil(&self, bytes: &mut Bytes<'_>) {
        if bytes.one_in(10) {
            let at = 128 + bytes.below(self.files.contents(&self.control).len() / 8 - 16) as u64 * 8;
            return self.files.spoil(&self.control, at, bytes);
        }
        let range = if bytes.one_in(3) { self.words } else { NEAR_WORDS };
        self.files.spoil(&self.tier, FIRST_WORD + (bytes.word() % range as u64) * 8, bytes);
    }
}

impl Session {
    fn new(dir: &Path) -> Option<Self> {
        let pool = Pool::open("p", &options(dir)).ok()?;
        let store = StoreOptions {
            directories: vec![dir.join("files")],
            capacity_bytes: Some((64 << 10) + (8 << 16)),
            zone_bytes: Some(64 << 10),
            chunk_bytes: 16 << 10,
            backend: Backend::Threads,
            read_depth: 2,
            write_depth: 2,
            ..StoreOptions::default()
        };
        pool.serve_ssd(TierOptions { store, admission: Admission::All, write_bytes_per_second_max: 0 }).ok()?;
        let ns = pool.namespace(&[9; 32], 0, &PART_BYTES, "hostile").ok()?;
        pool.use_ssd(ns).ok()?;
        Some(Self { pool, ns, requests: Vec::new() })
    }

    /// Damage may keep it from ever coming about.
    fn wait_a_little_for_serving(&self) {
        let started = Instant::now();
        let serving =
            || self.pool.ssd().is_ok_and(|facts| facts.is_some_and(|facts| facts.state == TierState::Serving));
        while !serving() && started.elapsed() < Duration::from_millis(100) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn step(&mut self, step: u8, bytes: &mut Bytes<'_>) {
        let keys = keys(bytes.below(40), 1 + bytes.below(30));
        match step {
            5 => drop(self.pool.tiers(self.ns, &keys)),
            6 | 7 => {
                let parent = bytes.flag().then_some(keys[0]);
                let request = self.pool.prefetch(self.ns, &keys, parent, bytes.flag());
                self.requests.extend(request.ok().flatten());
                let more = self.requests.len().saturating_sub(REQUESTS_MAX);
                self.requests.drain(..more);
            }
            8 => self.store(&keys),
            9 => {
                let _any = (self.pool.ssd(), self.pool.ssd_read_seconds(bytes.word()), self.pool.stats());
                let _any: Vec<_> = self.requests.iter().map(|request| (request.poll(), request.found())).collect();
            }
            10 => {
                std::thread::sleep(Duration::from_millis(3));
                self.check(&keys);
            }
            // Where the damage keeps it from coming about, it gives up in time.
            _ if bytes.one_in(40) => drop(self.pool.reset(self.ns)),
            _ => self.check(&keys),
        }
    }

    fn store(&self, keys: &[Key]) {
        let Ok(reserved) = self.pool.reserve(self.ns, keys, None, true) else { return };
        let space = self.pool.space();
        for (position, block) in &reserved {
            for part in 0..PART_BYTES.len() as u32 {
                let Some(target) = space.write_target(*block, part) else { continue };
                let bytes = content(&keys[*position], target.bytes);
                // SAFETY: inside a mapping, as far as the pool says; that is what is tested.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.address, bytes.len()) };
                space.mark_part(*block, part, Some(pegaflow_engine::checksum::part_checksum(part, &bytes)));
            }
        }
        let blocks: Vec<BlockRef> = reserved.iter().map(|(_, block)| *block).collect();
        let _any = self.pool.publish(&blocks);
    }

    fn check(&self, keys: &[Key]) {
        let Ok(leased) = self.pool.lease(self.ns, keys, 0, keys.len()) else { return };
        for block in &leased {
            let Some(source) = self.pool.space().read_source(*block, 0) else { continue };
            // SAFETY: inside a mapping, as far as the pool says; that is what is tested.
            let bytes = unsafe { std::slice::from_raw_parts(source.address, source.bytes) };
            std::hint::black_box(bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>());
        }
        let _any = self.pool.release(&leased);
    }
}
