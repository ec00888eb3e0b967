//! What every process of a pool may ask of its tier: where blocks are, that they come into memory, how it is doing.

use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::board::{Asking, Step, Wish};
use super::counters::Counter;
use super::segment::Segment;
use crate::error::{Error, Result};
use crate::key::Key;
use crate::limits::{SSD_BANDWIDTH_ASSUMED, SSD_FORGET_WAIT_MAX, SSD_REQUEST_KEYS_MAX, SSD_SILENCE_MAX, SSD_STALL_MAX};
use crate::shm::clock::boot_ms;
use crate::shm::core::Core;
use crate::shm::namespace::{Identity, Namespace};
use crate::shm::pool::Pool;
use crate::ssd::RecordId;
use crate::sync::{Acquire, Relaxed, SeqCst};

/// What the tier is at, in the low byte of its state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum TierState {
    /// Nobody leads it.
    #[default]
    None = 0,
    /// Its files are being opened or looked through.
    Recovering = 1,
    /// Blocks go to its files and come from there.
    Serving = 2,
    /// Its disks failed.
    Off = 3,
}

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Nowhere.
    Absent,
    /// In the pool.
    Memory,
    /// In a file, as far as is known without reading it.
    Ssd,
}

/// How a pool's tier is doing.
#[derive(Clone, Debug)]
pub struct TierFacts {
    /// What it is at.
    pub state: TierState,
    /// This process leads it.
    pub leads: bool,
    /// Why this process cannot lead.
    pub problem: Option<String>,
    /// Gauges and counters by name.
    pub numbers: Vec<(&'static str, u64)>,
}

impl Core {
    /// The tier's file, mapped when it is first seen. What cannot be used is said once, and then is not there.
    pub(crate) fn tier_segment(&self) -> Option<&Arc<Segment>> {
        if let Some(segment) = self.tier.segment.get() {
            return Some(segment);
        }
        match Segment::open(&self.place) {
            Ok(found) => found.map(|segment| self.tier.segment.get_or_init(|| Arc::new(segment))),
            Err(error) => {
                self.tier.complain(&error.to_string());
                None
            }
        }
    }

    /// What the tier is at; nothing if its leader is dead.
    pub(crate) fn tier_state(&self, segment: &Segment) -> TierState {
        let leader = segment.header().leader.load(SeqCst);
        if leader == 0 || self.is_dead(leader) {
            return TierState::None;
        }
        match segment.header().state.load(Acquire) as u8 {
            1 => TierState::Recovering,
            2 => TierState::Serving,
            3 => TierState::Off,
            _ => TierState::None,
        }
    }

    fn tier_works(&self, segment: &Segment) -> bool {
        matches!(self.tier_state(segment), TierState::Recovering | TierState::Serving)
    }

    /// Whether a leader is there that would answer soon. Only a hint: one that is stopped or waits for a disk is not
    /// dead.
    fn tier_answers(&self, segment: &Segment) -> bool {
        let alive_ms = segment.header().alive_ms.load(Relaxed);
        let silent = boot_ms().saturating_sub(alive_ms) > SSD_SILENCE_MAX.as_millis() as u64;
        alive_ms != 0 && !silent && self.tier_works(segment)
    }

    /// A block is leaving memory: count it if it is lost with that.
    pub(crate) fn note_victim(&self, identity: Identity, key: Key) {
        let Some(segment) = self.tier.segment.get() else { return };
        let ns = Namespace(identity.id);
        let Some(origin) = self.origin_of(ns) else { return };
        if let Some(served) = segment.served(self, ns, &origin)
            && served.identity == identity
            && !segment.is_hinted(tag_of(&origin.fingerprint, origin.group, key, served.epoch))
        {
            segment.header().add(Counter::SsdDropped, 1);
        }
    }

    /// Wait until the files have forgotten what was reset.
    pub(crate) fn wait_until_forgotten(&self, ns: Namespace, epoch: u64) -> Result<()> {
        let started = Instant::now();
        self.tier.wake();
        while let Some(segment) = self.lagging(ns, epoch) {
            if gives_up(self.tier_state(segment), started.elapsed()) {
                return Err(Error::busy(
                    "the blocks are reset for all processes, but the SSD tier has not forgotten them yet: look at its \
                     disks, and remove its files if the host goes down before it has",
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// The tier, if it is used for `ns` but its files have not forgotten what was before `epoch`.
    fn lagging(&self, ns: Namespace, epoch: u64) -> Option<&Segment> {
        let (segment, origin) = (self.tier_segment()?, self.origin_of(ns)?);
        (segment.is_used(origin.first) && segment.forgotten(origin.first) < epoch).then_some(segment)
    }
}

/// Whether a reset that was waited for so long is waited for no more: if the tier is off or nobody leads it, at once.
pub(super) fn gives_up(state: TierState, waited: Duration) -> bool {
    matches!(state, TierState::Off | TierState::None) || waited > SSD_FORGET_WAIT_MAX
}

/// What a record is looked up by.
pub(crate) fn tag_of(fingerprint: &[u64; 4], group: u32, key: Key, epoch: u64) -> u64 {
    let mut bytes = [0; 32];
    for (piece, word) in bytes.chunks_exact_mut(8).zip(fingerprint) {
        piece.copy_from_slice(&word.to_le_bytes());
    }
    RecordId { fingerprint: bytes, group, key }.tag(epoch)
}

impl Pool {
    /// Have blocks of a namespace, and of all groups of its fingerprint, written to the pool's tier and found there.
    /// `false` if the pool has none.
    pub fn use_ssd(&self, ns: Namespace) -> Result<bool> {
        self.core().check_usable()?;
        let (core, Some(segment)) = (self.core(), self.core().tier_segment()) else { return Ok(false) };
        let Some(origin) = core.origin_of(ns) else { return Ok(false) };
        let Some(row) = segment.namespaces().get(origin.first as usize) else { return Ok(false) };
        row.used.store(1, SeqCst);
        core.tier.wake();
        Ok(true)
    }

    /// Where each block is. Takes no lock.
    pub fn tiers(&self, ns: Namespace, keys: &[Key]) -> Result<Vec<Tier>> {
        let present = self.contains(ns, keys)?;
        let core = self.core();
        let served = core.tier_segment().filter(|segment| core.tier_works(segment)).and_then(|segment| {
            let origin = core.origin_of(ns)?;
            Some((segment, origin, segment.served(core, ns, &origin)?))
        });
        let on_ssd = |key: &Key| {
            served.as_ref().is_some_and(|(segment, origin, served)| {
                segment.is_hinted(tag_of(&origin.fingerprint, origin.group, *key, served.epoch))
            })
        };
        let tier = |(present, key)| match present {
            true => Tier::Memory,
            false if on_ssd(key) => Tier::Ssd,
            false => Tier::Absent,
        };
        Ok(present.into_iter().zip(keys).map(tier).collect())
    }

    /// Ask for blocks to come into memory; `None` if nobody serves that now.
    pub fn prefetch(
        &self,
        ns: Namespace,
        keys: &[Key],
        parent: Option<Key>,
        chained: bool,
    ) -> Result<Option<Prefetch>> {
        self.core().check_usable()?;
        let core = self.core();
        core.namespace_info(ns)?;
        let Some(segment) = core.tier_segment().filter(|segment| core.tier_answers(segment)) else { return Ok(None) };
        let keys = keys[..keys.len().min(SSD_REQUEST_KEYS_MAX)].to_vec();
        let count = keys.len();
        let asked = segment.ask(core, &Wish { namespace: ns, keys, parent, chained });
        core.tier.wake();
        Ok(asked.map(|asking| Prefetch {
            core: Arc::downgrade(self.shared_core()),
            segment: Arc::clone(segment),
            asking,
            keys: count,
        }))
    }

    /// How the pool's tier is doing; `None` if it has none.
    pub fn ssd(&self) -> Result<Option<TierFacts>> {
        self.core().check_usable()?;
        let core = self.core();
        let Some(segment) = core.tier_segment() else { return Ok(None) };
        let header = segment.header();
        let gauges = [
            ("zones_done", &header.zones_done),
            ("zones", &header.zones),
            ("records", &header.records),
            ("read_bytes_per_second", &header.read_bytes_per_second),
            ("queued_bytes", &header.queued_bytes),
        ];
        let mut numbers: Vec<_> = gauges.iter().map(|(name, word)| (*name, word.load(Relaxed))).collect();
        numbers.extend(header.counts());
        Ok(Some(TierFacts {
            state: core.tier_state(segment),
            leads: header.leader.load(SeqCst) == core.me.encode(),
            problem: core.tier.problem.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            numbers,
        }))
    }

    /// How many seconds `block_bytes` more bytes from SSD would take; `None` if they would not come.
    pub fn ssd_read_seconds(&self, block_bytes: u64) -> Result<Option<f64>> {
        self.core().check_usable()?;
        let core = self.core();
        let Some(segment) = core.tier_segment().filter(|segment| core.tier_answers(segment)) else { return Ok(None) };
        let header = segment.header();
        let since = header.waiting_since_ms.load(Relaxed);
        if since != 0 && boot_ms().saturating_sub(since) > SSD_STALL_MAX.as_millis() as u64 {
            return Ok(None);
        }
        let measured = Some(header.read_bytes_per_second.load(Relaxed)).filter(|bytes| *bytes > 0);
        let bytes = header.queued_bytes.load(Relaxed).saturating_add(block_bytes);
        Ok(Some(bytes as f64 / measured.unwrap_or(SSD_BANDWIDTH_ASSUMED) as f64))
    }
}

/// A request to the tier; withdrawn when it is dropped.
pub struct Prefetch {
    core: Weak<Core>,
    segment: Arc<Segment>,
    asking: Asking,
    keys: usize,
}

impl std::fmt::Debug for Prefetch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prefetch").field("asking", &self.asking).field("keys", &self.keys).finish_non_exhaustive()
    }
}

impl Prefetch {
    /// How many keys were asked for.
    pub fn keys(&self) -> usize {
        self.keys
    }

    /// How many were found so far.
    pub fn found(&self) -> usize {
        self.segment.found(self.asking).min(self.keys)
    }

    /// How many were found in all; `None` while more may come.
    pub fn poll(&self) -> Option<usize> {
        let Some(core) = self.core.upgrade() else { return Some(0) };
        let step = self.segment.step_of(self.asking);
        let waits = matches!(step, Some(Step::Asked | Step::Taken)) && core.tier_works(&self.segment);
        (!waits).then(|| if step.is_some() { self.found() } else { 0 })
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        if let Some(core) = self.core.upgrade()
            && core.is_member()
        {
            self.segment.withdraw(&core, self.asking);
            core.tier.wake();
        }
    }
}
