//! Where the blocks of one KV cache group lie in this process's memory.

use crate::error::{Error, Result};
use crate::limits::{COPY_BLOCKS_MAX, COPY_REGIONS_MAX};

/// One contiguous fragment of every block: that of block `b` is `[address + b * stride_bytes, + length_bytes)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Address of the fragment of block 0.
    pub address: usize,
    /// Distance between the fragments of neighbouring blocks.
    pub stride_bytes: usize,
    /// Length of one fragment.
    pub length_bytes: usize,
}

/// Validated regions of a KV cache group: no address of a block in range overflows, no two blocks share a byte of one
/// region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    regions: Box<[Region]>,
    blocks: u32,
    block_bytes: usize,
}

impl KvLayout {
    /// A layout of `blocks` blocks. In a slot, the fragments of a block follow each other in the order of `regions`.
    ///
    /// # Safety
    /// The engine reads and writes what the layout describes from its own threads. Until the last job that uses the
    /// layout is done, every fragment of the blocks named in a job must be mapped, readable for saves and writable
    /// for loads, and nobody else may write what a save reads or touch what a load writes.
    pub unsafe fn new(regions: &[Region], blocks: u64) -> Result<Self> {
        if regions.is_empty() || regions.len() > COPY_REGIONS_MAX {
            return Err(Error::invalid(format!(
                "a KV layout has 1 to {COPY_REGIONS_MAX} regions, this one has {}: pass one region per fragment",
                regions.len()
            )));
        }
        let block_count = u32::try_from(blocks).ok().filter(|&count| (1..=COPY_BLOCKS_MAX).contains(&count));
        let Some(block_count) = block_count else {
            return Err(Error::invalid(format!(
                "a KV layout has 1 to {COPY_BLOCKS_MAX} blocks, not {blocks}: pass the number of blocks of the cache"
            )));
        };
        let mut block_bytes = 0usize;
        for (index, region) in regions.iter().enumerate() {
            check_region(index, region, block_count)?;
            block_bytes = block_bytes
                .checked_add(region.length_bytes)
                .filter(|&bytes| isize::try_from(bytes).is_ok())
                .ok_or_else(|| Error::invalid("the regions of a block are too long in sum: check length_bytes"))?;
        }
        Ok(Self { regions: merge_adjacent(regions), blocks: block_count, block_bytes })
    }

    /// Bytes of one block: the sum of the lengths of its fragments.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Number of blocks; ids below it are valid.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Regions, those that continue each other in every block made one.
    pub(crate) fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Refuse ids that are not of this layout.
    pub(crate) fn check_ids(&self, block_ids: &[u32]) -> Result<()> {
        match block_ids.iter().find(|&&id| id >= self.blocks) {
            None => Ok(()),
            Some(id) => Err(Error::invalid(format!(
                "block id {id} is outside the layout's {} blocks: pass ids of the group that the layout describes",
                self.blocks
            ))),
        }
    }
}

fn check_region(index: usize, region: &Region, blocks: u32) -> Result<()> {
    let what = |problem: &str| Err(Error::invalid(format!("region {index} of the KV layout {problem}")));
    if region.address == 0 {
        return what("starts at address 0: pass the address of block 0");
    }
    if region.length_bytes == 0 {
        return what("has length_bytes 0: leave empty fragments out");
    }
    if blocks > 1 && region.stride_bytes < region.length_bytes {
        return what("has a stride_bytes below its length_bytes, so its blocks overlap: pass the true stride");
    }
    let end = (blocks as usize - 1)
        .checked_mul(region.stride_bytes)
        .and_then(|bytes| bytes.checked_add(region.length_bytes))
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .and_then(|bytes| bytes.checked_add(region.address));
    match end {
        Some(_) => Ok(()),
        None => what("ends beyond the address space: check stride_bytes and the number of blocks"),
    }
}

/// Regions that continue each other in every block are copied as one: fewer and longer copies.
fn merge_adjacent(regions: &[Region]) -> Box<[Region]> {
    let mut merged: Vec<Region> = Vec::with_capacity(regions.len());
    for region in regions {
        match merged.last_mut() {
            Some(last)
                if last.address + last.length_bytes == region.address
                    && last.stride_bytes == region.stride_bytes
                    && last.length_bytes + region.length_bytes <= last.stride_bytes =>
            {
                last.length_bytes += region.length_bytes;
            }
            _ => merged.push(*region),
        }
    }
    merged.into_boxed_slice()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(address: usize, stride_bytes: usize, length_bytes: usize) -> Region {
        Region { address, stride_bytes, length_bytes }
    }

    fn layout(regions: &[Region], blocks: u64) -> Result<KvLayout> {
        // SAFETY: these layouts are never used in a job.
        unsafe { KvLayout::new(regions, blocks) }
    }

    #[test]
    fn block_bytes_is_the_sum_of_all_fragments() {
        let layout = layout(&[region(4096, 64, 64), region(65536, 128, 32)], 16).unwrap();
        assert_eq!(layout.block_bytes(), 96);
        assert_eq!(layout.blocks(), 16);
    }

    #[test]
    fn regions_that_continue_each_other_become_one() {
        let one = layout(&[region(4096, 128, 64), region(4160, 128, 64)], 4).unwrap();
        assert_eq!(one.regions(), &[region(4096, 128, 128)]);
        let other_stride = layout(&[region(4096, 128, 64), region(4160, 256, 64)], 4).unwrap();
        assert_eq!(other_stride.regions().len(), 2);
        let whole_stride = layout(&[region(4096, 64, 64), region(4160, 64, 64)], 1).unwrap();
        assert_eq!(whole_stride.regions().len(), 2);
    }

    #[test]
    fn impossible_regions_are_refused() {
        for bad in [
            region(0, 64, 64),
            region(4096, 64, 0),
            region(4096, 32, 64),
            region(usize::MAX - 64, 64, 64),
            region(4096, usize::MAX / 2, 64),
        ] {
            let error = layout(&[region(4096, 64, 64), bad], 4).unwrap_err();
            assert!(error.to_string().starts_with("region 1 "), "{error}");
        }
        assert!(layout(&[], 4).is_err());
        assert!(layout(&[region(4096, 64, 64)], 0).is_err());
        assert!(layout(&[region(4096, 64, 64)], u64::MAX).is_err());
        assert!(layout(&[region(4096, 0, isize::MAX as usize - 1), region(4096, 0, 2)], 1).is_err());
    }

    #[test]
    fn ids_out_of_range_are_refused() {
        let layout = layout(&[region(4096, 64, 64)], 4).unwrap();
        layout.check_ids(&[0, 3]).unwrap();
        assert!(layout.check_ids(&[0, 4]).is_err());
    }
}
