//! Counters of one namespace: words that only rise.

use super::rows::{COUNTERS, TrafficNamespace};
use crate::sync::Relaxed;

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $name:ident = $label:literal,)*) => {
        /// One counter; the number is its place in the row.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Counter {
            $($(#[doc = $doc])* $name,)*
        }

        /// Names of the counters, in the order of their places.
        pub(crate) const NAMES: &[&str] = &[$($label,)*];
    };
}

counters! {
    /// Prompts that were looked for.
    Prompts = "prompts",
    /// Their blocks.
    Asked = "blocks_asked",
    /// Of these: found in memory,
    HitRam = "hit_ram",
    /// brought from SSD in time,
    HitSsd = "hit_ssd",
    /// brought from another host in time,
    HitPeer = "hit_peer",
    /// never stored, as far as is remembered,
    MissNever = "miss_never_stored",
    /// stored once and evicted since, or behind a block that was,
    MissEvicted = "miss_evicted",
    /// stored under another fingerprint or before a reset,
    MissReset = "miss_reset",
    /// on SSD or another host, and not here when the wait was over,
    MissLate = "miss_late",
    /// evicted, and the SSD tier that may have them does not serve.
    MissOff = "miss_tier_off",
    /// Blocks that became visible in memory, whoever brought them.
    Stored = "stored_blocks",
    /// Their bytes.
    StoredBytes = "stored_bytes",
    /// Blocks that were copied to where they are used.
    Loaded = "loaded_blocks",
    /// Their bytes.
    LoadedBytes = "loaded_bytes",
}

const _: () = assert!(NAMES.len() <= COUNTERS);

impl TrafficNamespace {
    /// Count.
    pub(crate) fn add(&self, counter: Counter, count: u64) {
        if count > 0 {
            self.counters[counter as usize].fetch_add(count, Relaxed);
        }
    }

    /// Names and values.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        NAMES.iter().zip(&self.counters).map(|(name, word)| (*name, word.load(Relaxed)))
    }
}
