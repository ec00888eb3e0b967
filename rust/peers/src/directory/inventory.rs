//! What there is to register: the seam to the pool.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use pegaflow_engine::{BlockRef, Pool, Result, Sight, Survey};

use super::names::{block_hash, namespace_seed};

/// Blocks of one pool.
pub trait Inventory: Send + Sync {
    /// Random number of the pool: another pool has another.
    fn pool_id(&self) -> u64;

    /// Slots at most.
    fn slots_max(&self) -> u64;

    /// A walk over all slots, from the first.
    fn walk(&self) -> Box<dyn Walk>;

    /// Hash of a sealed block's name ([`block_hash`]); `None` if it is gone or none of others' business.
    fn hash_of(&self, block: BlockRef) -> Option<u64>;
}

/// A walk over a pool's slots.
pub trait Walk: Send {
    /// Go on over at most `slots_max` slots, as [`Pool::survey`].
    fn go_on(&mut self, slots_max: usize, see: &mut dyn FnMut(Sight) -> bool) -> Result<bool>;
}

/// A pool whose blocks are registered.
pub struct PoolInventory {
    pool: Arc<Pool>,
    /// Seeds by fingerprint and group.
    seeds: Mutex<HashMap<([u8; 32], u32), u64>>,
}

impl PoolInventory {
    /// All blocks of `pool`.
    pub fn new(pool: Arc<Pool>) -> Self {
        Self { pool, seeds: Mutex::default() }
    }
}

impl Inventory for PoolInventory {
    fn pool_id(&self) -> u64 {
        self.pool.pool_id()
    }

    fn slots_max(&self) -> u64 {
        self.pool.slots_max()
    }

    fn walk(&self) -> Box<dyn Walk> {
        Box::new(PoolWalk { pool: Arc::clone(&self.pool), survey: Survey::default() })
    }

    fn hash_of(&self, block: BlockRef) -> Option<u64> {
        let name = self.pool.block_name(block)?;
        let mut seeds = self.seeds.lock().unwrap_or_else(PoisonError::into_inner);
        let seed = *seeds
            .entry((name.fingerprint, name.group))
            .or_insert_with(|| namespace_seed(&name.fingerprint, name.group));
        Some(block_hash(seed, &name.key.to_bytes()))
    }
}

struct PoolWalk {
    pool: Arc<Pool>,
    survey: Survey,
}

impl Walk for PoolWalk {
    fn go_on(&mut self, slots_max: usize, see: &mut dyn FnMut(Sight) -> bool) -> Result<bool> {
        self.pool.survey(&mut self.survey, slots_max, see)
    }
}
