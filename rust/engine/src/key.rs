//! Names of blocks: the key a caller looks up, and the reference that names a slot at one generation.

use crate::error::{Error, Result};

/// Longest key, in bytes: a SHA-256 digest.
pub const KEY_BYTES_MAX: usize = 32;

/// Content key of a block: 1 to 32 bytes, zero padded; vLLM's block hash, verbatim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    words: [u64; 4],
    bytes: u8,
}

impl Key {
    /// A key of 1 to 32 bytes.
    #[inline]
    pub fn new(bytes: &[u8]) -> Result<Self> {
        if bytes.is_empty() || bytes.len() > KEY_BYTES_MAX {
            return Err(Error::invalid(format!(
                "a block key has 1 to {KEY_BYTES_MAX} bytes, this one has {}: pass vLLM's block hash as it is",
                bytes.len()
            )));
        }
        Ok(Self { words: words_of(bytes), bytes: bytes.len() as u8 })
    }

    /// From what a slot header holds; `None` if the length is impossible.
    pub(crate) fn from_parts(words: [u64; 4], bytes: u8) -> Option<Self> {
        (1..=KEY_BYTES_MAX as u8).contains(&bytes).then_some(Self { words, bytes })
    }

    pub(crate) fn words(&self) -> [u64; 4] {
        self.words
    }

    pub(crate) fn len_bytes(&self) -> u8 {
        self.bytes
    }

    /// The bytes that the key was made of.
    pub fn to_bytes(&self) -> Vec<u8> {
        let all: Vec<u8> = self.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        all[..usize::from(self.bytes)].to_vec()
    }

    /// Mixes all words, since the keys of a caller need not be uniform.
    pub(crate) fn spread(&self, salt: u64) -> u64 {
        let mut hash = salt.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ u64::from(self.bytes);
        for word in self.words {
            hash = (hash ^ word).wrapping_mul(0xD6E8_FEB8_6659_FD93);
            hash ^= hash >> 32;
        }
        hash
    }
}

/// At most 32 bytes as words. Lookups of a thousand keys spend much of their time here, and a copy of a length that is
/// not known at compile time takes longer than all else: so the two lengths that vLLM's hashes have are known.
#[inline]
fn words_of(bytes: &[u8]) -> [u64; 4] {
    let word = |chunk: &[u8; 8]| u64::from_le_bytes(*chunk);
    match bytes.as_chunks::<8>() {
        ([first, second, third, fourth], []) => [word(first), word(second), word(third), word(fourth)],
        ([first, second], []) => [word(first), word(second), 0, 0],
        _ => padded(bytes),
    }
}

fn padded(bytes: &[u8]) -> [u64; 4] {
    let mut padded = [0u8; KEY_BYTES_MAX];
    padded[..bytes.len()].copy_from_slice(bytes);
    std::array::from_fn(|word| u64::from_le_bytes(padded.as_chunks::<8>().0[word]))
}

/// A slot at one generation: `generation << 32 | slot`. Once the slot is recycled the reference is stale, and every
/// operation treats what it names as absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockRef(pub u64);

impl BlockRef {
    pub(crate) fn new(slot: u32, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(slot))
    }

    /// Number of the slot.
    pub fn slot(self) -> u32 {
        self.0 as u32
    }

    /// Generation of the slot.
    pub fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}
