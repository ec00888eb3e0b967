//! Records of the file, all fields atomic. `docs/traffic.md`, section 2.

use crate::limits::{PROCESSES_MAX, TRAFFIC_BUCKETS, TRAFFIC_REGISTERS};
use crate::shm::rows::Shared;
use crate::sync::{AtomicU32, AtomicU64, SpareWord};

/// Counters of a namespace that have a place.
pub(crate) const COUNTERS: usize = 32;
/// Words of one filter that a block has its bits in: a cache line.
pub(crate) const LINE_WORDS: usize = 8;

/// First page. `fixed` never changes after creation and is covered by its checksum.
#[repr(C, align(64))]
pub(crate) struct TrafficHeader {
    pub(crate) fixed: [SpareWord; 16],
    /// Lock over samples, tree and buckets.
    pub(crate) curve_lock: AtomicU64,
    /// Not 0: somebody is changing the samples, or died at that.
    pub(crate) curve_busy: AtomicU64,
    /// Blocks with hashes below are followed; 0: all of them.
    pub(crate) threshold: AtomicU64,
    /// Last place that was given to a sample.
    pub(crate) last_place: AtomicU64,
    /// Samples there are.
    pub(crate) samples: AtomicU64,
    /// Blocks that were asked for while the curve could be changed: not found in memory, and found.
    pub(crate) references: [AtomicU64; 2],
    /// What those of them that were followed stand for, in 1,024ths.
    pub(crate) sampled_weight: [AtomicU64; 2],
    /// Prompts that the curve does not know, since somebody else was at it.
    pub(crate) curve_skipped: AtomicU64,
    /// Which of the two filters is written: its lowest bit.
    pub(crate) filter: AtomicU64,
    /// Hashes that were put into it.
    pub(crate) filter_filled: AtomicU64,
    /// By reuse distance, what references stand for, in 1,024ths: of those not found, and of those found.
    pub(crate) buckets: [[AtomicU64; TRAFFIC_BUCKETS]; 2],
    /// Waits for locks that ran out, by all processes.
    pub(crate) lock_timeouts: AtomicU64,
    /// Index rebuilds, by all processes.
    pub(crate) index_rebuilds: AtomicU64,
    /// By process row: `low half of the epoch << 32 | longest wait for a lock`, in microseconds.
    pub(crate) lock_waits: [AtomicU64; PROCESSES_MAX],
    pub(crate) spare: [SpareWord; 18],
}

/// What was asked for of the namespace of the same number.
#[repr(C, align(64))]
pub(crate) struct TrafficNamespace {
    pub(crate) counters: [AtomicU64; COUNTERS],
}

/// One block whose reuse is followed; free if its place is 0.
#[repr(C, align(16))]
pub(crate) struct Sample {
    pub(crate) hash: AtomicU64,
    /// In the order of use.
    pub(crate) place: AtomicU32,
    /// Its size in units of 1,024 bytes.
    pub(crate) kib: AtomicU32,
}

/// Estimate of how many distinct blocks were missed in one span of time.
#[repr(C, align(64))]
pub(crate) struct Span {
    /// `1 + number of the span << 1 | being cleared`; 0: none yet.
    pub(crate) state: AtomicU64,
    /// Blocks that were asked for.
    pub(crate) asked: AtomicU64,
    pub(crate) spare: [SpareWord; 6],
    /// Eight registers a word.
    pub(crate) registers: [AtomicU64; TRAFFIC_REGISTERS / 8],
}

/// One line of a filter.
#[repr(C, align(64))]
pub(crate) struct Line {
    pub(crate) words: [AtomicU64; LINE_WORDS],
}

const _: () = {
    assert!(size_of::<TrafficHeader>() == 4096);
    assert!(size_of::<TrafficNamespace>() == 256);
    assert!(size_of::<Sample>() == 16);
    assert!(size_of::<Span>() == 64 + TRAFFIC_REGISTERS);
    assert!(size_of::<Line>() == 64);
};

// SAFETY: repr(C), atomic fields only, alignment 64.
unsafe impl Shared for TrafficHeader {}
// SAFETY: repr(C), atomic fields only, alignment 64.
unsafe impl Shared for TrafficNamespace {}
// SAFETY: repr(C), atomic fields only, alignment 16.
unsafe impl Shared for Sample {}
// SAFETY: repr(C), atomic fields only, alignment 64.
unsafe impl Shared for Span {}
// SAFETY: repr(C), atomic fields only, alignment 64.
unsafe impl Shared for Line {}
