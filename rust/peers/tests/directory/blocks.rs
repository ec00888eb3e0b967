//! A pool that exists only as a list of blocks.

use std::collections::HashSet;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pegaflow_engine::{BlockRef, Result, Sight};
use pegaflow_peers::directory::{Inventory, Walk};

#[derive(Default)]
struct Slots {
    /// Generation and hash of each slot.
    slots: Vec<(u32, Option<u64>)>,
    ever: HashSet<u64>,
}

pub(crate) struct Blocks {
    pool_id: u64,
    slots: Arc<Mutex<Slots>>,
}

impl Blocks {
    /// A pool of so many slots, all of them empty.
    pub(crate) fn new(pool_id: u64, slots: usize) -> Self {
        let slots = Slots { slots: vec![(0, None); slots], ..Default::default() };
        Self { pool_id, slots: Arc::new(Mutex::new(slots)) }
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap()
    }

    /// Put a block, or nothing, in a slot. Returns what was there.
    pub(crate) fn put(&self, slot: usize, hash: Option<u64>) -> Option<u64> {
        let mut slots = self.slots();
        slots.ever.extend(hash);
        let (generation, held) = &mut slots.slots[slot];
        *generation += 1;
        std::mem::replace(held, hash)
    }

    /// Fill slots from the first with blocks.
    pub(crate) fn fill(&self, hashes: impl IntoIterator<Item = u64>) {
        for (slot, hash) in hashes.into_iter().enumerate() {
            self.put(slot, Some(hash));
        }
    }

    /// Do something while the first so many slots change hands all the time.
    pub(crate) fn under_load<T>(&self, slots: usize, work: impl FnOnce() -> T) -> T {
        std::thread::scope(|scope| {
            let (stop, stopped) = channel::<()>();
            scope.spawn(move || {
                let mut number = 1_000_000;
                while stopped.recv_timeout(Duration::from_millis(1)) == Err(RecvTimeoutError::Timeout) {
                    for _ in 0..5 {
                        self.put(number as usize * 7919 % slots, Some(crate::talk::block(number)));
                        number += 1;
                    }
                }
            });
            let done = work();
            drop(stop);
            done
        })
    }

    /// What is there now.
    pub(crate) fn held(&self) -> HashSet<u64> {
        self.slots().slots.iter().filter_map(|(_, hash)| *hash).collect()
    }

    /// Whether a block has ever been there.
    pub(crate) fn had(&self, hash: u64) -> bool {
        self.slots().ever.contains(&hash)
    }
}

impl Inventory for Blocks {
    fn pool_id(&self) -> u64 {
        self.pool_id
    }

    fn slots_max(&self) -> u64 {
        self.slots().slots.len() as u64
    }

    fn walk(&self) -> Box<dyn Walk> {
        Box::new(Steps { slots: Arc::clone(&self.slots), at: 0 })
    }

    fn hash_of(&self, block: BlockRef) -> Option<u64> {
        let (generation, hash) = self.slots().slots[block.slot() as usize];
        hash.filter(|_| generation == block.generation())
    }
}

struct Steps {
    slots: Arc<Mutex<Slots>>,
    at: usize,
}

impl Walk for Steps {
    fn go_on(&mut self, slots_max: usize, see: &mut dyn FnMut(Sight) -> bool) -> Result<bool> {
        for _ in 0..slots_max {
            let slot = self.at;
            let Some((generation, hash)) = self.slots.lock().unwrap().slots.get(slot).copied() else {
                self.at = 0;
                return Ok(true);
            };
            self.at += 1;
            let block = BlockRef(u64::from(generation) << 32 | slot as u64);
            if !see(hash.map_or(Sight::Nothing(slot as u32..slot as u32 + 1), |_| Sight::Block(block))) {
                break;
            }
        }
        Ok(false)
    }
}
