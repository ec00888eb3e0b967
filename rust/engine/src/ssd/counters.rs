//! What a store has done, for metrics.

/// Counts since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Records whose write was reported complete.
    pub records_written: u64,
    /// Their bytes, headers and padding included.
    pub bytes_written: u64,
    /// Records that were queued and lost to a failed write.
    pub records_lost: u64,
    /// Records that were not written since their bytes had changed in memory.
    pub records_refused: u64,
    /// Records that were read whole.
    pub records_read: u64,
    /// Their bytes, headers and padding included.
    pub bytes_read: u64,
    /// Reads of records that were overwritten meanwhile.
    pub reads_evicted: u64,
    /// Reads whose header or bytes were not right.
    pub reads_damaged: u64,
    /// Reads that failed or had no answer in time.
    pub reads_failed: u64,
    /// Zones emptied to make room, and the records in them.
    pub zones_evicted: u64,
    /// See [`Self::zones_evicted`].
    pub records_evicted: u64,
    /// Directories that were turned off, for writing or altogether.
    pub turned_off: u64,
}
