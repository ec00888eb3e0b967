//! Finding a value: by the hash of its key, then by the key itself.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_128;

use crate::error::{Error, Result};
use crate::key::{BlockRef, Key};
use crate::shm::core::Core;
use crate::sync::Acquire;

use super::bytes;
use super::classes::HEAD;
use super::patience::Patience;
use super::record::{RECORD_BYTES, Record};
use super::store::Inner;
use super::value::Value;

/// What is stored under the hash of a key.
pub(super) enum Found<'a> {
    Nothing,
    /// A value of another key with the same hash.
    Other,
    Value(Pinned<'a>, Record),
    /// Something that is no value of this format.
    Damaged(Pinned<'a>, Error),
}

/// A pin on a block, given back when dropped.
pub(super) struct Pinned<'a> {
    pub(super) core: &'a Core,
    pub(super) block: BlockRef,
}

impl<'a> Pinned<'a> {
    /// Pin a sealed block; `None` if it is not sealed any more.
    pub(super) fn new(core: &'a Core, block: BlockRef) -> Option<Self> {
        // Made only of a pin of one's own: dropping it gives one back.
        core.pin(block).then(|| Self { core, block })
    }

    /// Bytes in use of the whole block.
    pub(super) fn total_bytes(&self) -> usize {
        self.core.control.slot(self.block.slot()).map_or(0, |header| header.used_bytes.load(Acquire) as usize)
    }

    /// The record at the start of the block.
    pub(super) fn record(&self) -> Result<Record> {
        let total = self.total_bytes();
        Record::decode(bytes::head_bytes(self.core, self.block, total)?)
            .filter(|record| record.total_bytes() == total)
            .ok_or_else(|| Error::corrupt("a slot of the pool does not begin with a value: remove its key"))
    }

    fn has_key(&self, record: &Record, key: &str) -> Result<bool> {
        Ok(record.key_bytes == key.len() && bytes::has_text(self.core, self.block, RECORD_BYTES, key.as_bytes())?)
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        if self.core.is_member()
            && let Err(error) = self.core.unpin(self.block)
        {
            log::error!("pegaflow: {error}");
        }
    }
}

/// Name of a value's block. Two keys of one hash are told apart by their text.
pub(super) fn hash_of(key: &str) -> Key {
    Key::new(&xxh3_128(key.as_bytes()).to_le_bytes()).expect("16 bytes are a key")
}

impl Inner {
    /// The value of `key`, pinned.
    pub(super) fn find(&self, hash: &Key, key: &str) -> Result<Found<'_>> {
        let core = self.core();
        let identity = core.identity(self.classes.namespace(HEAD))?;
        let mut patience = Patience::default();
        loop {
            let pinned = match core.find_surely(&identity, hash) {
                Some(None) => return Ok(Found::Nothing),
                Some(Some(block)) => Pinned::new(core, block),
                None => None,
            };
            // Without a pin it was replaced or removed just now, or a writer is in the way: look again.
            let Some(pinned) = pinned else {
                patience.wait()?;
                continue;
            };
            let record = pinned.record().and_then(|record| Ok(pinned.has_key(&record, key)?.then_some(record)));
            return Ok(match record {
                Ok(Some(record)) => Found::Value(pinned, record),
                Ok(None) => Found::Other,
                Err(error) => Found::Damaged(pinned, error),
            });
        }
    }

    pub(super) fn contains(&self, key: &str) -> Result<bool> {
        match self.find(&hash_of(key), key)? {
            Found::Value(..) => Ok(true),
            Found::Nothing | Found::Other => Ok(false),
            Found::Damaged(_, error) => Err(error),
        }
    }

    pub(super) fn get(this: &Arc<Self>, key: &str) -> Result<Option<Value>> {
        this.stats.gets.add(1);
        match this.find(&hash_of(key), key)? {
            Found::Value(pinned, record) => {
                this.stats.hits.add(1);
                this.core().stamp_chain(&[pinned.block]);
                Ok(Some(Value::new(this, pinned, record)))
            }
            Found::Nothing | Found::Other => Ok(None),
            Found::Damaged(_, error) => Err(error),
        }
    }

    pub(super) fn remove(this: &Arc<Self>, key: &str) -> Result<Option<Value>> {
        let hash = hash_of(key);
        let mut patience = Patience::default();
        loop {
            let (pinned, record) = match this.find(&hash, key)? {
                Found::Value(pinned, record) => (pinned, Ok(record)),
                Found::Damaged(pinned, error) => (pinned, Err(error)),
                Found::Nothing | Found::Other => return Ok(None),
            };
            if this.core().expel(pinned.block) {
                this.stats.removed.add(1);
                return record.map(|record| Some(Value::new(this, pinned, record)));
            }
            // Somebody replaced or removed it, or its lock could not be had in time.
            drop(pinned);
            patience.wait()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot_space::SlotSpace;
    use crate::{OpenOptions, Pool};

    #[test]
    fn who_comes_too_late_to_pin_a_value_takes_nobody_elses_pin() {
        let options = OpenOptions { pool_bytes: Some(1 << 20), private: true, ..OpenOptions::default() };
        let pool = Pool::open("p", &options).expect("a private pool");
        let core = pool.core();
        let ns = pool.namespace(&[1; 32], 0, &[512], "test").expect("a namespace");
        core.grow(ns).expect("room");
        let key = Key::new(&[7; 16]).expect("a key");
        let block = pool.reserve(ns, &[key], None, false).expect("a namespace")[0].1;
        pool.mark_written(0, &[block], None).expect("reserved");
        assert_eq!(pool.publish(&[block]).expect("written"), 1);
        let held = Pinned::new(core, block).expect("sealed");
        assert!(core.expel(block));
        assert!(Pinned::new(core, block).is_none());
        assert!(core.is_readable(block), "still held");
        drop(held);
        assert!(!core.is_readable(block));
    }
}
