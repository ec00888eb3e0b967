//! What a client remembers of owners, for a few seconds.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pegaflow_engine::Result;
use redis::Value;

use super::names::OwnerRecord;
use super::store::{Batch, Store};
use crate::limits::DIRECTORY_OWNERS_MAX;

/// Records by number.
pub(super) struct Records {
    own_pool: u64,
    life: Duration,
    known: HashMap<u32, (Option<Arc<str>>, Instant)>,
}

impl Records {
    /// Those of `own_pool` are as good as none.
    pub(super) fn new(own_pool: u64, life: Duration) -> Self {
        Self { own_pool, life, known: HashMap::new() }
    }

    /// Read what is not known, or was known for too long, of these owners.
    pub(super) fn read(&mut self, store: &mut Store, owners: &HashSet<u32>) -> Result<()> {
        let now = Instant::now();
        let is_fresh = |owner: &u32| self.known.get(owner).is_some_and(|(_, read)| now - *read < self.life);
        let wanted: Vec<u32> =
            owners.iter().copied().filter(|owner| !is_fresh(owner)).take(DIRECTORY_OWNERS_MAX).collect();
        let mut batch = Batch::default();
        for owner in &wanted {
            let key = OwnerRecord::key(*owner);
            batch.add(&key, &[b"GET", key.as_bytes()]);
        }
        if batch.is_empty() {
            return Ok(());
        }
        if self.known.len() + wanted.len() > DIRECTORY_OWNERS_MAX {
            self.known.clear();
        }
        for (owner, value) in wanted.iter().zip(store.demand(&batch)?) {
            let record = match &value {
                Value::BulkString(text) => OwnerRecord::parse(text),
                _ => None,
            };
            let other = record.filter(|record| record.pool_id != self.own_pool);
            self.known.insert(*owner, (other.map(|record| record.address.into()), now));
        }
        Ok(())
    }

    /// Where an owner answers; `None` if it is dead, unknown or ourselves.
    pub(super) fn address(&self, owner: u32) -> Option<Arc<str>> {
        self.known.get(&owner).and_then(|(address, _)| address.clone())
    }
}
