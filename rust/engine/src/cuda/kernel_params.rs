//! Parameters of the kernels in `blocks.cu`, and a layout's table as they read it.

use crate::copy::KvLayout;

use super::plan::alignment_of;

/// Blocks of one launch: as many as fit in the 4 KiB that a launch carries along.
pub(super) const LAUNCH_BLOCKS_MAX: usize = 240;

/// Bytes that a warp takes at once.
pub(super) const TILE_BYTES: usize = 8192;

/// Threads of one CTA.
pub(super) const CTA_THREADS: u32 = 512;

const WARP_LANES: u32 = 32;

/// One block: where byte 0 of its packed form lies, and its number in the cache.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KernelBlock {
    pub(super) packed: u64,
    pub(super) id: u32,
    pub(super) unused: u32,
}

/// `Params` of `blocks.cu`.
#[repr(C)]
#[derive(Clone, Debug)]
pub(super) struct KernelParams {
    pub(super) regions: u64,
    pub(super) first_tile: u64,
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) region_count: u32,
    pub(super) tiles_per_region: u32,
    pub(super) tiles_per_block: u32,
    pub(super) block_count: u32,
    pub(super) access_bytes: u32,
    pub(super) unused: u32,
    pub(super) blocks: [KernelBlock; LAUNCH_BLOCKS_MAX],
}

const _: () = assert!(size_of::<KernelParams>() == 56 + 16 * LAUNCH_BLOCKS_MAX && size_of::<KernelParams>() <= 4096);

impl KernelParams {
    /// A launch that moves nothing: it makes the driver load the kernel.
    pub(super) fn nothing() -> Self {
        Self {
            regions: 0,
            first_tile: 0,
            from: 0,
            to: 0,
            region_count: 0,
            tiles_per_region: 0,
            tiles_per_block: 0,
            block_count: 0,
            access_bytes: 1,
            unused: 0,
            blocks: [KernelBlock::default(); LAUNCH_BLOCKS_MAX],
        }
    }

    /// CTAs that find work, at most `ctas_max`.
    pub(super) fn ctas(&self, ctas_max: u32) -> u32 {
        let tiles = u64::from(self.block_count) * u64::from(self.tiles_per_block);
        tiles.div_ceil(u64::from(CTA_THREADS / WARP_LANES)).clamp(1, u64::from(ctas_max)) as u32
    }
}

/// Row of the table of regions.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KernelRegion {
    pub(super) address: u64,
    pub(super) stride: u64,
    pub(super) length: u64,
    pub(super) offset: u64,
}

/// A layout as the kernels read it: rows, then the first tile of each region and the number of tiles.
#[derive(Debug)]
pub(super) struct LayoutTable {
    pub(super) rows: Vec<KernelRegion>,
    pub(super) first_tile: Vec<u32>,
    /// See `Params`.
    pub(super) tiles_per_region: u32,
    /// Alignment of everything in the layout, at most 16.
    pub(super) alignment: usize,
}

impl LayoutTable {
    /// The table of `layout`; `None` if a block has more tiles than a launch can count.
    pub(super) fn new(layout: &KvLayout) -> Option<Self> {
        let (mut rows, mut first_tile) = (Vec::new(), vec![0u32]);
        let (mut offset, mut alignment) = (0usize, 16);
        for region in layout.regions() {
            rows.push(KernelRegion {
                address: region.address as u64,
                stride: region.stride_bytes as u64,
                length: region.length_bytes as u64,
                offset: offset as u64,
            });
            for value in [region.address, region.stride_bytes, region.length_bytes, offset] {
                alignment = alignment.min(alignment_of(value));
            }
            offset += region.length_bytes;
            let tiles = u32::try_from(region.length_bytes.div_ceil(TILE_BYTES)).ok()?;
            first_tile.push(first_tile.last()?.checked_add(tiles)?);
        }
        first_tile.last()?.checked_mul(LAUNCH_BLOCKS_MAX as u32)?;
        let first = first_tile[1];
        let equal = first_tile.windows(2).all(|pair| pair[1] - pair[0] == first);
        Some(Self { rows, first_tile, tiles_per_region: if equal { first } else { 0 }, alignment })
    }

    /// Tiles of one block.
    pub(super) fn tiles_per_block(&self) -> u32 {
        self.first_tile.last().copied().unwrap_or(0)
    }

    /// The bytes to upload: rows, then tiles.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let rows = self.rows.iter().flat_map(|row| [row.address, row.stride, row.length, row.offset]);
        let tiles = self.first_tile.iter().flat_map(|tile| tile.to_ne_bytes());
        rows.flat_map(u64::to_ne_bytes).chain(tiles).collect()
    }

    /// Where the tiles begin in [`Self::bytes`].
    pub(super) fn tiles_offset(&self) -> usize {
        self.rows.len() * size_of::<KernelRegion>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::Region;

    fn table(regions: &[(usize, usize, usize)]) -> LayoutTable {
        let regions: Vec<Region> = regions
            .iter()
            .map(|&(address, stride_bytes, length_bytes)| Region { address, stride_bytes, length_bytes })
            .collect();
        // SAFETY: the layout is never used in a job.
        LayoutTable::new(&unsafe { KvLayout::new(&regions, 8) }.unwrap()).unwrap()
    }

    #[test]
    fn equal_regions_need_no_search() {
        let equal = table(&[(1 << 20, 16384, 8192), (2 << 20, 16384, 8192)]);
        assert_eq!((equal.tiles_per_region, equal.tiles_per_block(), equal.alignment), (1, 2, 16));
        let unequal = table(&[(1 << 20, 16384, 8192), (2 << 20, 16384, 8200)]);
        assert_eq!((unequal.tiles_per_region, unequal.tiles_per_block(), unequal.alignment), (0, 3, 8));
    }

    #[test]
    fn the_least_aligned_number_decides() {
        assert_eq!(table(&[(1 << 20, 4096, 4096), ((2 << 20) + 4, 4096, 512)]).alignment, 4);
        assert_eq!(table(&[(1 << 20, 4097, 4096)]).alignment, 1);
    }

    #[test]
    fn a_launch_has_no_more_ctas_than_work() {
        let params = KernelParams { block_count: 3, tiles_per_block: 10, ..KernelParams::nothing() };
        assert_eq!((params.ctas(32), params.ctas(1)), (2, 1));
        assert_eq!(KernelParams::nothing().ctas(32), 1);
    }
}
