//! A pool of this process alone whose tier is on fake disks, and blocks that tell when they are not what they should
//! be.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Admission, Prefetch, Tier, TierOptions, TierState};
use crate::key::{BlockRef, Key};
use crate::shm::extent::ExtentState;
use crate::shm::namespace::Namespace;
use crate::shm::recency::owner_of;
use crate::ssd::fake_block::{Fixture, Random};
use crate::{OpenOptions, Pool, checksum::part_checksum};

pub(super) const PART_BYTES: [u64; 2] = [512, 1024];
/// Whatever is waited for comes long before.
const PATIENCE: Duration = Duration::from_secs(120);

pub(super) fn key(number: u64) -> Key {
    Key::new(&Random::new(number).next().to_le_bytes()).unwrap()
}

pub(super) fn keys(numbers: std::ops::Range<u64>) -> Vec<Key> {
    numbers.map(key).collect()
}

/// Bytes of one part of a block as of `nonce`.
fn content(key: &Key, part: u32, nonce: u64) -> Vec<u8> {
    let mut random = Random::new(key.words()[0] ^ nonce.rotate_left(20) ^ u64::from(part) << 56);
    let words = PART_BYTES[part as usize] / 8 - 1;
    std::iter::once(nonce).chain((0..words).map(|_| random.next())).flat_map(u64::to_le_bytes).collect()
}

/// Wait until something holds.
pub(super) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < PATIENCE, "{what} does not come about");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Of a pool with so many extents of `slots` slots.
fn options(extents: u64, slots: u64) -> OpenOptions {
    let segment_bytes = (slots * 1024).next_multiple_of(64 << 10);
    OpenOptions {
        pool_bytes: Some(extents * 2 * segment_bytes),
        segment_bytes: Some(segment_bytes),
        ..OpenOptions::default()
    }
}

fn serve(pool: &Arc<Pool>, fixture: &Fixture, admission: Admission) {
    let tier = TierOptions { store: fixture.options.clone(), admission, write_bytes_per_second_max: 0 };
    let fixture = fixture.clone();
    pool.serve_ssd_from(tier, Box::new(move || fixture.open_for())).unwrap();
}

/// A pool with several instances in this process: each comes through a name of its own.
pub(super) struct Instances(PathBuf);

impl Instances {
    pub(super) fn new(test: &str) -> Self {
        let nanos = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos();
        let folder = std::env::temp_dir().join(format!("pegaflow-tier-{test}-{}-{nanos}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        Self(folder)
    }

    /// One that leads on the disks of `fixture`, or only asks; with a namespace that is its alone.
    pub(super) fn life(&self, fixture: Option<&Fixture>, number: u8, slots: u64) -> Life {
        let alias = self.0.join(format!("instance-{number}"));
        std::os::unix::fs::symlink(&self.0, &alias).unwrap();
        let pool = Pool::open("p", &OpenOptions { shm_dir: alias, ..options(2, slots) }).unwrap();
        if let Some(fixture) = fixture {
            serve(&pool, fixture, Admission::All);
        }
        Life::of(pool, number)
    }
}

impl Drop for Instances {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            println!("cannot remove {}: {error}", self.0.display());
        }
    }
}

/// One life of a pool.
pub(super) struct Life {
    pub(super) pool: Arc<Pool>,
    pub(super) ns: Namespace,
}

impl Life {
    /// Of a pool with `slots` slots and a tier on the disks of `fixture`.
    pub(super) fn new(fixture: &Fixture, admission: Admission, slots: u64) -> Self {
        let pool = Pool::open("p", &OpenOptions { private: true, ..options(1, slots) }).unwrap();
        serve(&pool, fixture, admission);
        Self::of(pool, 7)
    }

    fn of(pool: Arc<Pool>, fingerprint: u8) -> Self {
        let ns = pool.namespace(&[fingerprint; 32], 3, &PART_BYTES, "test").unwrap();
        assert!(pool.use_ssd(ns).unwrap());
        Self { pool, ns }
    }

    pub(super) fn until_serving(&self) {
        until("recovery", || self.state() == TierState::Serving);
        // Its namespace is served a little later.
        until("serving of the namespace", || {
            let core = self.pool.core();
            let origin = core.origin_of(self.ns).unwrap();
            core.tier_segment().unwrap().served(core, self.ns, &origin).is_some()
        });
    }

    pub(super) fn state(&self) -> TierState {
        self.pool.ssd().unwrap().unwrap().state
    }

    pub(super) fn count(&self, name: &str) -> u64 {
        let numbers = self.pool.ssd().unwrap().unwrap().numbers;
        numbers.iter().find(|(known, _)| *known == name).unwrap().1
    }

    /// Store what is absent of a chain. Returns how many became visible.
    pub(super) fn store(&self, chain: &[Key], nonce: u64) -> usize {
        let reserved = self.pool.reserve(self.ns, chain, None, true).unwrap();
        for (position, block) in &reserved {
            for part in 0..PART_BYTES.len() as u32 {
                let bytes = content(&chain[*position], part, nonce);
                self.fill(*block, part, &bytes);
            }
        }
        self.pool.publish(&reserved.iter().map(|(_, block)| *block).collect::<Vec<_>>()).unwrap()
    }

    fn fill(&self, block: BlockRef, part: u32, bytes: &[u8]) {
        let mut target = super::slots::SlotTarget { core: Arc::clone(self.pool.shared_core()), block };
        crate::ssd::ReadTarget::put(&mut target, part as usize, 0, bytes);
        assert!(self.pool.space().mark_part(block, part, Some(part_checksum(part, bytes))));
    }

    /// Store a whole chain, waiting for room.
    pub(super) fn store_all(&self, chain: &[Key], nonce: u64) {
        until("a chain in memory", || {
            self.store(chain, nonce);
            self.pool.lookup(self.ns, chain, 0).unwrap() == chain.len()
        });
    }

    /// How many of a chain's first blocks are in memory; their bytes are as of a nonce that `right` accepts.
    pub(super) fn check(&self, chain: &[Key], right: impl Fn(&Key, u64) -> bool) -> usize {
        let leased = self.pool.lease(self.ns, chain, 0, chain.len()).unwrap();
        for (key, block) in chain.iter().zip(&leased) {
            let id = crate::ssd::RecordId { fingerprint: [0; 32], group: 0, key: *key };
            super::slots::with_record(self.pool.core(), *block, id, PART_BYTES.len() as u32, |record| {
                let nonce = u64::from_le_bytes(record.parts[0][..8].try_into().unwrap());
                assert!(right(key, nonce), "bytes as of {nonce}");
                for (part, bytes) in (0..).zip(record.parts) {
                    assert_eq!(*bytes, content(key, part, nonce), "bytes of another block");
                }
            })
            .unwrap();
        }
        self.pool.release(&leased).unwrap();
        leased.len()
    }

    pub(super) fn on_ssd(&self, chain: &[Key]) -> usize {
        self.pool.tiers(self.ns, chain).unwrap().iter().filter(|tier| **tier == Tier::Ssd).count()
    }

    /// Make room for other blocks until nothing of `chain` is in memory.
    pub(super) fn push_out(&self, chain: &[Key], numbers: &mut u64) {
        until("eviction", || {
            *numbers += 1;
            self.store(&[key(*numbers)], 0);
            !self.pool.contains(self.ns, chain).unwrap().contains(&true)
        });
    }

    /// Ask for blocks. A leader that had no CPU for a while is not asked; `None` only if there is none that serves.
    fn try_to_ask(&self, keys: &[Key], parent: Option<Key>, chained: bool) -> Option<Prefetch> {
        let mut asked = None;
        until("a request", || {
            asked = self.pool.prefetch(self.ns, keys, parent, chained).unwrap();
            asked.is_some() || self.state() != TierState::Serving
        });
        asked
    }

    /// Ask for a chain.
    pub(super) fn ask(&self, chain: &[Key]) -> Prefetch {
        self.try_to_ask(chain, None, true).expect("somebody serves")
    }

    /// Ask for what comes behind `parent`, or for keys without a chain.
    pub(super) fn ask_for(&self, keys: &[Key], parent: Option<Key>, chained: bool) -> Prefetch {
        self.try_to_ask(keys, parent, chained).expect("somebody serves")
    }

    /// Reset, however long a leader without a CPU takes to forget.
    pub(super) fn reset(&self) {
        until("a reset", || match self.pool.reset(self.ns) {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(error.kind(), crate::ErrorKind::Busy, "{error}");
                false
            }
        });
    }

    /// Have this process lead no more.
    pub(super) fn stop_leading(&self) {
        self.pool.core().tier.stop("p");
        until("the end of the leader", || self.state() == TierState::None);
    }

    /// Have a chain brought into memory, by several requests if it is more than one may hold. How many blocks were
    /// found, `None` if nobody took the request.
    pub(super) fn fetch(&self, chain: &[Key]) -> Option<usize> {
        let mut found = 0;
        loop {
            let parent = if found == 0 { None } else { Some(chain[found - 1]) };
            let request = self.try_to_ask(&chain[found..], parent, true)?;
            until("an answer", || request.poll().is_some());
            match request.poll()? {
                0 => return Some(found),
                more => found += more,
            }
        }
    }

    /// Reserve whatever can be had of the pool, and wait until that is nothing.
    pub(super) fn fill_up(&self) -> Vec<BlockRef> {
        let (mut all, mut number) = (Vec::new(), 1 << 50);
        until("a full pool", || {
            number += 1;
            let reserved = self.pool.reserve(self.ns, &[key(number)], None, true).unwrap();
            all.extend(reserved.iter().map(|(_, block)| *block));
            let extents = self.pool.core().all_extents();
            let ready = extents.iter().filter(|extent| extent.state == ExtentState::Ready).count();
            reserved.is_empty() && ready == 1
        });
        all
    }

    /// Blocks for which this process had no slot.
    pub(super) fn refused(&self) -> u64 {
        self.pool.stats().iter().find(|(name, _)| *name == "blocks_refused").unwrap().1
    }

    /// On whose accounts blocks are.
    pub(super) fn owners(&self, chain: &[Key]) -> Vec<Option<u32>> {
        let core = self.pool.core();
        let identity = core.identity(self.ns).unwrap();
        let stamp = |key| core.control.stamp(core.find(&identity, key).unwrap().slot()).load(crate::sync::SeqCst);
        chain.iter().map(|key| owner_of(stamp(key))).collect()
    }

    /// How many blocks somebody leases.
    pub(super) fn leased(&self) -> usize {
        let core = self.pool.core();
        let slots = core.all_extents().into_iter().flat_map(|extent| extent.slots());
        slots.filter(|slot| crate::shm::lease::is_leased(core.control.slot(*slot).unwrap())).count()
    }

    /// Nothing is reserved or leased by anybody, once the requests of before are over.
    pub(super) fn assert_clean(&self) {
        until("an end of all leases and reservations", || {
            let core = self.pool.core();
            let mut slots = core.all_extents().into_iter().flat_map(|extent| extent.slots());
            slots.all(|slot| {
                let header = core.control.slot(slot).unwrap();
                let reserved = header.state.load(crate::sync::SeqCst) as u8 == crate::shm::state::State::Reserved as u8;
                !reserved && !crate::shm::lease::is_leased(header)
            })
        });
    }
}
