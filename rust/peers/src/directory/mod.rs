//! Who has what, in a Redis or Valkey that is there already: owners register the blocks of their pools, clients ask
//! which owners are worth asking. `docs/directory.md` has names, commands and what each failure leaves.

mod asker;
mod heartbeat;
mod inventory;
mod ledger;
mod names;
mod owner;
mod records;
mod repair;
mod slots;
mod store;
mod url;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pegaflow_engine::Result;

pub use asker::{Answer, DirectoryQuery};
pub use inventory::{Inventory, PoolInventory, Walk};
pub use names::{block_hash, namespace_seed};
pub use url::DirectoryUrl;

use crate::limits::{
    DIRECTORY_BUCKET_ENTRIES_MAX, DIRECTORY_DEAD_AFTER, DIRECTORY_RECORD_LIFE, DIRECTORY_REFRESH,
    DIRECTORY_REPAIRS_PER_SECOND,
};
use asker::Asker;
use owner::Owner;

/// How often things happen, and how much is too much; tests are in more of a hurry.
#[derive(Clone, Debug)]
pub struct DirectoryTuning {
    /// Pause between two refreshes of the owner's record, and how long a client uses what it knows of owners.
    pub refresh: Duration,
    /// How long a record stays without one.
    pub record_life: Duration,
    /// Entries of an owner without a record are taken away after that.
    pub dead_after: Duration,
    /// Blocks that are registered again at least.
    pub repairs_per_second: f64,
    /// Entries of a bucket on average from which on finer buckets are made.
    pub bucket_entries_max: u32,
}

impl Default for DirectoryTuning {
    fn default() -> Self {
        Self {
            refresh: DIRECTORY_REFRESH,
            record_life: DIRECTORY_RECORD_LIFE,
            dead_after: DIRECTORY_DEAD_AFTER,
            repairs_per_second: DIRECTORY_REPAIRS_PER_SECOND,
            bucket_entries_max: DIRECTORY_BUCKET_ENTRIES_MAX,
        }
    }
}

/// How registering goes.
#[derive(Clone, Debug, Default)]
pub struct OwnerFacts {
    /// The store takes what is written.
    pub up: bool,
    /// Why not.
    pub problem: Option<String>,
    /// Number of the pool in the store.
    pub number: u32,
    /// Blocks that are registered, or about to be.
    pub blocks: u64,
    /// Everything there was when the last pass began is registered.
    pub complete: bool,
    /// How often everything was registered anew, the first time included.
    pub anew: u64,
    /// Registrations written, without those of repairs.
    pub written: u64,
    /// Removals written.
    pub removed: u64,
    /// Wrong entries that repairs took away.
    pub repaired: u64,
}

/// How asking goes.
#[derive(Clone, Debug, Default)]
pub struct AskerFacts {
    /// The store answered when it was last asked, or was not asked yet.
    pub up: bool,
    /// Why not.
    pub problem: Option<String>,
    /// Questions, and looks who is there, that the store has answered.
    pub answered: u64,
    /// Questions that were sent.
    pub finds: u64,
    /// Keys in them.
    pub keys: u64,
    /// Keys for which some owner was named.
    pub named: u64,
    /// Questions that were not answered in time or at all.
    pub failed: u64,
    /// Questions that were not asked, since the store is down or too many are waiting.
    pub skipped: u64,
}

/// A process's connection to the directory.
pub struct Directory {
    inventory: Arc<dyn Inventory>,
    url: DirectoryUrl,
    tuning: DirectoryTuning,
    owner: Mutex<Option<Owner>>,
    asker: Asker,
}

impl Directory {
    /// Use the store at `url` for the pool of `inventory`. Connects later, in the background.
    pub fn open(inventory: Arc<dyn Inventory>, url: &str, tuning: DirectoryTuning) -> Result<Self> {
        let url = DirectoryUrl::parse(url)?;
        let asker = Asker::start(url.clone(), inventory.pool_id(), tuning.refresh)?;
        Ok(Self { inventory, url, tuning, owner: Mutex::default(), asker })
    }

    /// Register the pool's blocks as those of whoever answers at `address` (HOST:PORT), until it is told otherwise.
    /// `None`: they are no longer to be found.
    pub fn announce(&self, address: Option<&str>) -> Result<()> {
        let start = |address| Owner::start(Arc::clone(&self.inventory), self.url.clone(), address, self.tuning.clone());
        let mut owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        // The old one takes its leave first.
        drop(owner.take());
        *owner = address.map(start).transpose()?;
        Ok(())
    }

    /// Ask who has the blocks of these hashes ([`block_hash`]), a list per question. Never waits; `None`: the store is
    /// not worth asking now.
    pub fn find(&self, questions: Vec<Vec<u64>>) -> Option<DirectoryQuery> {
        self.asker.find(questions)
    }

    /// Addresses of some of the owners that were there a few seconds ago, other than this pool; empty while the store
    /// is not. Never waits.
    pub fn hosts(&self) -> Vec<Arc<str>> {
        self.asker.hosts()
    }

    /// How registering goes; `None` if nothing is registered.
    pub fn owner_facts(&self) -> Option<OwnerFacts> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(Owner::facts)
    }

    /// How asking goes.
    pub fn asker_facts(&self) -> AskerFacts {
        self.asker.facts()
    }

    /// The store, without its password.
    pub fn url(&self) -> String {
        self.url.to_string()
    }
}
