//! Summaries of zones, the checkpoint of the index. Section 5 of `docs/ssd-format.md`.

use xxhash_rust::xxh3::xxh3_64;

use super::fields::{get_u32, get_u64, put_u32, put_u64};

const MAGIC: u64 = u64::from_le_bytes(*b"PEGAZONE");
/// Of one entry.
pub(crate) const ENTRY_BYTES: usize = 16;
/// Of the trailer.
pub(crate) const TRAILER_BYTES: usize = 56;

/// One record of a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) tag: u64,
    pub(crate) start: u32,
    pub(crate) blocks: u32,
}

/// All records of a zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) cache_id: u64,
    pub(crate) sequence: u64,
    pub(crate) zone: u32,
    /// First block behind all records.
    pub(crate) end: u32,
    /// Checksum of the last record's header.
    pub(crate) last: u64,
    pub(crate) entries: Vec<Entry>,
}

/// Bytes of the summary of so many records, in whole blocks.
pub(crate) fn summary_bytes(entries: usize, block_bytes: usize) -> usize {
    (entries * ENTRY_BYTES + TRAILER_BYTES).next_multiple_of(block_bytes)
}

/// Records that the trailer at the end of `bytes` speaks of.
pub(crate) fn count_of(bytes: &[u8]) -> Option<usize> {
    let trailer = bytes.len().checked_sub(TRAILER_BYTES)?;
    (get_u64(bytes, trailer) == MAGIC).then(|| get_u32(bytes, trailer + 36) as usize)
}

impl Summary {
    /// Fill `bytes`, which is as long as [`summary_bytes`] says.
    pub(crate) fn encode(&self, bytes: &mut [u8]) {
        bytes.fill(0);
        for (entry, at) in self.entries.iter().zip((0..).step_by(ENTRY_BYTES)) {
            put_u64(bytes, at, entry.tag);
            put_u32(bytes, at + 8, entry.start);
            put_u32(bytes, at + 12, entry.blocks);
        }
        let trailer = bytes.len() - TRAILER_BYTES;
        put_u64(bytes, trailer, MAGIC);
        put_u64(bytes, trailer + 16, self.cache_id);
        put_u64(bytes, trailer + 24, self.sequence);
        put_u32(bytes, trailer + 32, self.zone);
        put_u32(bytes, trailer + 36, self.entries.len() as u32);
        put_u32(bytes, trailer + 40, self.end);
        put_u64(bytes, trailer + 48, self.last);
        let checksum = checksum(bytes, self.entries.len());
        put_u64(bytes, trailer + 8, checksum);
    }

    /// `None` unless `bytes` are a whole summary.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let count = count_of(bytes)?;
        let trailer = bytes.len() - TRAILER_BYTES;
        if count.checked_mul(ENTRY_BYTES)? > trailer || get_u64(bytes, trailer + 8) != checksum(bytes, count) {
            return None;
        }
        let entry = |at: usize| Entry {
            tag: get_u64(bytes, at),
            start: get_u32(bytes, at + 8),
            blocks: get_u32(bytes, at + 12),
        };
        Some(Self {
            cache_id: get_u64(bytes, trailer + 16),
            sequence: get_u64(bytes, trailer + 24),
            zone: get_u32(bytes, trailer + 32),
            end: get_u32(bytes, trailer + 40),
            last: get_u64(bytes, trailer + 48),
            entries: (0..count).map(|number| entry(number * ENTRY_BYTES)).collect(),
        })
    }
}

/// Over entries and trailer; the padding between them does not count.
fn checksum(bytes: &[u8], count: usize) -> u64 {
    let trailer = bytes.len() - TRAILER_BYTES;
    xxh3_64(&bytes[..count * ENTRY_BYTES]) ^ xxh3_64(&bytes[trailer + 16..]).rotate_left(32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example(entries: u32) -> Summary {
        let entries = (0..entries).map(|number| Entry { tag: u64::from(!number), start: 3 * number, blocks: 3 });
        Summary { cache_id: 1, sequence: 2, zone: 3, end: 4, last: 5, entries: entries.collect() }
    }

    #[test]
    fn summaries_survive_encode_and_decode() {
        for entries in [0, 1, 28, 29, 500] {
            let mut bytes = vec![1; summary_bytes(entries as usize, 512)];
            example(entries).encode(&mut bytes);
            assert_eq!(Summary::decode(&bytes), Some(example(entries)));
        }
        assert_eq!((summary_bytes(28, 512), summary_bytes(29, 512)), (512, 1024));
    }

    #[test]
    fn no_flipped_bit_that_means_something_is_accepted() {
        let mut bytes = vec![0; summary_bytes(3, 512)];
        example(3).encode(&mut bytes);
        for bit in 0..8 * bytes.len() {
            bytes[bit / 8] ^= 1 << (bit % 8);
            let padding = (3 * ENTRY_BYTES..512 - TRAILER_BYTES).contains(&(bit / 8));
            assert_eq!(Summary::decode(&bytes).is_some(), padding, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
