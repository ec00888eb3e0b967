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

/// Checksum of a block of one part that lies in one or several slots: of one slot, that of its bytes; of several, one
/// in which their order counts.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChainChecksum(Option<u64>);

impl ChainChecksum {
    /// Take the checksum of the next slot's bytes in use, as bytes of part 0.
    pub fn add(&mut self, slot: u64) {
        self.0 = Some(match self.0 {
            None => slot,
            Some(before) => (before ^ slot).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29),
        });
    }

    /// The checksum of the block; `None` without any slot.
    pub fn finish(self) -> Option<u64> {
        self.0
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

    #[test]
    fn the_order_of_slots_counts() {
        let of = |slots: &[u64]| {
            let mut checksum = ChainChecksum::default();
            slots.iter().for_each(|slot| checksum.add(*slot));
            checksum.finish()
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[7]), Some(7));
        assert_ne!(of(&[1, 2, 3]), of(&[1, 3, 2]));
        assert_ne!(of(&[1, 2]), of(&[2, 1, 0]));
    }
}
