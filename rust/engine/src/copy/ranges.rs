//! Copies of contiguous ranges that the caller waits for: one large value in or out of many slots.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};

use super::queue::{NewJob, Work};
use super::stream::{PartStream, StreamOptions};
use super::threads::CopyThreads;

/// Less than this in sum is copied by the calling thread: waking others takes longer.
const INLINE_BYTES_MAX: usize = 1 << 20;

/// From here on a copy goes around the cache.
const STREAMING_BYTES_MIN: usize = 4 << 20;

/// One contiguous copy.
#[derive(Clone, Copy, Debug)]
pub struct CopyRange {
    /// First byte to read.
    pub source: *const u8,
    /// First byte to write.
    pub target: *mut u8,
    /// Length.
    pub bytes: usize,
}

struct RangeJob {
    ranges: Vec<CopyRange>,
    part: u32,
    options: StreamOptions,
    checksums: Mutex<Vec<u64>>,
}

// SAFETY: the pointers are only followed in `run`, while the caller of `copy_ranges` waits and vouches for them; each
// range is copied by one thread.
unsafe impl Send for RangeJob {}
// SAFETY: as above; the checksums are behind a lock.
unsafe impl Sync for RangeJob {}

/// Copy all `ranges`, over `threads` if it is worth it, and wait. With `checksum`, returns the checksum of each range
/// as bytes of part `part` (see [`crate::checksum`]); without, an empty list.
///
/// # Safety
/// For each range, `source` must be readable and `target` writable for `bytes` bytes until this returns. No target may
/// overlap another target or a source, and nobody else may touch the targets or write the sources meanwhile.
pub unsafe fn copy_ranges(
    threads: &CopyThreads,
    ranges: Vec<CopyRange>,
    part: u32,
    checksum: bool,
) -> Result<Vec<u64>> {
    let total = ranges.iter().map(|range| range.bytes).fold(0, usize::saturating_add);
    let items = ranges.len();
    let checksums = Mutex::new(if checksum { vec![0; items] } else { Vec::new() });
    let options = StreamOptions { checksum, streaming: total >= STREAMING_BYTES_MIN };
    let job = Arc::new(RangeJob { ranges, part, options, checksums });
    if total < INLINE_BYTES_MAX {
        job.run(0..items, &mut Vec::new());
    } else {
        let work = Arc::clone(&job) as Arc<dyn Work>;
        let done = threads.run(NewJob { work, items, batch_items: 1, urgent: true })?;
        if !done.ok() {
            return Err(Error::corrupt("a copy thread panicked while it copied a value: report this as a defect"));
        }
    }
    let checksums = std::mem::take(&mut *job.checksums.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(checksums)
}

/// Copy one range on the calling thread. With `checksum`, returns the checksum of its bytes as those of part `part`.
///
/// # Safety
/// As for [`copy_ranges`].
pub unsafe fn copy_range(range: CopyRange, part: u32, checksum: bool) -> Option<u64> {
    // SAFETY: handed on from the caller.
    unsafe { copy_one(range, part, StreamOptions { checksum, streaming: false }) }
}

/// # Safety
/// As for [`copy_ranges`].
unsafe fn copy_one(range: CopyRange, part: u32, options: StreamOptions) -> Option<u64> {
    let mut stream = PartStream::new(part, range.bytes, options);
    // SAFETY: handed on from the caller.
    unsafe { stream.copy(range.target, range.source, range.bytes) };
    stream.finish()
}

impl Work for RangeJob {
    fn run(&self, batch: Range<usize>, _failed: &mut Vec<u32>) -> u64 {
        let mut copied = 0;
        for index in batch {
            let range = self.ranges[index];
            // SAFETY: the caller of `copy_ranges` vouches for the range and waits for this job.
            if let Some(checksum) = unsafe { copy_one(range, self.part, self.options) } {
                self.checksums.lock().unwrap_or_else(PoisonError::into_inner)[index] = checksum;
            }
            copied += range.bytes as u64;
        }
        copied
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::part_checksum;

    #[test]
    fn ranges_of_any_length_arrive_with_their_checksums() {
        let threads = CopyThreads::new(3).unwrap();
        for bytes in [0, 1, 100_000, 3_000_001, 9_000_000] {
            let source: Vec<u8> =
                (0..bytes as u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
            let mut target = vec![0u8; bytes];
            let piece = 700_000;
            let ranges: Vec<_> = source
                .chunks(piece)
                .zip(target.chunks_mut(piece))
                .map(|(from, to)| CopyRange { source: from.as_ptr(), target: to.as_mut_ptr(), bytes: from.len() })
                .collect();
            // SAFETY: the chunks live until the end of the loop's body and do not overlap.
            let checksums = unsafe { copy_ranges(&threads, ranges, 2, true) }.unwrap();
            assert!(target == source, "{bytes} bytes");
            let expected: Vec<_> = source.chunks(piece).map(|chunk| part_checksum(2, chunk)).collect();
            assert_eq!(checksums, expected);
        }
    }

    #[test]
    fn without_checksums_none_are_returned() {
        let threads = CopyThreads::new(1).unwrap();
        let (source, mut target) = (vec![7u8; 5_000_000], vec![0u8; 5_000_000]);
        let range = CopyRange { source: source.as_ptr(), target: target.as_mut_ptr(), bytes: source.len() };
        // SAFETY: both vectors outlive the call.
        let checksums = unsafe { copy_ranges(&threads, vec![range], 0, false) }.unwrap();
        assert!(checksums.is_empty());
        assert!(target == source);
    }
}
