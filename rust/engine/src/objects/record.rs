//! The bytes of a value: a record, the text of its key, the value itself, one after the other.

use crate::limits::{OBJECT_KEY_BYTES_MAX, OBJECT_VALUE_BYTES_MAX};

/// What went in, so that the same type comes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    /// Bytes.
    Bytes,
    /// Text in UTF-8.
    Str,
}

/// Bytes of an encoded record.
pub(super) const RECORD_BYTES: usize = 16;

/// Says that a slot holds a value, and in which format.
const MAGIC: u32 = u32::from_le_bytes(*b"PGO1");

/// First bytes of every value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) kind: ValueKind,
    pub(super) key_bytes: usize,
    pub(super) value_bytes: usize,
}

impl Record {
    /// `magic | kind | bytes of the key | bytes of the value`, each four bytes. The limits of keys and values make
    /// both lengths fit.
    pub(super) fn encode(&self) -> [u8; RECORD_BYTES] {
        let kind = match self.kind {
            ValueKind::Bytes => 0u32,
            ValueKind::Str => 1,
        };
        let mut bytes = [0; RECORD_BYTES];
        let words = [MAGIC, kind, self.key_bytes as u32, self.value_bytes as u32];
        for (target, word) in bytes.chunks_exact_mut(4).zip(words) {
            target.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decode the start of a head; `None` for anything that no store writes.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut words = [0u32; RECORD_BYTES / 4];
        for (word, chunk) in words.iter_mut().zip(bytes.get(..RECORD_BYTES)?.chunks_exact(4)) {
            *word = u32::from_le_bytes(chunk.try_into().expect("chunk of 4"));
        }
        let kind = match (words[0], words[1]) {
            (MAGIC, 0) => ValueKind::Bytes,
            (MAGIC, 1) => ValueKind::Str,
            _ => return None,
        };
        let (key_bytes, value_bytes) = (words[2] as usize, words[3] as usize);
        let possible = key_bytes <= OBJECT_KEY_BYTES_MAX && value_bytes as u64 <= OBJECT_VALUE_BYTES_MAX;
        possible.then_some(Self { kind, key_bytes, value_bytes })
    }

    /// Bytes before the value.
    pub(super) fn prefix_bytes(&self) -> usize {
        RECORD_BYTES + self.key_bytes
    }

    /// Bytes of record, key and value.
    pub(super) fn total_bytes(&self) -> usize {
        self.prefix_bytes() + self.value_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_survive_encoding_and_other_bytes_are_none() {
        for kind in [ValueKind::Bytes, ValueKind::Str] {
            let record = Record { kind, key_bytes: 3, value_bytes: 1 << 30 };
            assert_eq!(Record::decode(&record.encode()), Some(record));
        }
        assert_eq!(Record::decode(&[0; RECORD_BYTES]), None);
        let mut other = Record { kind: ValueKind::Str, key_bytes: 0, value_bytes: 0 }.encode();
        assert_eq!(Record::decode(&other[1..]), None, "too short");
        other[4] = 2;
        assert_eq!(Record::decode(&other), None, "no such kind");
        let too_large = Record { kind: ValueKind::Str, key_bytes: 3, value_bytes: (1 << 30) + 1 };
        assert_eq!(Record::decode(&too_large.encode()), None, "longer than any value");
    }
}
