//! What there is to register: the seam to the pool.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use pegaflow_engine::{BlockRef, Pool, Result, Sight, Survey};

use super::names::{block_hash, namespace_seed};

/// How the fingerprints end whose blocks only the process that saves them can name.
const PRIVATE_MARK: [u8; 8] = *b"private\n";

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
        let name = self.pool.block_name(block).filter(|name| !name.fingerprint.ends_with(&PRIVATE_MARK))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use pegaflow_engine::{Key, OpenOptions};

    #[test]
    fn blocks_of_private_namespaces_are_nobodys_business() {
        let shm_dir = std::env::temp_dir().join(format!("pega-inventory-{}", std::process::id()));
        std::fs::create_dir(&shm_dir).unwrap();
        let options = OpenOptions { shm_dir: shm_dir.clone(), pool_bytes: Some(4 << 20), ..OpenOptions::default() };
        let pool = Pool::open("inventory", &options).unwrap();
        let inventory = PoolInventory::new(Arc::clone(&pool));
        let shared = [7; 32];
        let mut private = shared;
        private[24..].copy_from_slice(&PRIVATE_MARK);
        for (fingerprint, is_told) in [(shared, true), (private, false)] {
            let ns = pool.namespace(&fingerprint, 0, &[4096], "test").unwrap();
            let key = Key::new(b"key").unwrap();
            let block = loop {
                let reserved = pool.reserve(ns, &[key], None, true).unwrap();
                if let Some((_, block)) = reserved.first() {
                    break *block;
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
            };
            pool.mark_written(0, &[block], None).unwrap();
            assert_eq!(pool.publish(&[block]).unwrap(), 1);
            assert_eq!(inventory.hash_of(block).is_some(), is_told);
        }
        drop((inventory, pool));
        std::fs::remove_dir_all(shm_dir).unwrap();
    }
}
