//! Checksum of one part of a block: xxh3-64 seeded with the part, so that parts cannot be swapped unnoticed.

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// Checksum of a part that lies in one piece.
pub fn part_checksum(part: u32, bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(bytes, u64::from(part))
}

/// Checksum of a part that arrives in pieces; equal to [`part_checksum`] of their concatenation.
pub struct PartHasher(Xxh3);

impl PartHasher {
    /// A hasher for `part`.
    pub fn new(part: u32) -> Self {
        Self(Xxh3::with_seed(u64::from(part)))
    }

    /// Take the next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all pieces.
    pub fn finish(&self) -> u64 {
        self.0.digest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_and_whole_have_the_same_checksum() {
        let bytes: Vec<u8> = (0..100_000u32).map(|value| (value % 251) as u8).collect();
        let mut hasher = PartHasher::new(3);
        bytes.chunks(777).for_each(|piece| hasher.update(piece));
        assert_eq!(hasher.finish(), part_checksum(3, &bytes));
    }

    #[test]
    fn the_same_bytes_have_another_checksum_in_another_part() {
        assert_ne!(part_checksum(0, b"same"), part_checksum(1, b"same"));
    }
}
