//! Counting: what was asked for and where it was found, what was stored, what was copied out.

use super::counters::Counter;
use super::curve::{Fate, Use, Uses};
use super::file::Traffic;
use super::name::{KeyHash, Salt};
use super::rows::TrafficNamespace;
use super::windows::Window;
use crate::error::{Error, Result};
use crate::key::Key;
use crate::shm::clock::boot_ms;
use crate::shm::core::Core;
use crate::shm::namespace::Namespace;
use crate::shm::pool::Pool;
use crate::sync::Relaxed;
use crate::tier::TierState;

/// Where the blocks of a prompt were found: positions in the list of their keys, each at least as large as the one
/// before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// Blocks before this one were not asked for: they were where they are needed.
    pub start: usize,
    /// From there to here they were in memory,
    pub ram: usize,
    /// to here they came from SSD,
    pub ssd: usize,
    /// and to here from other hosts.
    pub peer: usize,
    /// Blocks up to here were on SSD or on other hosts, and not here in time.
    pub late: usize,
}

/// Why the other blocks of a prompt were not found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Missed {
    /// Nobody has stored them, as far as is remembered.
    pub never_stored: u64,
    /// They were stored, and they or blocks before them have gone since.
    pub evicted: u64,
    /// They were stored under another fingerprint, or before a reset.
    pub reset: u64,
    /// They were elsewhere, and not here in time.
    pub late: u64,
    /// As `evicted`, and the SSD tier that may have them does not serve.
    pub tier_off: u64,
}

impl Pool {
    /// Count a prompt of these keys, once it is known what of it was found. `None` if this process keeps no statistics.
    pub fn note_prompt(&self, ns: Namespace, keys: &[KeyHash], prompt: &Prompt) -> Result<Option<Missed>> {
        let core = self.core();
        core.check_usable()?;
        let ends = [prompt.start, prompt.ram, prompt.ssd, prompt.peer, prompt.late, keys.len()];
        if !ends.is_sorted() {
            return Err(Error::invalid("positions in a prompt go backwards: give start <= ram <= ssd <= peer <= late"));
        }
        let here = Salt::of(&core.identity(ns)?);
        let anywhere = Salt::anywhere(core.namespace_row(ns)?.group.load(Relaxed));
        let (Some(traffic), Some(counters)) = (core.traffic(), core.counters_of(ns)) else { return Ok(None) };
        let mut missed = traffic.classify(keys, here, anywhere, prompt);
        if missed.evicted > 0 && core.tier_is_off() {
            (missed.tier_off, missed.evicted) = (missed.evicted, 0);
        }
        count(counters, keys.len(), prompt, &missed);
        let asked = (keys.len() - prompt.start) as u64;
        traffic.note_in_windows(boot_ms() / 1000, asked, keys[prompt.peer..].iter().map(|key| key.at(here)));
        core.note_in_curve(traffic, keys, here, prompt, core.block_bytes(ns)?);
        Ok(Some(missed))
    }

    /// Count blocks that were copied from the pool to where they are used.
    pub fn note_loaded(&self, ns: Namespace, blocks: u64) -> Result<()> {
        let core = self.core();
        core.check_usable()?;
        let block_bytes = core.block_bytes(ns)?;
        if let Some(counters) = core.counters_of(ns) {
            counters.add(Counter::Loaded, blocks);
            counters.add(Counter::LoadedBytes, blocks.saturating_mul(block_bytes));
        }
        Ok(())
    }

    /// What a cache without bounds would have found of late, over all processes; nothing if this one keeps no
    /// statistics.
    pub fn windows(&self) -> Result<Vec<Window>> {
        self.core().check_usable()?;
        Ok(self.core().traffic().map_or_else(Vec::new, |traffic| traffic.windows(boot_ms() / 1000).to_vec()))
    }
}

impl Core {
    pub(super) fn counters_of(&self, ns: Namespace) -> Option<&TrafficNamespace> {
        self.traffic()?.namespaces().get(ns.0 as usize)
    }

    fn tier_is_off(&self) -> bool {
        self.tier_segment().is_some_and(|segment| self.tier_state(segment) != TierState::Serving)
    }

    /// A block has become visible.
    pub(crate) fn note_stored(&self, ns: Namespace, key: &Key) {
        let (Some(traffic), Some(counters)) = (self.traffic(), self.counters_of(ns)) else { return };
        let (Ok(identity), Ok(row), Ok(block_bytes)) =
            (self.identity(ns), self.namespace_row(ns), self.block_bytes(ns))
        else {
            return;
        };
        counters.add(Counter::Stored, 1);
        counters.add(Counter::StoredBytes, block_bytes);
        let key = KeyHash::from(key);
        let hash = key.at(Salt::of(&identity));
        traffic.remember([hash, key.at(Salt::anywhere(row.group.load(Relaxed)))]);
        if hash < traffic.threshold()
            && let Some(lock) = self.try_lock(&traffic.header().curve_lock)
        {
            traffic.note_new(&lock, hash, block_bytes);
        }
    }

    fn note_in_curve(&self, traffic: &Traffic, keys: &[KeyHash], here: Salt, prompt: &Prompt, block_bytes: u64) {
        let threshold = traffic.threshold();
        let fate = |position| match position {
            _ if position < prompt.start => Fate::NotAsked,
            _ if position < prompt.ram => Fate::Found,
            _ => Fate::Missed,
        };
        let hashes = keys.iter().map(|key| key.at(here)).enumerate();
        let blocks: Vec<Use> = hashes
            .filter(|(_, hash)| *hash < threshold)
            .map(|(position, hash)| Use { hash, fate: fate(position) })
            .collect();
        let asked = [keys.len() - prompt.ram, prompt.ram - prompt.start].map(|blocks| blocks as u64);
        let uses = Uses { blocks: &blocks, asked, block_bytes };
        // Nothing that the lock guards is changed. While somebody has it, prompts are left out whatever is in them, or
        // what is counted and what is followed would not be of the same prompts.
        if blocks.is_empty() && traffic.header().curve_lock.load(Relaxed) == 0 {
            traffic.note_asked(&uses);
            return;
        }
        match self.try_lock(&traffic.header().curve_lock) {
            Some(lock) => traffic.note_uses(&lock, &uses),
            None => {
                traffic.header().curve_skipped.fetch_add(1, Relaxed);
            }
        }
    }
}

impl Traffic {
    /// Why `keys[prompt.peer..]` were not found. A block is stored after the one before it, so those that were stored
    /// once are in front, and where they end is found by halving.
    fn classify(&self, keys: &[KeyHash], here: Salt, anywhere: Salt, prompt: &Prompt) -> Missed {
        let rest = &keys[prompt.late..];
        let evicted = rest.partition_point(|key| self.remembers(key.at(here)));
        let elsewhere = &rest[evicted..];
        let reset = elsewhere.partition_point(|key| self.remembers(key.at(anywhere)));
        Missed {
            never_stored: (elsewhere.len() - reset) as u64,
            evicted: evicted as u64,
            reset: reset as u64,
            late: (prompt.late - prompt.peer) as u64,
            tier_off: 0,
        }
    }
}

fn count(counters: &TrafficNamespace, keys: usize, prompt: &Prompt, missed: &Missed) {
    let counts = [
        (Counter::Prompts, 1),
        (Counter::Asked, (keys - prompt.start) as u64),
        (Counter::HitRam, (prompt.ram - prompt.start) as u64),
        (Counter::HitSsd, (prompt.ssd - prompt.ram) as u64),
        (Counter::HitPeer, (prompt.peer - prompt.ssd) as u64),
        (Counter::MissNever, missed.never_stored),
        (Counter::MissEvicted, missed.evicted),
        (Counter::MissReset, missed.reset),
        (Counter::MissLate, missed.late),
        (Counter::MissOff, missed.tier_off),
    ];
    counts.into_iter().for_each(|(counter, count)| counters.add(counter, count));
}
