//! Sizes of a pool and the offsets that follow from them.

use crate::error::{Error, Result};
use crate::limits::{
    LABEL_BYTES_MAX, NAMESPACES_MAX, POOL_BYTES_MAX, PROCESSES_MAX, SEGMENT_BYTES_DEFAULT, SEGMENT_BYTES_MIN,
    SEGMENTS_MAX, SLOTS_MAX, SLOTS_MIN, SLOTS_PER_RANGE, STRIPES,
};
use crate::shm::rows::{ExtentRow, NamespaceRow, PoolHeader, ProcessRow, SlotHeader, Stripe};

/// Bytes of an ordinary page, and of what tables and parts are aligned to.
pub(crate) const PAGE: u64 = 4096;
const _: () = assert!(LABEL_BYTES_MAX.is_multiple_of(8));

/// The numbers that the creator chose; everything else follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) pool_bytes: u64,
    pub(crate) segment_bytes: u64,
    pub(crate) slots_max: u64,
}

/// Byte offsets of the control file's tables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offsets {
    pub(crate) processes: usize,
    pub(crate) namespaces: usize,
    pub(crate) extents: usize,
    pub(crate) stripes: usize,
    pub(crate) ranges: usize,
    pub(crate) buckets: usize,
    pub(crate) free: usize,
    /// End of what the creator claims at once; the rest is claimed as extents need it.
    pub(crate) fixed_end: usize,
    pub(crate) stamps: usize,
    pub(crate) slots: usize,
    pub(crate) end: usize,
}

impl Geometry {
    /// Choose sizes for a new pool of `pool_bytes` in pages of `page_bytes`.
    pub(crate) fn choose(
        pool_bytes: u64,
        segment_bytes: Option<u64>,
        slots_max: Option<u64>,
        page_bytes: u64,
    ) -> Result<Self> {
        let least = SEGMENT_BYTES_MIN.max(page_bytes);
        if pool_bytes < least {
            return Err(Error::invalid(format!(
                "a pool of {pool_bytes} bytes is too small: choose a pool_size of at least {least} bytes"
            )));
        }
        let automatic = (pool_bytes / 16).clamp(1 << 20, SEGMENT_BYTES_DEFAULT).min(pool_bytes);
        let segment_bytes = segment_bytes.unwrap_or(automatic).max(page_bytes) / page_bytes * page_bytes;
        if pool_bytes < segment_bytes {
            return Err(Error::invalid(format!(
                "a pool of {pool_bytes} bytes holds no segment of {segment_bytes}: choose a larger pool_size or a \
                 smaller segment_size"
            )));
        }
        let pool_bytes = pool_bytes.checked_div(segment_bytes).map_or(0, |count| count * segment_bytes);
        let slots = slots_max.unwrap_or(pool_bytes / (16 << 10)).clamp(SLOTS_MIN, SLOTS_MAX);
        let geometry = Self { pool_bytes, segment_bytes, slots_max: slots.div_ceil(SLOTS_PER_RANGE) * SLOTS_PER_RANGE };
        geometry.check().map_err(Error::invalid)?;
        Ok(geometry)
    }

    /// Whether these numbers can be a pool; the message says which cannot.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        if self.segment_bytes < SEGMENT_BYTES_MIN || !self.segment_bytes.is_multiple_of(PAGE) {
            return Err(format!(
                "segments of {} bytes are too small: choose a segment_size of at least {SEGMENT_BYTES_MIN} bytes",
                self.segment_bytes
            ));
        }
        if self.pool_bytes == 0 || !self.pool_bytes.is_multiple_of(self.segment_bytes) {
            return Err(format!("a pool of {} bytes holds no segment of {}", self.pool_bytes, self.segment_bytes));
        }
        if self.pool_bytes > POOL_BYTES_MAX {
            return Err(format!(
                "a pool of {} bytes is too large: choose a pool_size of at most {POOL_BYTES_MAX}",
                self.pool_bytes
            ));
        }
        if self.segments_max() > SEGMENTS_MAX {
            return Err(format!(
                "{} segments are too many (at most {SEGMENTS_MAX}): choose a larger segment_size",
                self.segments_max()
            ));
        }
        if !(SLOTS_MIN..=SLOTS_MAX).contains(&self.slots_max) || !self.slots_max.is_multiple_of(SLOTS_PER_RANGE) {
            return Err(format!("{} slots are outside {SLOTS_MIN} to {SLOTS_MAX}", self.slots_max));
        }
        Ok(())
    }

    pub(crate) fn segments_max(&self) -> u64 {
        self.pool_bytes / self.segment_bytes
    }

    /// Twice the slots: most chains have one entry, and a lookup one cache miss.
    pub(crate) fn buckets(&self) -> usize {
        (self.slots_max as usize).next_power_of_two() * 2
    }

    /// Where the tables lie. The geometry has been checked, so nothing overflows.
    pub(crate) fn offsets(&self) -> Offsets {
        let slots = self.slots_max as usize;
        let extents = self.segments_max() as usize;
        let mut end = size_of::<PoolHeader>();
        let mut table = |bytes: usize| {
            let start = end;
            end = (start + bytes).next_multiple_of(PAGE as usize);
            start
        };
        let processes = table(PROCESSES_MAX * size_of::<ProcessRow>());
        let namespaces = table(NAMESPACES_MAX * size_of::<NamespaceRow>());
        let extents = table(extents * size_of::<ExtentRow>());
        let stripes = table(STRIPES * size_of::<Stripe>());
        let ranges = table(slots / SLOTS_PER_RANGE as usize * size_of::<u32>());
        let buckets = table(self.buckets() * size_of::<u32>());
        let free = table(slots / 64 * size_of::<u64>());
        let stamps = table(slots * size_of::<u64>());
        let slots = table(slots * size_of::<SlotHeader>());
        Offsets {
            processes,
            namespaces,
            extents,
            stripes,
            ranges,
            buckets,
            free,
            fixed_end: stamps,
            stamps,
            slots,
            end,
        }
    }
}

/// Bytes from one slot's part to the next: whole pages for parts that may go to a disk, cache lines for small ones.
pub(crate) fn slot_stride(part_bytes: u64) -> u64 {
    part_bytes.next_multiple_of(if part_bytes >= 8 * PAGE { PAGE } else { 64 }).max(64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_pools_get_small_segments() {
        let geometry = Geometry::choose(64 << 20, None, None, PAGE).unwrap();
        assert_eq!((geometry.segment_bytes, geometry.segments_max()), (4 << 20, 16));
        assert_eq!(Geometry::choose(30_000_000_000, None, None, PAGE).unwrap().segment_bytes, 1 << 30);
    }

    #[test]
    fn segments_are_whole_pages_of_any_size() {
        let huge = 2 << 20;
        assert_eq!(Geometry::choose(30_000_000_000, None, None, huge).unwrap().segment_bytes, 1 << 30);
        assert_eq!(Geometry::choose(33 << 20, Some(5 << 20), None, huge).unwrap().segment_bytes, 4 << 20);
        assert_eq!(Geometry::choose(8 << 20, None, None, huge).unwrap().segment_bytes, huge);
        assert!(Geometry::choose(1 << 20, None, None, huge).is_err());
    }

    #[test]
    fn impossible_sizes_are_refused() {
        assert!(Geometry::choose(1000, None, None, PAGE).is_err());
        assert!(Geometry::choose(1 << 30, Some(100), None, PAGE).is_err());
        assert!(Geometry::choose(1 << 50, Some(1 << 20), None, PAGE).is_err());
        assert!(Geometry::choose(1 << 20, Some(2 << 20), None, PAGE).is_err());
    }

    #[test]
    fn a_size_that_is_refused_is_the_one_that_was_given_and_named_like_its_option() {
        let refusal = |pool, segment| Geometry::choose(pool, segment, None, PAGE).unwrap_err().to_string();
        for bytes in [0, 30, 4096, 65_535] {
            let said = refusal(bytes, None);
            assert!(said.starts_with(&format!("a pool of {bytes} bytes")) && said.contains("a pool_size of"), "{said}");
        }
        let said = refusal(1 << 20, Some(2 << 20));
        assert!(said.contains("1048576") && said.contains("2097152") && said.contains("segment_size"), "{said}");
        assert!(refusal(1 << 30, Some(100)).contains("a segment_size of"));
        assert!(refusal(1 << 50, Some(1 << 20)).contains("a larger segment_size"));
    }

    #[test]
    fn tables_do_not_overlap() {
        let offsets = Geometry::choose(1 << 30, None, Some(1 << 20), PAGE).unwrap().offsets();
        let starts = [
            size_of::<PoolHeader>(),
            offsets.processes,
            offsets.namespaces,
            offsets.extents,
            offsets.stripes,
            offsets.ranges,
            offsets.buckets,
            offsets.free,
            offsets.stamps,
            offsets.slots,
            offsets.end,
        ];
        assert!(starts.windows(2).all(|pair| pair[0] <= pair[1]));
    }
}
