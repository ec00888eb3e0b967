//! Counters of one namespace: words that only rise.

use super::rows::{COUNTERS, TrafficNamespace};
use crate::counters::counters;

counters! {
    of TrafficNamespace;
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
    /// Blocks that were evicted from memory.
    Evicted = "evicted_blocks",
    /// Blocks that were to be stored and got no slot.
    Refused = "refused_blocks",
    /// Segments that could not be made.
    GrowFailures = "grow_failures",
}
