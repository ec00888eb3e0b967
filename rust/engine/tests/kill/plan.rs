//! What the processes of one run work on: the shape of the pool, its namespaces, and the chains of their keys.

use std::path::Path;
use std::sync::Arc;

use pegaflow_engine::{ErrorKind, Key, Namespace, OpenOptions, Pool};

use super::blocks::{MAIN, PART_BYTES, POOL_BYTES, POOL_NAME, SEGMENT_BYTES, key};
use super::random::Random;

/// Numbers between the keys of two chains, and between those that two groups of chains share.
const STRIDE: u64 = 100;
const SHARED_FROM: u64 = 1_000_000;
/// Slots of a planned pool, about, and its bytes: what is filled within seconds, also by a debug build.
const SLOTS_MAX: u64 = if cfg!(debug_assertions) { 600 } else { 6000 };
const BYTES_MAX: u64 = if cfg!(debug_assertions) { 2 << 20 } else { 64 << 20 };

/// One namespace of the run.
#[derive(Clone, Debug)]
pub struct Space {
    /// Every byte of its fingerprint.
    pub byte: u8,
    pub part_bytes: Vec<u64>,
    /// How often it is chosen, relative to the others.
    pub share: u64,
    pub is_reset: bool,
}

/// What all processes of a run agree on.
#[derive(Clone, Debug)]
pub struct Plan {
    pub pool_bytes: u64,
    pub segment_bytes: u64,
    pub slots_max: Option<u64>,
    pub spaces: Vec<Space>,
    /// Chains of keys; those of one group have the same first blocks, as conversations with one system prompt have.
    pub chains: u64,
    pub group: u64,
    pub shared_length: u64,
    pub length: u64,
    /// Chains of low numbers are asked for more often.
    pub skewed: bool,
    /// Blocks that a process may have reserved from one step to another.
    pub open_blocks_max: usize,
    /// How often each process gives up blocks that somebody may still be writing.
    pub quarantines: u64,
    /// Of a thousand steps of a process, how many each are resets, reaps, rebuilds and departures: rare in engines.
    pub meddling_per_mille: u64,
    /// Of a hundred batches of steps, how many arm a named point.
    pub arming_percent: u64,
    /// Threads of each process that use the pool.
    pub threads: u64,
    /// The seed of this plan, if processes have followers that read and write for them.
    pub followers_of: Option<u64>,
    /// Of a hundred processes, how many keep values by name instead of blocks.
    pub keepers_percent: u64,
    /// Processes stop at named points too, for somebody to continue or kill them, rather than die there only.
    pub stops: bool,
}

impl Plan {
    /// The plan of the hammer: a tiny pool with more namespaces than extents, so that one of them always starves.
    pub fn hammer() -> Self {
        let shares = [65, 20, 5, 5, 5];
        let space = |(number, share): (usize, &u64)| Space {
            byte: MAIN + number as u8,
            part_bytes: PART_BYTES.to_vec(),
            share: *share,
            is_reset: number > 0,
        };
        Self {
            pool_bytes: POOL_BYTES,
            segment_bytes: SEGMENT_BYTES,
            slots_max: None,
            spaces: shares.iter().enumerate().map(space).collect(),
            chains: 24,
            group: 4,
            shared_length: 6,
            length: 20,
            skewed: false,
            open_blocks_max: 4,
            quarantines: 0,
            meddling_per_mille: 5,
            arming_percent: 4,
            threads: 1,
            followers_of: None,
            keepers_percent: 0,
            stops: false,
        }
    }

    /// Any plan: one to eight namespaces, extents of one slot to some hundred, room for all namespaces or not.
    pub fn random(seed: u64) -> Self {
        let random = &mut Random::new(seed);
        let segment_bytes = (64 << 10) << random.below(5).min(random.below(5));
        let spaces: Vec<Space> =
            (0..1 + random.below(8)).map(|number| random_space(random, number as u8, segment_bytes)).collect();
        let parts = spaces.iter().map(|space| space.part_bytes.len() as u64).max().unwrap_or(1);
        let per_extent = spaces.iter().map(|space| space.slots_per_extent(segment_bytes)).max().unwrap_or(1);
        let most = (SLOTS_MAX / per_extent).min(BYTES_MAX / (parts * segment_bytes)).max(2);
        let extents = (2 + random.below(14)).min(most);
        let length = [4, 12, 20, 60][random.below(4) as usize];
        // Twice to four times as many blocks as fit: the pool is full, and what is missed is often stored anew.
        let keys = per_extent * extents * (2 + random.below(3));
        Self {
            pool_bytes: extents * parts * segment_bytes,
            segment_bytes,
            // More than needed, or a number that is used up before the segments are.
            slots_max: random.chance(80).then_some(8 * SLOTS_MAX),
            spaces,
            chains: (keys / length).clamp(6, SHARED_FROM / STRIDE - 1),
            group: 1 + random.below(6),
            shared_length: random.below(length),
            length,
            skewed: random.chance(50),
            open_blocks_max: [0, 4, 80][random.below(3) as usize],
            quarantines: if random.chance(15) { 2 } else { 0 },
            meddling_per_mille: [0, 1, 5][random.below(3) as usize],
            arming_percent: [0, 1, 4][random.below(3) as usize],
            threads: 1 + random.below(2),
            followers_of: random.chance(40).then_some(seed),
            keepers_percent: [0, 0, 40][random.below(3) as usize],
            stops: random.chance(60),
        }
    }

    /// Options of the pool.
    pub fn options(&self, shm_dir: &Path) -> OpenOptions {
        OpenOptions {
            shm_dir: shm_dir.to_owned(),
            pool_bytes: Some(self.pool_bytes),
            segment_bytes: Some(self.segment_bytes),
            slots_max: self.slots_max,
            ..OpenOptions::default()
        }
    }

    pub fn open(&self, shm_dir: &Path) -> Arc<Pool> {
        Pool::open(POOL_NAME, &self.options(shm_dir)).unwrap()
    }

    /// Keys of chain `chain`, head first.
    pub fn chain(&self, chain: u64) -> Vec<Key> {
        let number = |position: u64| {
            if position < self.shared_length {
                SHARED_FROM + chain / self.group * STRIDE + position
            } else {
                chain * STRIDE + position
            }
        };
        (0..self.length).map(|position| key(number(position))).collect()
    }

    pub fn any_chain(&self, random: &mut Random) -> Vec<Key> {
        let first = random.below(self.chains);
        let number = if self.skewed { first.min(random.below(self.chains)) } else { first };
        self.chain(number)
    }

    /// Number of a namespace, by their shares.
    pub fn any_space(&self, random: &mut Random) -> usize {
        let mut left = random.below(self.spaces.iter().map(|space| space.share).sum());
        for (number, space) in self.spaces.iter().enumerate() {
            if left < space.share {
                return number;
            }
            left -= space.share;
        }
        unreachable!("the shares add up")
    }
}

impl Space {
    /// The namespace in `pool`; `None` if a sibling holds the lock over namespaces for too long.
    pub fn of(&self, pool: &Pool) -> Option<Namespace> {
        match pool.namespace(&[self.byte; 32], 0, &self.part_bytes, "kill tests") {
            Ok(ns) => Some(ns),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
                None
            }
        }
    }

    fn slots_per_extent(&self, segment_bytes: u64) -> u64 {
        segment_bytes / self.part_bytes.iter().max().expect("a block has parts").next_multiple_of(64)
    }
}

fn random_space(random: &mut Random, number: u8, segment_bytes: u64) -> Space {
    let parts = [1, 1, 2, 3, 8][random.below(5) as usize];
    let slots = [1, 2, 3, 7, 16, 64, 100, 500][random.below(8) as usize];
    let largest = segment_bytes / slots;
    let bytes = |random: &mut Random| (largest * (25 + random.below(76)) / 100 / 8 * 8).max(64);
    let part_bytes = (0..parts).map(|part| if part == 0 { largest / 8 * 8 } else { bytes(random) }).collect();
    Space { byte: MAIN + number, part_bytes, share: 1 + random.below(20), is_reset: random.chance(70) }
}
