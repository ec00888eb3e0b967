//! One run of bytes on its way from fragments to a slot or back: copied piece by piece, hashed on the way if asked for.

use crate::checksum::PartHasher;

#[cfg(target_arch = "x86_64")]
use super::xxh3_avx2::{self, CopyHasher, SHORT_BYTES_MAX, Store};

/// What is copied and hashed in two passes goes in pieces that stay in the first-level caches in between.
const TWO_PASS_PIECE_BYTES: usize = 32 << 10;

/// Pieces shorter than this go through the cache: streaming stores pay off in long runs only.
#[cfg(target_arch = "x86_64")]
const STREAMING_PIECE_BYTES_MIN: usize = 1 << 10;

/// As much of the next piece is fetched while one is copied: the CPU's own prefetch stops at the end of a page.
#[cfg(target_arch = "x86_64")]
const PREFETCH_BYTES: usize = 512;

/// How the bytes of one part are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamOptions {
    /// Compute the checksum.
    pub(super) checksum: bool,
    /// Store around the cache: for jobs so large that they would only push everything else out of it.
    pub(super) streaming: bool,
}

// Lives on the stack for one part: boxing the larger variants would cost an allocation per block.
#[allow(clippy::large_enum_variant)]
enum Hash {
    None,
    TwoPass(PartHasher),
    #[cfg(target_arch = "x86_64")]
    OnePass(CopyHasher),
}

/// Copies the pieces of one part, in order.
pub(super) struct PartStream {
    hash: Hash,
    #[cfg(target_arch = "x86_64")]
    streaming: bool,
}

impl PartStream {
    /// For `bytes` bytes of part number `part`.
    pub(super) fn new(part: u32, bytes: usize, options: StreamOptions) -> Self {
        Self {
            hash: if options.checksum { Hash::of(part, bytes) } else { Hash::None },
            #[cfg(target_arch = "x86_64")]
            streaming: options.streaming && std::arch::is_x86_feature_detected!("avx2"),
        }
    }

    /// Copy the next piece.
    ///
    /// # Safety
    /// `source` must be readable and `target` writable for `bytes` bytes, and they must not overlap. All pieces
    /// together must not be longer than `new` was told.
    pub(super) unsafe fn copy(&mut self, target: *mut u8, source: *const u8, bytes: usize) {
        match &mut self.hash {
            // SAFETY: handed on from the caller.
            Hash::None => unsafe { self.copy_plain(target, source, bytes) },
            Hash::TwoPass(hasher) => {
                let mut done = 0;
                while done < bytes {
                    let piece = (bytes - done).min(TWO_PASS_PIECE_BYTES);
                    // SAFETY: the piece is within both buffers; nobody else touches the target meanwhile, so it may
                    // be borrowed once it is written.
                    let copied = unsafe {
                        std::ptr::copy_nonoverlapping(source.add(done), target.add(done), piece);
                        std::slice::from_raw_parts(target.add(done), piece)
                    };
                    hasher.update(copied);
                    done += piece;
                }
            }
            #[cfg(target_arch = "x86_64")]
            Hash::OnePass(hasher) => {
                let streaming = self.streaming && bytes >= STREAMING_PIECE_BYTES_MIN;
                let store = if streaming { Store::Streaming } else { Store::Cached };
                // SAFETY: handed on from the caller; `finish` fences.
                unsafe { hasher.copy(target, source, bytes, store) };
            }
        }
    }

    /// # Safety
    /// As [`Self::copy`].
    unsafe fn copy_plain(&self, target: *mut u8, source: *const u8, bytes: usize) {
        #[cfg(target_arch = "x86_64")]
        if self.streaming && bytes >= STREAMING_PIECE_BYTES_MIN {
            // SAFETY: handed on from the caller; `streaming` is only set where there is AVX2; `finish` fences.
            return unsafe { xxh3_avx2::copy_streaming(target, source, bytes) };
        }
        // SAFETY: handed on from the caller.
        unsafe { std::ptr::copy_nonoverlapping(source, target, bytes) }
    }

    /// Make what was copied visible before anything this thread stores next, and return the checksum if asked for.
    pub(super) fn finish(self) -> Option<u64> {
        #[cfg(target_arch = "x86_64")]
        if self.streaming {
            xxh3_avx2::fence();
        }
        match self.hash {
            Hash::None => None,
            Hash::TwoPass(hasher) => Some(hasher.finish()),
            #[cfg(target_arch = "x86_64")]
            Hash::OnePass(hasher) => Some(hasher.finish()),
        }
    }
}

impl Hash {
    fn of(part: u32, bytes: usize) -> Self {
        #[cfg(target_arch = "x86_64")]
        if bytes > SHORT_BYTES_MAX
            && let Some(hasher) = CopyHasher::new(u64::from(part), bytes)
        {
            return Self::OnePass(hasher);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = bytes;
        Self::TwoPass(PartHasher::new(part))
    }
}

/// Begin to fetch the start of what is copied next.
pub(super) fn prefetch(source: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..bytes.min(PREFETCH_BYTES)).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint that accesses nothing, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(offset).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (source, bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::part_checksum;
    use crate::sync::{LocalU32, LocalU64, Relaxed};

    fn copied(hash: Hash, streaming: bool, source: &[u8], piece: usize) -> (Vec<u8>, Option<u64>) {
        let mut stream = PartStream {
            hash,
            #[cfg(target_arch = "x86_64")]
            streaming,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let _ = streaming;
        let mut target = vec![0; source.len()];
        for (target, source) in target.chunks_mut(piece).zip(source.chunks(piece)) {
            // SAFETY: both chunks have the same length.
            unsafe { stream.copy(target.as_mut_ptr(), source.as_ptr(), source.len()) };
        }
        (target, stream.finish())
    }

    #[test]
    fn checksum_is_that_of_the_copy_while_the_source_changes() {
        const BYTES: usize = 300;
        let source: Vec<LocalU64> = (0..BYTES.div_ceil(8)).map(|_| LocalU64::new(0)).collect();
        let options = StreamOptions { checksum: true, streaming: false };
        let running = LocalU32::new(1);
        let mut wrong = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while running.load(Relaxed) != 0 {
                    source.iter().for_each(|word| word.store(word.load(Relaxed).wrapping_add(1), Relaxed));
                }
            });
            for _ in 0..200_000 {
                let mut target = [0u8; BYTES];
                let mut stream = PartStream::new(3, BYTES, options);
                // SAFETY: both have as many bytes; the copy takes whichever value each of them has at the time.
                unsafe { stream.copy(target.as_mut_ptr(), source.as_ptr().cast(), BYTES) };
                wrong += usize::from(stream.finish() != Some(part_checksum(3, &target)));
            }
            running.store(0, Relaxed);
        });
        assert_eq!(wrong, 0);
    }

    #[test]
    fn every_way_of_copying_gives_the_same_bytes_and_checksum() {
        for bytes in [0, 1, 100, 240, 241, 5000, 200_000] {
            let source: Vec<u8> = (0..bytes as u32).map(|index| (index * 7 % 253) as u8).collect();
            let expected = Some(part_checksum(3, &source));
            for piece in [1000, 4096, 40_000] {
                for streaming in [false, true] {
                    let (plain, none) = copied(Hash::None, streaming, &source, piece);
                    assert_eq!((plain.as_slice(), none), (source.as_slice(), None));
                    for hash in [Hash::TwoPass(PartHasher::new(3)), Hash::of(3, bytes)] {
                        let (target, checksum) = copied(hash, streaming, &source, piece);
                        assert_eq!((target.as_slice(), checksum), (source.as_slice(), expected));
                    }
                }
            }
        }
    }
}
