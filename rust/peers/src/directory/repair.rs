//! Registers everything again, slowly and for ever: what got lost comes back, buckets do not expire, and entries of
//! owners that are gone for long are taken away.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use pegaflow_engine::Result;
use redis::Value;

use super::ledger::Ledger;
use super::names::{Layout, OwnerRecord, member};
use super::owner::{add_to, remove_from};
use super::store::{Batch, Store};
use crate::limits::{
    DIRECTORY_BATCH_MAX, DIRECTORY_OWNERS_MAX, DIRECTORY_REPAIR_BUCKETS, DIRECTORY_REPAIR_TIME,
    DIRECTORY_SCAN_SLOTS_MAX,
};

/// Entries of a bucket that are looked at.
const ENTRIES_MAX: &[u8] = b"1023";
/// Blocks that are registered again at a time.
const STEP: usize = 256;

/// Where the repair is.
pub(super) struct Repair {
    slot: u32,
    /// Blocks that may be registered again now.
    credit: f64,
    last: Instant,
    /// How often all blocks were registered again.
    round: u64,
    /// Owners without a record, and since when that is known.
    missing: HashMap<u32, Instant>,
    /// Entries of our own that were seen.
    own: HashSet<u64>,
}

impl Default for Repair {
    fn default() -> Self {
        let (missing, own) = (HashMap::new(), HashSet::new());
        Self { slot: 0, credit: 0.0, last: Instant::now(), round: 0, missing, own }
    }
}

impl Repair {
    /// Go on as far as the rate allows. Returns how many wrong entries were taken away.
    pub(super) fn step(
        &mut self,
        store: &mut Store,
        ledger: &Ledger,
        layout: Layout,
        number: u32,
        rate_min: f64,
        dead_after: Duration,
    ) -> Result<u64> {
        let now = Instant::now();
        let rate = rate_min.max(ledger.blocks() as f64 / DIRECTORY_REPAIR_TIME.as_secs_f64());
        self.credit = (self.credit + rate * (now - self.last).as_secs_f64()).min(DIRECTORY_BATCH_MAX as f64);
        self.last = now;
        if ledger.blocks() == 0 || self.credit < STEP.min(ledger.blocks()) as f64 {
            return Ok(0);
        }
        let hashes = self.next_blocks(ledger);
        self.credit -= hashes.len() as f64;
        let strangers = self.register_again(store, layout, number, &hashes)?;
        let mut removed = self.remove_dead(store, layout, &strangers, dead_after)?;
        if self.slot == 0 || self.own.len() >= DIRECTORY_BATCH_MAX {
            removed += self.remove_own(store, ledger, layout, number)?;
        }
        Ok(removed)
    }

    fn next_blocks(&mut self, ledger: &Ledger) -> Vec<u64> {
        let mut hashes = Vec::with_capacity(STEP);
        for _ in 0..DIRECTORY_SCAN_SLOTS_MAX {
            if self.slot >= ledger.end() {
                (self.slot, self.round) = (0, self.round.wrapping_add(1));
                break;
            }
            hashes.extend(ledger.hash_at(self.slot));
            self.slot += 1;
            if hashes.len() == STEP {
                break;
            }
        }
        hashes
    }

    /// Write the blocks, and read some of their buckets. Returns entries of others: owner, block, member.
    fn register_again(
        &mut self,
        store: &mut Store,
        layout: Layout,
        number: u32,
        hashes: &[u64],
    ) -> Result<Vec<(u32, u64, Vec<u8>)>> {
        let (mut batch, mut looks) = (Batch::default(), Vec::new());
        for hash in hashes {
            add_to(&mut batch, layout, *hash, number);
            // Other buckets in each round, so that every one has its turn.
            if hash.wrapping_add(self.round) % DIRECTORY_REPAIR_BUCKETS == 0 {
                looks.push((batch.len(), *hash));
                let key = layout.bucket_key(*hash);
                batch.add(&key, &[b"ZRANGE", key.as_bytes(), b"0", ENTRIES_MAX]);
            }
        }
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let values = store.demand(&batch)?;
        let mut strangers = Vec::new();
        for (position, hash) in looks {
            let Value::Array(members) = &values[position] else { continue };
            for value in members {
                let Value::BulkString(bytes) = value else { continue };
                match layout.read_member(hash, bytes) {
                    Some((block, owner)) if owner == number => {
                        self.own.insert(block);
                    }
                    Some((block, owner)) => strangers.push((owner, block, bytes.clone())),
                    None => {}
                }
            }
        }
        Ok(strangers)
    }

    fn remove_dead(
        &mut self,
        store: &mut Store,
        layout: Layout,
        strangers: &[(u32, u64, Vec<u8>)],
        dead_after: Duration,
    ) -> Result<u64> {
        let owners: HashSet<u32> = strangers.iter().map(|(owner, ..)| *owner).collect();
        let owners: Vec<u32> = owners.into_iter().take(DIRECTORY_OWNERS_MAX).collect();
        let mut batch = Batch::default();
        for owner in &owners {
            let key = OwnerRecord::key(*owner);
            batch.add(&key, &[b"EXISTS", key.as_bytes()]);
        }
        if batch.is_empty() {
            return Ok(0);
        }
        if self.missing.len() > DIRECTORY_OWNERS_MAX {
            self.missing.clear();
        }
        let (values, mut dead) = (store.demand(&batch)?, HashSet::new());
        for (owner, value) in owners.iter().zip(values) {
            if value != Value::Int(0) {
                self.missing.remove(owner);
            } else if self.missing.entry(*owner).or_insert_with(Instant::now).elapsed() >= dead_after {
                dead.insert(*owner);
            }
        }
        let mut batch = Batch::default();
        for (_, block, bytes) in strangers.iter().filter(|(owner, ..)| dead.contains(owner)) {
            remove_from(&mut batch, layout, *block, bytes);
        }
        send(store, &batch)
    }

    /// Entries of ours whose blocks are gone: an earlier process of the pool wrote them.
    fn remove_own(&mut self, store: &mut Store, ledger: &Ledger, layout: Layout, number: u32) -> Result<u64> {
        ledger.retain_absent(layout, &mut self.own);
        let mut batch = Batch::default();
        for block in self.own.drain() {
            remove_from(&mut batch, layout, block, &member(block, number));
        }
        send(store, &batch)
    }
}

/// Write removals; returns how many there were.
fn send(store: &mut Store, batch: &Batch) -> Result<u64> {
    if !batch.is_empty() {
        store.demand(batch)?;
    }
    Ok(batch.len() as u64)
}
