//! The records in shared memory, field by field as in `docs/shm-format.md`.
//!
//! Every field is atomic: other processes change them at any time, and nothing read here may be trusted before it has
//! been checked. Plain words only: no pointers, no `Drop`, no reference counts.

use crate::limits::{LABEL_BYTES_MAX, PARTS_MAX};
#[cfg(not(loom))]
use crate::shm::segments_dir::{NAME_BYTES, NAME_OFFSET};
use crate::sync::{AtomicU32, AtomicU64, Relaxed, SpareWord};

/// Marks records that may be mapped: `repr(C)`, all fields atomic, every bit pattern valid.
///
/// # Safety
/// The implementor has to hold what the sentence above says, and alignment of at most 64 bytes.
pub(crate) unsafe trait Shared {}

/// A label of a process or namespace, zero padded UTF-8.
pub(crate) type LabelWords = [SpareWord; LABEL_BYTES_MAX / 8];

/// First page of the control file. `fixed` never changes after creation and is covered by its checksum.
#[repr(C, align(64))]
pub(crate) struct PoolHeader {
    /// See `superblock.rs`.
    pub(crate) fixed: [SpareWord; 16],
    /// Clock of recency: every touched block takes a stamp from it.
    pub(crate) clock: AtomicU64,
    /// Wall clock of the last maintenance by a living process.
    pub(crate) last_used_unix_s: AtomicU64,
    /// Lock over extents and namespaces.
    pub(crate) structure_lock: AtomicU64,
    /// Raised whenever the table of extents changes.
    pub(crate) extents_version: AtomicU64,
    /// Some slot waits in quarantine for its time to come; see `notice.rs`.
    pub(crate) quarantine_pending: AtomicU64,
    /// Nonzero: somebody met a damaged chain; the index has to be rebuilt from the headers.
    pub(crate) rebuild_wanted: AtomicU64,
    /// Raised by every index rebuild.
    pub(crate) rebuilds: AtomicU64,
    /// Blocks may have lost the block before them; see `notice.rs` and `orphans.rs`.
    pub(crate) orphans_expected: AtomicU64,
    /// Name of the directory of its segments, zero padded; never changes after creation. See `segments_dir.rs`.
    pub(crate) segments_dir: [SpareWord; 64],
    pub(crate) spare: [SpareWord; 424],
}

/// One attached process. It is alive while it holds the OFD lock on its byte of the control file.
#[repr(C, align(64))]
pub(crate) struct ProcessRow {
    /// `epoch << 8 | state`; see [`crate::shm::process`].
    pub(crate) state: AtomicU64,
    /// The member for which this process moves bytes; 0 for none.
    pub(crate) leader: AtomicU64,
    /// For people only: process ids mean nothing across containers.
    pub(crate) pid: AtomicU64,
    /// For people only.
    pub(crate) started_unix_s: AtomicU64,
    /// Bit 0: a device may write slots on behalf of this process.
    pub(crate) flags: AtomicU64,
    /// Bit *n* modulo 64: the process has opened namespace *n*.
    pub(crate) namespaces: SpareWord,
    /// Thousandths of this instance's weight; 0: it uses no namespace (yet) and has no share.
    pub(crate) weight_milli: SpareWord,
    pub(crate) spare: [SpareWord; 1],
    /// For people only.
    pub(crate) label: LabelWords,
}

/// One namespace: a fingerprint, a KV cache group, and the sizes of its parts.
#[repr(C, align(64))]
pub(crate) struct NamespaceRow {
    /// 0 free, 1 ready. Rows are filled under the structure lock and never reused.
    pub(crate) state: AtomicU64,
    /// Raised by a reset; mixed into the fingerprint that slot headers carry. Only that of the row `epoch_row` counts.
    pub(crate) epoch: AtomicU64,
    pub(crate) fingerprint: [AtomicU64; 4],
    pub(crate) group: AtomicU32,
    pub(crate) parts: AtomicU32,
    /// Raised whenever a slot of this namespace goes free: tells a scan that found nothing when to look again.
    pub(crate) frees: AtomicU64,
    /// Stamps up to here may be on somebody's list of eviction candidates.
    pub(crate) horizon: AtomicU64,
    /// Number of the row whose epoch is this one's too: the first of the same fingerprint.
    pub(crate) epoch_row: SpareWord,
    /// Raised before a block of this namespace moves to another slot: older lists of candidates do not know it there.
    pub(crate) moves: AtomicU64,
    /// The clock when it was made; 0 in pools of older builds. New blocks start between then and now.
    pub(crate) begun: SpareWord,
    pub(crate) spare: [SpareWord; 4],
    pub(crate) label: LabelWords,
    pub(crate) part_bytes: [AtomicU64; PARTS_MAX],
}

/// One extent: equally many slots in one segment per part.
#[repr(C, align(64))]
pub(crate) struct ExtentRow {
    /// `generation << 32 | owner row << 8 | state`.
    pub(crate) state: AtomicU64,
    pub(crate) namespace: AtomicU32,
    pub(crate) parts: AtomicU32,
    pub(crate) first_slot: AtomicU32,
    pub(crate) slots: AtomicU32,
    /// Bytes that this extent's segments take.
    pub(crate) bytes: AtomicU64,
    pub(crate) spare: [SpareWord; 4],
    pub(crate) segments: [AtomicU32; PARTS_MAX],
}

/// Lock and version of the buckets whose low bits equal the stripe's number.
#[repr(C, align(64))]
pub(crate) struct Stripe {
    pub(crate) lock: AtomicU64,
    /// Odd while a chain is being changed.
    pub(crate) version: AtomicU64,
    pub(crate) spare: [SpareWord; 6],
}

/// Truth about one slot. The first cache line is all that a lookup's walk reads.
#[repr(C, align(128))]
pub(crate) struct SlotHeader {
    /// See `state.rs`.
    pub(crate) state: AtomicU64,
    /// Bit *p*: the process of row *p* holds a lease.
    pub(crate) leases: [AtomicU64; 2],
    /// Next slot (plus one) of the bucket's chain.
    pub(crate) next: AtomicU32,
    /// `namespace << 16 | flags << 8 | key bytes`.
    pub(crate) tag: AtomicU32,
    pub(crate) key: [AtomicU64; 4],
    /// Fingerprint of the namespace, the last word xor its epoch.
    pub(crate) fingerprint: [AtomicU64; 4],
    /// Bit *p*: part *p* is complete in memory.
    pub(crate) parts_written: AtomicU64,
    /// Sum of the parts' checksums. While the slot is in quarantine: when it may go free (boot clock, ms).
    pub(crate) checksum: AtomicU64,
    /// Reserved, sealed: the block before this one in its chain of keys. Member: the head of its block. 0: none.
    pub(crate) parent: AtomicU64,
    /// Bytes in use, if less than the whole block; else 0.
    pub(crate) used_bytes: AtomicU32,
    /// Next member slot (plus one) of a block of several slots.
    pub(crate) member_next: AtomicU32,
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<PoolHeader>() == 4096);
    assert!(std::mem::offset_of!(PoolHeader, segments_dir) == NAME_OFFSET as usize && NAME_BYTES == 64 * 8);
    assert!(size_of::<ProcessRow>() == 128);
    assert!(size_of::<NamespaceRow>() == 704);
    assert!(size_of::<ExtentRow>() == 320);
    assert!(size_of::<Stripe>() == 64);
    assert!(size_of::<SlotHeader>() == 128);
    assert!(std::mem::offset_of!(SlotHeader, fingerprint) == 64);
};

// SAFETY: repr(C), atomic fields only, alignment 64.
unsafe impl Shared for PoolHeader {}
// SAFETY: repr(C), atomic fields only, alignment 64.
unsafe impl Shared for ProcessRow {}
// SAFETY: repr(C), atomic fields only, alignment 64.
unsafe impl Shared for NamespaceRow {}
// SAFETY: repr(C), atomic fields only, alignment 64.
unsafe impl Shared for ExtentRow {}
// SAFETY: repr(C), atomic fields only, alignment 64.
unsafe impl Shared for Stripe {}
// SAFETY: repr(C), atomic fields only; the table starts at a page, so 128-byte alignment holds too.
unsafe impl Shared for SlotHeader {}
// SAFETY: one atomic word.
unsafe impl Shared for AtomicU64 {}
// SAFETY: one atomic word.
unsafe impl Shared for AtomicU32 {}

/// Write `label`, cut to what fits at a character boundary.
pub(crate) fn store_label(words: &LabelWords, label: &str) {
    let mut end = label.len().min(LABEL_BYTES_MAX);
    while !label.is_char_boundary(end) {
        end -= 1;
    }
    let mut bytes = [0u8; LABEL_BYTES_MAX];
    bytes[..end].copy_from_slice(&label.as_bytes()[..end]);
    for (word, chunk) in words.iter().zip(bytes.chunks_exact(8)) {
        word.store(u64::from_le_bytes(chunk.try_into().expect("chunk of 8")), Relaxed);
    }
}

/// Read a label; whatever is not UTF-8 is replaced.
pub(crate) fn load_label(words: &LabelWords) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Load four words.
pub(crate) fn load4(words: &[AtomicU64; 4]) -> [u64; 4] {
    [words[0].load(Relaxed), words[1].load(Relaxed), words[2].load(Relaxed), words[3].load(Relaxed)]
}

/// Store four words.
pub(crate) fn store4(words: &[AtomicU64; 4], values: [u64; 4]) {
    for (word, value) in words.iter().zip(values) {
        word.store(value, Relaxed);
    }
}
