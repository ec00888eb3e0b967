//! What the tier has done, over all leaders: words of its header that only rise.

use super::rows::{COUNTERS, TierHeader};
use crate::counters::counters;
use crate::sync::Relaxed;

counters! {
    of TierHeader;
    /// Blocks whose write was reported complete.
    SpilledBlocks = "spilled_blocks",
    /// Their bytes.
    SpilledBytes = "spilled_bytes",
    /// Blocks that were on their way when a write failed.
    SpillLost = "spill_lost",
    /// Blocks that were not written since their bytes had changed in memory.
    SpillRefused = "spill_refused",
    /// Blocks that were read whole.
    ReadBlocks = "read_blocks",
    /// Their bytes.
    ReadBytes = "read_bytes",
    /// Blocks asked for while they were being read already.
    ReadJoined = "read_joined",
    /// Blocks that a hint spoke of, and that were not there.
    ReadMissed = "read_missed",
    /// Reads of records that were overwritten meanwhile.
    ReadEvicted = "read_evicted",
    /// Reads whose header or bytes were not right.
    ReadDamaged = "read_damaged",
    /// Reads that failed or had no answer in time.
    ReadFailed = "read_failed",
    /// Blocks that were read and could not be published.
    ReadDropped = "read_dropped",
    /// Longest time from a request to its answer.
    ReadWaitMsMax = "read_wait_ms_max",
    /// Requests taken.
    Requests = "requests",
    /// Requests for which there was no place.
    RequestsRefused = "requests_refused",
    /// Records that made room for others.
    RecordsEvicted = "records_evicted",
    /// Hints for which there was no place.
    HintsDropped = "hints_dropped",
    /// Blocks that were evicted from memory and are not on SSD.
    SsdDropped = "ssd_dropped",
    /// Resets of namespaces that the files have forgotten.
    Resets = "resets",
    /// Directories that were turned off, for writing or altogether.
    TurnedOff = "turned_off",
}

impl TierHeader {
    /// Note a high-water mark.
    pub(crate) fn raise(&self, counter: Counter, value: u64) {
        self.counters[counter as usize].fetch_max(value, Relaxed);
    }
}
