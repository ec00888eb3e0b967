//! Where superblocks and zones lie in a file.

use crate::error::{Error, Result};
use crate::limits::{SSD_BLOCK_BYTES_MAX, SSD_ZONE_BYTES_MAX, SSD_ZONE_BYTES_MIN, SSD_ZONES_MAX, SSD_ZONES_MIN};

/// Block of a new file unless the device needs a larger one.
const BLOCK_BYTES_DEFAULT: usize = 4096;
const SUPERBLOCK_BYTES_MIN: usize = 4096;
const ZONE_BYTES_DEFAULT_MIN: u64 = 4 << 20;
const ZONE_BYTES_DEFAULT_MAX: u64 = 256 << 20;
/// Zones of a new file, if their default size allows.
const ZONES_DEFAULT: u64 = 64;
/// Zones begin at a multiple of this.
const ZONES_ALIGN: u64 = 64 << 10;

/// Sizes of a file, from its superblock or for a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Unit of every offset and length.
    pub block_bytes: usize,
    /// Of every zone.
    pub zone_bytes: u64,
    /// Number of zones.
    pub zones: u32,
}

impl Geometry {
    /// For a file of at most `capacity_bytes` on a device whose blocks have `device_block` bytes.
    pub fn choose(
        capacity_bytes: u64,
        device_block: usize,
        block_bytes: Option<usize>,
        zone_bytes: Option<u64>,
    ) -> Result<Self> {
        let block_bytes = block_bytes.unwrap_or(BLOCK_BYTES_DEFAULT).max(device_block);
        let usual = (capacity_bytes / ZONES_DEFAULT).clamp(ZONE_BYTES_DEFAULT_MIN, ZONE_BYTES_DEFAULT_MAX);
        let zone_bytes = zone_bytes.unwrap_or(usual / ZONE_BYTES_DEFAULT_MIN * ZONE_BYTES_DEFAULT_MIN);
        let chosen = Self { block_bytes, zone_bytes, zones: 0 }.with_capacity(capacity_bytes)?;
        match chosen.is_sound() {
            true => Ok(chosen),
            false => Err(Error::invalid(format!(
                "blocks of {block_bytes} and zones of {zone_bytes} bytes do not fit: blocks are powers of two from 512 \
                 to {SSD_BLOCK_BYTES_MAX}, and zones multiples of them from {SSD_ZONE_BYTES_MIN} to \
                 {SSD_ZONE_BYTES_MAX} bytes"
            ))),
        }
    }

    /// The same with as many zones as fit into `capacity_bytes`.
    pub(crate) fn with_capacity(self, capacity_bytes: u64) -> Result<Self> {
        let zones = capacity_bytes.saturating_sub(self.zones_start()) / self.zone_bytes.max(1);
        if zones < u64::from(SSD_ZONES_MIN) {
            return Err(Error::invalid(format!(
                "{capacity_bytes} bytes of SSD are too few for {SSD_ZONES_MIN} zones of {} bytes: give each directory \
                 more, or remove the cache file and start anew",
                self.zone_bytes
            )));
        }
        Ok(Self { zones: zones.min(u64::from(SSD_ZONES_MAX)) as u32, ..self })
    }

    /// Whether all sizes are within their bounds; checked of everything that was read.
    pub(crate) fn is_sound(&self) -> bool {
        self.block_bytes.is_power_of_two()
            && (512..=SSD_BLOCK_BYTES_MAX).contains(&self.block_bytes)
            && (SSD_ZONE_BYTES_MIN..=SSD_ZONE_BYTES_MAX).contains(&self.zone_bytes)
            && self.zone_bytes.is_multiple_of(self.block_bytes as u64)
            && (SSD_ZONES_MIN..=SSD_ZONES_MAX).contains(&self.zones)
    }

    /// Bytes of one copy of the superblock.
    pub fn superblock_bytes(&self) -> usize {
        self.block_bytes.max(SUPERBLOCK_BYTES_MIN)
    }

    fn zones_start(&self) -> u64 {
        (2 * self.superblock_bytes() as u64).next_multiple_of(ZONES_ALIGN)
    }

    /// Blocks of one zone.
    pub fn zone_blocks(&self) -> u32 {
        (self.zone_bytes / self.block_bytes as u64) as u32
    }

    /// Offset of a block of a zone in the file.
    pub fn offset(&self, zone: u32, block: u32) -> u64 {
        self.zones_start() + u64::from(zone) * self.zone_bytes + u64::from(block) * self.block_bytes as u64
    }

    /// Length of the file.
    pub fn file_bytes(&self) -> u64 {
        self.offset(self.zones, 0)
    }

    /// Blocks that hold `bytes`.
    pub fn blocks_of(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.block_bytes as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_never_exceed_their_capacity() {
        for capacity in [17 << 20, (1 << 30) + 12_345, 512_000_000_000, 100 << 40] {
            for device_block in [512, 4096, 65536] {
                let geometry = Geometry::choose(capacity, device_block, None, None).unwrap();
                assert!(geometry.is_sound() && geometry.file_bytes() <= capacity, "{geometry:?}");
                assert!(geometry.block_bytes >= device_block);
            }
        }
    }

    #[test]
    fn what_cannot_work_is_refused() {
        assert!(Geometry::choose(1 << 20, 512, None, None).is_err());
        assert!(Geometry::choose(1 << 30, 512, Some(1000), None).is_err());
        assert!(Geometry::choose(1 << 30, 512, None, Some(100)).is_err());
        assert!(Geometry::choose(1 << 30, 512, None, Some((1 << 20) + 1)).is_err());
    }
}
