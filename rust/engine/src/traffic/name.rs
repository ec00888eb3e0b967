//! What the statistics know a block by: a hash of its key, which is made once, and of where it belongs.

use crate::error::Result;
use crate::key::Key;
use crate::shm::namespace::Identity;

/// Odd numbers without a pattern.
const SEEDS: [u64; 5] =
    [0x9E37_79B9_7F4A_7C15, 0xD6E8_FEB8_6659_FD93, 0xA076_1D64_78BD_642F, 0xE703_7ED1_A0B4_28DB, 0x8EBC_6AF0_9C88_C6E3];

/// Hash of a key, wherever its block belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyHash(u64);

impl KeyHash {
    /// Of a key of 1 to 32 bytes. vLLM's have 32 or 16, and are hashed without being copied: on the way through a
    /// [`Key`] in memory the processor waits for its own stores.
    #[inline]
    pub fn of(bytes: &[u8]) -> Result<Self> {
        let word = |chunk: &[u8; 8]| u64::from_le_bytes(*chunk);
        match bytes.as_chunks::<8>() {
            ([first, second, third, fourth], []) => {
                Ok(Self::made_of(word(first), word(second), word(third), word(fourth), 32))
            }
            ([first, second], []) => Ok(Self::made_of(word(first), word(second), 0, 0, 16)),
            _ => Key::new(bytes).map(|key| Self::from(&key)),
        }
    }

    /// All bytes take part, since the keys of a caller need not be uniform.
    #[inline]
    fn made_of(first: u64, second: u64, third: u64, fourth: u64, bytes: u8) -> Self {
        let front = folded(first ^ SEEDS[0], second ^ SEEDS[1] ^ u64::from(bytes));
        let back = folded(third ^ SEEDS[2], fourth ^ SEEDS[3]);
        Self(folded(front ^ SEEDS[4], back ^ SEEDS[0]))
    }

    /// Hash of the block of this key that belongs where the salt says.
    pub(super) fn at(self, place: Salt) -> u64 {
        folded(self.0 ^ place.mask, place.factor)
    }
}

impl From<&Key> for KeyHash {
    #[inline]
    fn from(key: &Key) -> Self {
        let [first, second, third, fourth] = key.words();
        Self::made_of(first, second, third, fourth, key.len_bytes())
    }
}

/// Where blocks belong.
#[derive(Clone, Copy)]
pub(super) struct Salt {
    mask: u64,
    factor: u64,
}

impl Salt {
    /// A namespace at its present epoch.
    pub(super) fn of(identity: &Identity) -> Self {
        // Mixed first: the epoch is in its lowest bits, and with the number of a neighbour it would cancel out.
        Self::from(mixed(identity.fingerprint[3]).wrapping_add(u64::from(identity.id)))
    }

    /// A group of any fingerprint.
    pub(super) fn anywhere(group: u32) -> Self {
        Self::from(!u64::from(group))
    }

    fn from(number: u64) -> Self {
        let mask = mixed(number);
        Self { mask, factor: mixed(mask ^ SEEDS[1]) | 1 }
    }
}

/// Both halves of a product in one: each bit depends on nearly all bits of both numbers.
#[inline]
fn folded(one: u64, other: u64) -> u64 {
    let product = u128::from(one) * u128::from(other);
    product as u64 ^ (product >> 64) as u64
}

/// Spreads numbers that differ in a few bits.
pub(super) fn mixed(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ number >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ number >> 31
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const COUNT: u64 = 1 << 16;

    fn hashes(key: impl Fn(u64) -> Vec<u8>, place: Salt) -> Vec<u64> {
        (0..COUNT).map(|number| KeyHash::of(&key(number)).unwrap().at(place)).collect()
    }

    /// Chi-squared of bytes of hashes, divided by its degrees of freedom: 1 of uniform ones.
    fn unevenness(hashes: &[u64], shift: u32) -> f64 {
        let mut counts = [0u64; 256];
        hashes.iter().for_each(|hash| counts[(hash >> shift & 255) as usize] += 1);
        let due = hashes.len() as f64 / 256.0;
        counts.iter().map(|count| (*count as f64 - due).powi(2) / due).sum::<f64>() / 255.0
    }

    #[test]
    fn keys_that_differ_in_a_few_bits_have_hashes_that_are_spread_evenly() {
        let at = |place: usize, bytes: usize| {
            move |number: u64| {
                let mut key = vec![0u8; bytes];
                key[place..place + 4].copy_from_slice(&(number as u32).to_le_bytes());
                key
            }
        };
        for (place, bytes) in [(0, 4), (0, 8), (4, 16), (12, 16), (0, 32), (9, 32), (20, 32), (28, 32)] {
            let hashes = hashes(at(place, bytes), Salt::anywhere(0));
            for shift in (0..64).step_by(8) {
                let off = unevenness(&hashes, shift);
                assert!(off < 1.6, "{off} of bits {shift}.. by byte {place} of {bytes}");
            }
        }
    }

    #[test]
    fn neighbours_are_told_apart_at_all_epochs() {
        for print in 0..64u64 {
            let of = |id, epoch| Salt::of(&Identity { id, fingerprint: [0, 0, 0, print << 58 | print ^ epoch] });
            let salts = (0..8u32).flat_map(|id| (0..8u64).map(move |epoch| of(id, epoch)));
            let masks: HashSet<u64> = salts.map(|salt| salt.mask).collect();
            assert_eq!(masks.len(), 64, "fingerprints that end in {print}");
        }
    }

    #[test]
    fn hashes_of_one_key_at_several_places_have_nothing_to_do_with_each_other() {
        let key = |number: u64| mixed(number).to_le_bytes().to_vec();
        let of = |id: u32, last| Salt::of(&Identity { id, fingerprint: [0, 0, 0, last] });
        let salts = (0..4).map(|id| of(id, 1 << 40 | u64::from(id % 2) << 20));
        let all: Vec<_> = salts.chain((0..4).map(Salt::anywhere)).map(|salt| hashes(key, salt)).collect();
        for (one, other) in (0..all.len()).flat_map(|one| (0..one).map(move |other| (one, other))) {
            let apart: Vec<u64> = all[one].iter().zip(&all[other]).map(|(one, other)| one ^ other).collect();
            for shift in (0..64).step_by(8) {
                let off = unevenness(&apart, shift);
                assert!(off < 1.6, "{off} of bits {shift}.. at {one} and {other}");
            }
        }
    }

    #[test]
    fn the_length_of_a_key_is_part_of_it() {
        let of = |bytes: &[u8]| KeyHash::of(bytes).unwrap();
        assert_ne!(of(&[7]), of(&[7, 0]));
        assert_ne!(of(&[7; 16]), of(&[[7; 16], [0; 16]].concat()));
    }

    #[test]
    fn the_bytes_and_the_key_made_of_them_have_one_hash() {
        let bytes: Vec<u8> = (1..=32).collect();
        for length in 1..=32 {
            let key = Key::new(&bytes[..length]).unwrap();
            assert_eq!(KeyHash::from(&key), KeyHash::of(&bytes[..length]).unwrap(), "{length}");
        }
        assert!(KeyHash::of(&[]).is_err() && KeyHash::of(&[0; 33]).is_err());
    }
}
