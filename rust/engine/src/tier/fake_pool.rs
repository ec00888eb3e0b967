//! A pool of this process alone whose tier is on fake disks, and blocks that tell when they are not what they should
//! be.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Admission, Tier, TierOptions, TierState};
use crate::key::{BlockRef, Key};
use crate::shm::namespace::Namespace;
use crate::ssd::fake_block::{Fixture, Random};
use crate::{OpenOptions, Pool, checksum::part_checksum};

pub(super) const PART_BYTES: [u64; 2] = [512, 1024];
/// Whatever is waited for comes long before.
const PATIENCE: Duration = Duration::from_secs(20);

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

/// One life of a pool.
pub(super) struct Life {
    pub(super) pool: Arc<Pool>,
    pub(super) ns: Namespace,
}

impl Life {
    /// Of a pool with `slots` slots and a tier on the disks of `fixture`.
    pub(super) fn new(fixture: &Fixture, admission: Admission, slots: u64) -> Self {
        let options = OpenOptions {
            pool_bytes: Some(2 * (slots * 1024).next_multiple_of(64 << 10)),
            segment_bytes: Some((slots * 1024).next_multiple_of(64 << 10)),
            private: true,
            ..OpenOptions::default()
        };
        let pool = Pool::open("p", &options).unwrap();
        let tier = TierOptions { store: fixture.options.clone(), admission, write_bytes_per_second_max: 0 };
        let fixture = fixture.clone();
        pool.serve_ssd_from(tier, Box::new(move || fixture.open_for())).unwrap();
        let ns = pool.namespace(&[7; 32], 3, &PART_BYTES, "test").unwrap();
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

    /// Have a chain brought into memory, by several requests if it is more than one may hold. How many blocks were
    /// found, `None` if nobody took the request.
    pub(super) fn fetch(&self, chain: &[Key]) -> Option<usize> {
        let mut found = 0;
        loop {
            let parent = if found == 0 { None } else { Some(chain[found - 1]) };
            let request = self.pool.prefetch(self.ns, &chain[found..], parent, true).unwrap()?;
            until("an answer", || request.poll().is_some());
            match request.poll()? {
                0 => return Some(found),
                more => found += more,
            }
        }
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
