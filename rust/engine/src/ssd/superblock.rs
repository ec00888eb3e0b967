//! The superblock: what a file is, and which namespaces were forgotten. Section 3 of `docs/ssd-format.md`.

use xxhash_rust::xxh3::xxh3_64;

use super::epochs::Epochs;
use super::fields::{array, get_u32, get_u64, put_u32, put_u64};
use super::file::SSD_LAYOUT_VERSION;
use super::geometry::Geometry;
use crate::limits::SSD_EPOCHS_MAX;

const MAGIC: u64 = u64::from_le_bytes(*b"PEGASSD1");
const ENTRIES: usize = 80;
const ENTRY_BYTES: usize = 40;
/// Bytes that are read of a superblock; a file's block may be larger.
pub(crate) const SUPERBLOCK_BYTES: usize = 4096;

const _: () = assert!(ENTRIES + SSD_EPOCHS_MAX * ENTRY_BYTES <= SUPERBLOCK_BYTES);

/// One copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub(crate) geometry: Geometry,
    pub(crate) generation: u64,
    pub(crate) cache_id: u64,
    pub(crate) created_unix_s: u64,
    pub(crate) epochs: Epochs,
}

impl Superblock {
    pub(crate) fn encode(&self, bytes: &mut [u8]) {
        bytes.fill(0);
        put_u64(bytes, 0, MAGIC);
        put_u32(bytes, 16, SSD_LAYOUT_VERSION);
        put_u32(bytes, 20, self.geometry.block_bytes as u32);
        put_u64(bytes, 24, self.generation);
        put_u64(bytes, 32, self.cache_id);
        put_u64(bytes, 40, self.geometry.zone_bytes);
        put_u64(bytes, 48, u64::from(self.geometry.zones));
        put_u64(bytes, 56, self.created_unix_s);
        put_u64(bytes, 64, self.epochs.base());
        put_u64(bytes, 72, self.epochs.raised().count() as u64);
        for (entry, (fingerprint, epoch)) in self.epochs.raised().take(SSD_EPOCHS_MAX).enumerate() {
            let at = ENTRIES + entry * ENTRY_BYTES;
            bytes[at..at + 32].copy_from_slice(fingerprint);
            put_u64(bytes, at + 32, epoch);
        }
        let checksum = xxh3_64(&bytes[16..SUPERBLOCK_BYTES]);
        put_u64(bytes, 8, checksum);
    }

    /// `None` unless it is whole and sound.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..SUPERBLOCK_BYTES)?;
        let whole = get_u64(bytes, 0) == MAGIC && get_u64(bytes, 8) == xxh3_64(&bytes[16..]);
        if !whole || get_u32(bytes, 16) != SSD_LAYOUT_VERSION {
            return None;
        }
        let geometry = Geometry {
            block_bytes: get_u32(bytes, 20) as usize,
            zone_bytes: get_u64(bytes, 40),
            zones: u32::try_from(get_u64(bytes, 48)).ok()?,
        };
        let count = usize::try_from(get_u64(bytes, 72)).ok().filter(|count| *count <= SSD_EPOCHS_MAX)?;
        let raised = (0..count).map(|entry| {
            let at = ENTRIES + entry * ENTRY_BYTES;
            (array::<32>(bytes, at), get_u64(bytes, at + 32))
        });
        let decoded = Self {
            geometry,
            generation: get_u64(bytes, 24),
            cache_id: get_u64(bytes, 32),
            created_unix_s: get_u64(bytes, 56),
            epochs: Epochs::new(get_u64(bytes, 64), raised),
        };
        decoded.geometry.is_sound().then_some(decoded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Superblock {
        let geometry = Geometry { block_bytes: 512, zone_bytes: 1 << 20, zones: 9 };
        let mut epochs = Epochs::default();
        (0..50u8).for_each(|number| epochs.raise(&[number; 32]));
        Superblock { geometry, generation: 7, cache_id: 8, created_unix_s: 9, epochs }
    }

    #[test]
    fn superblocks_survive_encode_and_decode() {
        let mut bytes = [1; SUPERBLOCK_BYTES];
        example().encode(&mut bytes);
        assert_eq!(Superblock::decode(&bytes), Some(example()));
    }

    #[test]
    fn no_flipped_bit_is_accepted() {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        example().encode(&mut bytes);
        for bit in 0..8 * SUPERBLOCK_BYTES {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Superblock::decode(&bytes), None, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(Superblock::decode(&bytes[..100]), None);
    }
}
