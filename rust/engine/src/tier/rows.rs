//! Records of the tier's file, all fields atomic. `docs/ssd-tier.md`, section 2.

use crate::limits::SSD_REQUEST_KEYS_MAX;
use crate::shm::rows::Shared;
use crate::sync::{AtomicU64, SpareWord};

/// Counters that have a place.
pub(crate) const COUNTERS: usize = 32;
/// Tags of one bucket.
pub(crate) const BUCKET_TAGS: usize = 8;
/// Words of a key: four of bytes, and how many bytes they are.
pub(crate) const KEY_WORDS: usize = 5;

/// First page. `fixed` never changes after creation and is covered by its checksum.
#[repr(C, align(64))]
pub(crate) struct TierHeader {
    pub(crate) fixed: [SpareWord; 16],
    /// Member that leads; 0 for nobody.
    pub(crate) leader: AtomicU64,
    /// `term << 8 | state`.
    pub(crate) state: AtomicU64,
    /// Which files `forgotten` of the namespaces speaks of.
    pub(crate) files: AtomicU64,
    /// Zones that recovery has looked at.
    pub(crate) zones_done: AtomicU64,
    pub(crate) zones: AtomicU64,
    pub(crate) records: AtomicU64,
    /// Of late; 0: not known.
    pub(crate) read_bytes_per_second: AtomicU64,
    /// Asked for and not in memory yet.
    pub(crate) queued_bytes: AtomicU64,
    /// Boot clock: since when no read has ended though some are on their way; 0: none is.
    pub(crate) waiting_since_ms: AtomicU64,
    /// Boot clock: the leader's last look around; 0: it is at something that may take long.
    pub(crate) alive_ms: AtomicU64,
    /// Raised by whoever has asked, so that the leader need not look at all requests.
    pub(crate) asked: AtomicU64,
    pub(crate) counters: [AtomicU64; COUNTERS],
    pub(crate) spare: [SpareWord; 453],
}

/// What the tier knows of the namespace of the same number.
#[repr(C, align(32))]
pub(crate) struct TierNamespace {
    /// Not 0: its blocks go to the files.
    pub(crate) used: AtomicU64,
    /// The pool's epoch up to which the files have forgotten; 0 is as good as 1, the first.
    pub(crate) forgotten: AtomicU64,
    /// 1 + the epoch of the files; 0: not served.
    pub(crate) epoch: AtomicU64,
    pub(crate) spare: SpareWord,
}

/// One request.
#[repr(C, align(64))]
pub(crate) struct RequestRow {
    /// Member that asks; 0: free.
    pub(crate) owner: AtomicU64,
    /// `sequence << 8 | state`.
    pub(crate) state: AtomicU64,
    pub(crate) namespace: AtomicU64,
    /// Bit 0: each key is the child of the one before it.
    pub(crate) flags: AtomicU64,
    pub(crate) count: AtomicU64,
    /// Keys found so far.
    pub(crate) found: AtomicU64,
    pub(crate) spare: [SpareWord; 5],
    pub(crate) parent: [AtomicU64; KEY_WORDS],
    pub(crate) keys: [[AtomicU64; KEY_WORDS]; SSD_REQUEST_KEYS_MAX],
}

/// Eight hints; 0 is none.
#[repr(C, align(64))]
pub(crate) struct HintBucket {
    pub(crate) tags: [AtomicU64; BUCKET_TAGS],
}

const _: () = {
    assert!(size_of::<TierHeader>() == 4096);
    assert!(size_of::<TierNamespace>() == 32);
    assert!(size_of::<RequestRow>() == 41_088);
    assert!(size_of::<HintBucket>() == 64);
};

// SAFETY: repr(C), atomic fields only, alignment 64.
unsafe impl Shared for TierHeader {}
// SAFETY: repr(C), atomic fields only, alignment 32.
unsafe impl Shared for TierNamespace {}
// SAFETY: repr(C), atomic fields only, alignment 64.
unsafe impl Shared for RequestRow {}
// SAFETY: repr(C), atomic fields only, alignment 64.
unsafe impl Shared for HintBucket {}
