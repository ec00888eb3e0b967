//! Headers of records. Section 4 of `docs/ssd-format.md`.

use xxhash_rust::xxh3::xxh3_64;

use super::epochs::Fingerprint;
use super::fields::{array, get_u16, get_u32, get_u64, put_u16, put_u32, put_u64};
use crate::key::{KEY_BYTES_MAX, Key};
use crate::limits::PARTS_MAX;

const MAGIC: u64 = u64::from_le_bytes(*b"PEGARECD");
const PARTS: usize = 136;
const PART_BYTES: usize = 16;
/// Fingerprint, epoch, group and the longest key.
const TAG_BYTES_MAX: usize = 32 + 8 + 4 + KEY_BYTES_MAX;
/// The longest header.
pub(crate) const HEADER_BYTES_MAX: usize = header_bytes(PARTS_MAX);

/// What a block is looked up by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RecordId {
    /// Of the namespace.
    pub fingerprint: Fingerprint,
    /// KV cache group.
    pub group: u32,
    /// Content key.
    pub key: Key,
}

impl RecordId {
    /// 64 bits that stand for this record in indexes; what is read is compared whole.
    pub(crate) fn tag(&self, epoch: u64) -> u64 {
        // In one piece: every lookup takes this for every key that is not in memory.
        let mut bytes = [0u8; TAG_BYTES_MAX];
        bytes[..32].copy_from_slice(&self.fingerprint);
        bytes[32..40].copy_from_slice(&epoch.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.group.to_le_bytes());
        for (piece, word) in bytes[44..].chunks_exact_mut(8).zip(self.key.words()) {
            piece.copy_from_slice(&word.to_le_bytes());
        }
        xxh3_64(&bytes[..44 + usize::from(self.key.len_bytes())])
    }
}

/// Where a record says that it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spot {
    pub(crate) cache_id: u64,
    pub(crate) zone: u32,
    /// Block within the zone.
    pub(crate) start: u32,
    /// Of the zone's filling.
    pub(crate) sequence: u64,
}

/// Length and checksum of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) bytes: u64,
    pub(crate) checksum: u64,
}

/// The head of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) spot: Spot,
    /// Checksum of the header before it in the zone; 0 in the first.
    pub(crate) before: u64,
    /// Of the process that wrote it.
    pub(crate) session: u64,
    pub(crate) epoch: u64,
    pub(crate) id: RecordId,
    pub(crate) parts: Vec<Part>,
}

/// Length of the header of a record of so many parts.
pub(crate) const fn header_bytes(parts: usize) -> usize {
    PARTS + parts * PART_BYTES
}

impl Header {
    /// Length of the record without its padding.
    pub(crate) fn record_bytes(&self) -> u64 {
        let payload = self.parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.bytes));
        payload.saturating_add(header_bytes(self.parts.len()) as u64)
    }

    /// Write it to the first [`header_bytes`] of `bytes`. Returns its checksum.
    pub(crate) fn encode(&self, bytes: &mut [u8]) -> u64 {
        let bytes = &mut bytes[..header_bytes(self.parts.len())];
        bytes.fill(0);
        put_u64(bytes, 0, MAGIC);
        put_u64(bytes, 16, self.spot.cache_id);
        put_u32(bytes, 24, self.spot.zone);
        put_u32(bytes, 28, self.spot.start);
        put_u64(bytes, 32, self.spot.sequence);
        put_u64(bytes, 40, self.epoch);
        put_u32(bytes, 48, self.id.group);
        let key = self.id.key.to_bytes();
        put_u16(bytes, 52, key.len() as u16);
        put_u16(bytes, 54, self.parts.len() as u16);
        bytes[56..88].copy_from_slice(&self.id.fingerprint);
        bytes[88..88 + key.len()].copy_from_slice(&key);
        for (number, part) in self.parts.iter().enumerate() {
            put_u64(bytes, PARTS + number * PART_BYTES, part.bytes);
            put_u64(bytes, PARTS + number * PART_BYTES + 8, part.checksum);
        }
        put_u64(bytes, 120, self.before);
        put_u64(bytes, 128, self.session);
        let checksum = xxh3_64(&bytes[16..]);
        put_u64(bytes, 8, checksum);
        checksum
    }

    /// Checksum of the header that begins `bytes` and was decoded from them.
    pub(crate) fn checksum_in(bytes: &[u8]) -> u64 {
        get_u64(bytes, 8)
    }

    /// `None` unless a whole header begins `bytes`.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < PARTS || get_u64(bytes, 0) != MAGIC {
            return None;
        }
        let (key_bytes, parts) = (usize::from(get_u16(bytes, 52)), usize::from(get_u16(bytes, 54)));
        if !(1..=PARTS_MAX).contains(&parts) || key_bytes > KEY_BYTES_MAX {
            return None;
        }
        let bytes = bytes.get(..header_bytes(parts))?;
        if get_u64(bytes, 8) != xxh3_64(&bytes[16..]) {
            return None;
        }
        let part = |number: usize| Part {
            bytes: get_u64(bytes, PARTS + number * PART_BYTES),
            checksum: get_u64(bytes, PARTS + number * PART_BYTES + 8),
        };
        let spot = Spot {
            cache_id: get_u64(bytes, 16),
            zone: get_u32(bytes, 24),
            start: get_u32(bytes, 28),
            sequence: get_u64(bytes, 32),
        };
        let key = Key::new(&bytes[88..88 + key_bytes]).ok()?;
        let id = RecordId { fingerprint: array(bytes, 56), group: get_u32(bytes, 48), key };
        Some(Self {
            spot,
            before: get_u64(bytes, 120),
            session: get_u64(bytes, 128),
            epoch: get_u64(bytes, 40),
            id,
            parts: (0..parts).map(part).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example(parts: usize) -> Header {
        let id = RecordId { fingerprint: [9; 32], group: 3, key: Key::new(b"a key of 20 bytes...").unwrap() };
        let spot = Spot { cache_id: 1, zone: 2, start: 3, sequence: 4 };
        let parts = (0..parts as u64).map(|number| Part { bytes: number * 1000, checksum: !number }).collect();
        Header { spot, before: 6, session: 7, epoch: 5, id, parts }
    }

    #[test]
    fn headers_survive_encode_and_decode() {
        for parts in [1, 2, PARTS_MAX] {
            let mut bytes = [7; 4096];
            example(parts).encode(&mut bytes);
            assert_eq!(Header::decode(&bytes), Some(example(parts)));
            assert_eq!(Header::decode(&bytes[..header_bytes(parts) - 1]), None);
        }
    }

    #[test]
    fn no_flipped_bit_is_accepted() {
        let mut bytes = [0; header_bytes(3)];
        example(3).encode(&mut bytes);
        for bit in 0..8 * bytes.len() {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&bytes), None, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn tags_are_those_that_files_of_this_version_have() {
        let id = example(1).id;
        let key = id.key.to_bytes();
        let bytes = [&id.fingerprint[..], &5u64.to_le_bytes(), &id.group.to_le_bytes(), &key].concat();
        assert_eq!(id.tag(5), xxh3_64(&bytes));
        let longest = RecordId { key: Key::new(&[0xFF; KEY_BYTES_MAX]).unwrap(), ..id };
        assert_ne!(longest.tag(5), id.tag(5));
    }

    #[test]
    fn everything_that_names_a_record_changes_its_tag() {
        let id = example(1).id;
        let others = [
            RecordId { fingerprint: [8; 32], ..id },
            RecordId { group: 4, ..id },
            RecordId { key: Key::new(b"a key of 20 bytes..").unwrap(), ..id },
        ];
        assert!(others.iter().all(|other| other.tag(0) != id.tag(0)) && id.tag(1) != id.tag(0));
    }
}
