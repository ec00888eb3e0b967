//! Copying and hashing in one pass: xxh3-64 of what goes from source to target, while it is in registers.
//!
//! Copying first and hashing after costs the sum of both times, since a core that hashes does not keep the memory
//! busy; done together, the hash hides behind the copy. Results equal those of `xxhash_rust::xxh3` (the constants are
//! those of the XXH3 specification); inputs of 240 bytes and less have another algorithm there and are not for this
//! file.

use std::arch::x86_64::{
    __m256i, _mm_sfence, _mm256_add_epi64, _mm256_loadu_si256, _mm256_mul_epu32, _mm256_set1_epi32,
    _mm256_shuffle_epi32, _mm256_slli_epi64, _mm256_srli_epi64, _mm256_storeu_si256, _mm256_stream_si256,
    _mm256_xor_si256,
};

/// Inputs must be longer than this.
pub(super) const SHORT_BYTES_MAX: usize = 240;

const STRIPE_BYTES: usize = 64;
const STRIPES_PER_BLOCK: usize = 16;
const VECTOR_BYTES: usize = 32;
const PRIME32_1: u64 = 0x9E37_79B1;
const PRIME32_2: u64 = 0x85EB_CA77;
const PRIME32_3: u64 = 0xC2B2_AE3D;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;
const SECRET: [u64; 24] = [
    0xbe4b_a423_396c_feb8,
    0x1cad_21f7_2c81_017c,
    0xdb97_9083_e96d_d4de,
    0x1f67_b3b7_a4a4_4072,
    0x78e5_c0cc_4ee6_79cb,
    0x2172_ffcc_7dd0_5a82,
    0x8e24_43f7_7446_08b8,
    0x4c26_3a81_e690_35e0,
    0xcb00_c391_bb52_283c,
    0xa32e_531b_8b65_d088,
    0x4ef9_0da2_9748_6471,
    0xd8ac_dea9_46ef_1938,
    0x3f34_9ce3_3f76_faa8,
    0x1d4f_0bc7_c7bb_dcf9,
    0x3159_b4cd_4be0_518a,
    0x6473_78d9_c97e_9fc8,
    0xc3eb_d334_83ac_c5ea,
    0xeb63_13fa_ffa0_81c5,
    0x49da_f0b7_51dd_0d17,
    0x9e68_d429_2655_16d3,
    0xfca1_477d_58be_162b,
    0xce31_d07a_d1b8_f88f,
    0x2804_1695_8f3a_cb45,
    0x7e40_4bbb_cafb_d7af,
];
const SECRET_BYTES: usize = 192;
const SCRAMBLE_OFFSET: usize = SECRET_BYTES - STRIPE_BYTES;
const LAST_STRIPE_OFFSET: usize = SECRET_BYTES - STRIPE_BYTES - 7;
const MERGE_OFFSET: usize = 11;

/// How bytes reach the target.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Store {
    /// Through the cache: for what is read again soon.
    Cached,
    /// Around the cache: for what is larger than the cache anyway; needs no read of the line first.
    Streaming,
    /// Not at all: hash only.
    Skip,
}

/// State of one input whose length is known in advance.
pub(super) struct CopyHasher {
    lanes: [u64; 8],
    secret: [u8; SECRET_BYTES],
    stripes_in_block: usize,
    /// Stripes still to be consumed: all but the last, which the algorithm treats apart.
    stripes_left: usize,
    bytes: usize,
    /// The stripe consumed last, if the input ends inside of one.
    previous: [u8; STRIPE_BYTES],
    pending: [u8; STRIPE_BYTES],
    pending_bytes: usize,
}

impl CopyHasher {
    /// For an input of `bytes` bytes, more than [`SHORT_BYTES_MAX`]; `None` if this CPU lacks AVX2.
    pub(super) fn new(seed: u64, bytes: usize) -> Option<Self> {
        assert!(bytes > SHORT_BYTES_MAX, "short inputs have another algorithm");
        if !std::arch::is_x86_feature_detected!("avx2") {
            return None;
        }
        let mut secret = [0; SECRET_BYTES];
        for (index, (target, word)) in secret.chunks_exact_mut(8).zip(SECRET).enumerate() {
            let seeded = if index % 2 == 0 { word.wrapping_add(seed) } else { word.wrapping_sub(seed) };
            target.copy_from_slice(&seeded.to_le_bytes());
        }
        Some(Self {
            lanes: [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1],
            secret,
            stripes_in_block: 0,
            stripes_left: (bytes - 1) / STRIPE_BYTES,
            bytes,
            previous: [0; STRIPE_BYTES],
            pending: [0; STRIPE_BYTES],
            pending_bytes: 0,
        })
    }

    /// Copy the next piece of the input and take it into the hash.
    ///
    /// # Safety
    /// `source` must be readable and `target` writable for `bytes` bytes, and they must not overlap. All pieces
    /// together must not be longer than the input was said to be. Before what was copied is made visible to another
    /// thread, [`fence`] must be called.
    pub(super) unsafe fn copy(&mut self, target: *mut u8, source: *const u8, bytes: usize, store: Store) {
        let mut done = 0;
        if self.pending_bytes > 0 {
            done = bytes.min(STRIPE_BYTES - self.pending_bytes);
            // SAFETY: `done` is within both buffers by the caller's contract, and within `pending` by the line above.
            unsafe { self.keep(target, source, done) };
            if self.pending_bytes == STRIPE_BYTES && self.stripes_left > 0 {
                let stripe = self.pending;
                // SAFETY: one stripe of our own; nothing is stored.
                unsafe { self.consume(std::ptr::null_mut(), stripe.as_ptr(), 1, Store::Skip) };
                self.pending_bytes = 0;
            }
        }
        let stripes = ((bytes - done) / STRIPE_BYTES).min(self.stripes_left);
        if stripes > 0 {
            // SAFETY: `done` plus the stripes are within both buffers; AVX2 was detected in `new`.
            unsafe { self.consume(target.add(done), source.add(done), stripes, store) };
            done += stripes * STRIPE_BYTES;
        }
        if done < bytes {
            // SAFETY: the rest of both buffers; shorter than a stripe, or the last stripe, since the input ends there.
            unsafe { self.keep(target.add(done), source.add(done), bytes - done) };
        }
    }

    /// Copy what is not a whole stripe, and keep it for the next piece.
    ///
    /// # Safety
    /// As [`Self::copy`]; `bytes` must fit in what `pending` has left (checked).
    unsafe fn keep(&mut self, target: *mut u8, source: *const u8, bytes: usize) {
        let room = &mut self.pending[self.pending_bytes..self.pending_bytes + bytes];
        // SAFETY: the buffers are valid by contract, `room` has exactly `bytes` bytes and is ours alone.
        unsafe {
            std::ptr::copy_nonoverlapping(source, room.as_mut_ptr(), bytes);
            // Opaque, so that no second copy of the source is made of this: it may have changed.
            std::ptr::copy_nonoverlapping(std::hint::black_box(room.as_ptr()), target, bytes);
        }
        self.pending_bytes += bytes;
    }

    /// Copy and hash whole stripes.
    ///
    /// # Safety
    /// `stripes` stripes must be readable at `source` and, unless skipped, writable at `target`; AVX2 must be there.
    unsafe fn consume(&mut self, target: *mut u8, source: *const u8, stripes: usize, store: Store) {
        debug_assert!(stripes <= self.stripes_left, "more bytes than the input was said to have");
        let aligned = (target as usize).is_multiple_of(VECTOR_BYTES);
        // SAFETY: handed on from the caller; streaming stores only where the target is aligned for them.
        unsafe {
            match store {
                Store::Skip => self.run::<SKIP>(target, source, stripes),
                Store::Streaming if aligned => self.run::<STREAMING>(target, source, stripes),
                Store::Streaming | Store::Cached => self.run::<CACHED>(target, source, stripes),
            }
            if !self.bytes.is_multiple_of(STRIPE_BYTES) {
                // What was copied, not what the source holds by now: somebody may be writing on.
                let copied = if store == Store::Skip { source } else { target.cast_const() };
                let last = copied.add((stripes - 1) * STRIPE_BYTES);
                std::ptr::copy_nonoverlapping(last, self.previous.as_mut_ptr(), STRIPE_BYTES);
            }
        }
        self.stripes_left -= stripes;
    }

    /// Runs of stripes up to the ends of the algorithm's blocks of 16, each followed by a scramble.
    ///
    /// # Safety
    /// As [`Self::consume`]; for `STREAMING` the target must be aligned to a vector.
    #[target_feature(enable = "avx2")]
    unsafe fn run<const STORE: u8>(&mut self, target: *mut u8, source: *const u8, stripes: usize) {
        let mut done = 0;
        while done < stripes {
            let count = (STRIPES_PER_BLOCK - self.stripes_in_block).min(stripes - done);
            let secret = self.secret[self.stripes_in_block * 8..].as_ptr();
            let offset = done * STRIPE_BYTES;
            // SAFETY: `count` stripes from `offset` are within the caller's; the secret reaches 64 bytes beyond the
            // offset of each of the block's 16 stripes. An offset is not added to a null target.
            unsafe {
                let target = if STORE == SKIP { target } else { target.add(offset) };
                accumulate::<STORE>(&mut self.lanes, secret, target, source.add(offset), count);
            }
            self.stripes_in_block += count;
            done += count;
            if self.stripes_in_block == STRIPES_PER_BLOCK {
                // SAFETY: AVX2 is there, and 64 bytes of the secret follow the offset.
                unsafe { scramble(&mut self.lanes, self.secret[SCRAMBLE_OFFSET..].as_ptr()) };
                self.stripes_in_block = 0;
            }
        }
    }

    /// The hash, once all pieces were copied.
    pub(super) fn finish(mut self) -> u64 {
        assert_eq!(self.stripes_left, 0, "the input ended early");
        let mut last = self.previous;
        last.copy_within(self.pending_bytes.., 0);
        last[STRIPE_BYTES - self.pending_bytes..].copy_from_slice(&self.pending[..self.pending_bytes]);
        let secret = self.secret[LAST_STRIPE_OFFSET..].as_ptr();
        // SAFETY: one stripe of our own, not stored; 64 bytes of the secret follow the offset; AVX2 is there.
        unsafe { accumulate::<SKIP>(&mut self.lanes, secret, std::ptr::null_mut(), last.as_ptr(), 1) };
        let mut hash = (self.bytes as u64).wrapping_mul(PRIME64_1);
        let merge_secret = self.secret[MERGE_OFFSET..].chunks_exact(16);
        for (pair, secret) in self.lanes.chunks_exact(2).zip(merge_secret) {
            let (low, high) = secret.split_at(8);
            let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
            let product = u128::from(pair[0] ^ word(low)) * u128::from(pair[1] ^ word(high));
            hash = hash.wrapping_add(product as u64 ^ (product >> 64) as u64);
        }
        hash = (hash ^ hash >> 37).wrapping_mul(0x1656_6791_9E37_79F9);
        hash ^ hash >> 32
    }
}

const CACHED: u8 = 0;
const STREAMING: u8 = 1;
const SKIP: u8 = 2;

/// Copy `stripes` stripes and add them to the lanes, the secret advancing by 8 bytes each.
///
/// # Safety
/// As [`CopyHasher::run`]; `secret` must be readable for `8 * stripes + 56` bytes.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn accumulate<const STORE: u8>(
    lanes: &mut [u64; 8],
    secret: *const u8,
    target: *mut u8,
    source: *const u8,
    stripes: usize,
) {
    // SAFETY: all reads are within the stripes, the secret and the lanes; writes within the target's stripes.
    unsafe {
        let lane_vectors = lanes.as_mut_ptr().cast::<__m256i>();
        let mut sums = [_mm256_loadu_si256(lane_vectors), _mm256_loadu_si256(lane_vectors.add(1))];
        for stripe in 0..stripes {
            for (half, sum) in sums.iter_mut().enumerate() {
                let offset = stripe * STRIPE_BYTES + half * VECTOR_BYTES;
                let data = _mm256_loadu_si256(source.add(offset).cast());
                match STORE {
                    CACHED => _mm256_storeu_si256(target.add(offset).cast(), data),
                    STREAMING => _mm256_stream_si256(target.add(offset).cast(), data),
                    _ => {}
                }
                let key = _mm256_loadu_si256(secret.add(stripe * 8 + half * VECTOR_BYTES).cast());
                let mixed = _mm256_xor_si256(data, key);
                let product = _mm256_mul_epu32(mixed, _mm256_srli_epi64::<32>(mixed));
                let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(data);
                *sum = _mm256_add_epi64(*sum, _mm256_add_epi64(swapped, product));
            }
        }
        _mm256_storeu_si256(lane_vectors, sums[0]);
        _mm256_storeu_si256(lane_vectors.add(1), sums[1]);
    }
}

/// Mix the lanes at the end of a block of stripes.
///
/// # Safety
/// AVX2 must be there; 64 bytes must be readable at `secret`.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn scramble(lanes: &mut [u64; 8], secret: *const u8) {
    // SAFETY: both vectors are within the lanes and within the secret.
    unsafe {
        let prime = _mm256_set1_epi32(PRIME32_1 as u32 as i32);
        for half in 0..2 {
            let place = lanes.as_mut_ptr().cast::<__m256i>().add(half);
            let key = _mm256_loadu_si256(secret.add(half * VECTOR_BYTES).cast());
            let lane = _mm256_loadu_si256(place);
            let mixed = _mm256_xor_si256(_mm256_xor_si256(lane, _mm256_srli_epi64::<47>(lane)), key);
            let low = _mm256_mul_epu32(mixed, prime);
            let high = _mm256_slli_epi64::<32>(_mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime));
            _mm256_storeu_si256(place, _mm256_add_epi64(low, high));
        }
    }
}

/// Copy around the cache, without a hash. The caller calls [`fence`] before it makes the bytes visible.
///
/// # Safety
/// `source` must be readable and `target` writable for `bytes` bytes, without overlap; AVX2 must be there.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn copy_streaming(target: *mut u8, source: *const u8, bytes: usize) {
    let head = (target.align_offset(VECTOR_BYTES)).min(bytes);
    let lines = (bytes - head) / STRIPE_BYTES;
    let tail = head + lines * STRIPE_BYTES;
    // SAFETY: head, lines and tail are disjoint parts of the buffers; lines start at an aligned target.
    unsafe {
        std::ptr::copy_nonoverlapping(source, target, head);
        for line in 0..lines {
            let offset = head + line * STRIPE_BYTES;
            let low = _mm256_loadu_si256(source.add(offset).cast());
            let high = _mm256_loadu_si256(source.add(offset + VECTOR_BYTES).cast());
            _mm256_stream_si256(target.add(offset).cast(), low);
            _mm256_stream_si256(target.add(offset + VECTOR_BYTES).cast(), high);
        }
        std::ptr::copy_nonoverlapping(source.add(tail), target.add(tail), bytes - tail);
    }
}

/// Order streaming stores before whatever this thread stores next.
pub(super) fn fence() {
    // SAFETY: every x86-64 CPU has SSE.
    unsafe { _mm_sfence() };
}

#[cfg(test)]
mod tests {
    use super::*;
    use xxhash_rust::xxh3::xxh3_64_with_seed;

    fn sample(bytes: usize) -> Vec<u8> {
        (0..bytes as u64).map(|index| (index.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 37) as u8).collect()
    }

    #[test]
    fn copies_and_hashes_like_the_reference_at_every_length() {
        let source = sample(5000);
        for bytes in (241..2200).chain([4096, 4097, 4999, 5000]) {
            for store in [Store::Cached, Store::Streaming] {
                let mut hasher = CopyHasher::new(bytes as u64, bytes).expect("these tests need AVX2");
                let mut target = vec![0; bytes];
                // SAFETY: both vectors have `bytes` bytes.
                unsafe { hasher.copy(target.as_mut_ptr(), source.as_ptr(), bytes, store) };
                fence();
                assert_eq!(target, source[..bytes], "{bytes} bytes");
                assert_eq!(hasher.finish(), xxh3_64_with_seed(&source[..bytes], bytes as u64), "{bytes} bytes");
            }
        }
    }

    #[test]
    fn pieces_of_any_length_make_the_same_hash() {
        let source = sample(20_000);
        let expected = xxh3_64_with_seed(&source, 7);
        for piece in [1, 3, 31, 63, 64, 65, 100, 128, 1000, 1024, 1025, 4096] {
            let mut hasher = CopyHasher::new(7, source.len()).expect("these tests need AVX2");
            let mut target = vec![0; source.len()];
            for (target, source) in target.chunks_mut(piece).zip(source.chunks(piece)) {
                // SAFETY: both chunks have the same length.
                unsafe { hasher.copy(target.as_mut_ptr(), source.as_ptr(), source.len(), Store::Streaming) };
            }
            fence();
            assert_eq!(target, source, "pieces of {piece}");
            assert_eq!(hasher.finish(), expected, "pieces of {piece}");
        }
    }

    #[test]
    fn streaming_copy_copies_at_every_alignment() {
        assert!(std::arch::is_x86_feature_detected!("avx2"), "these tests need AVX2");
        let source = sample(1000);
        for shift in 0..70 {
            for bytes in [0, 1, 31, 64, 100, 513, 900] {
                let mut target = vec![0xAA; 1000];
                // SAFETY: shift and length stay within both vectors.
                unsafe { copy_streaming(target.as_mut_ptr().add(shift), source.as_ptr().add(9), bytes) };
                fence();
                assert_eq!(target[shift..shift + bytes], source[9..9 + bytes]);
                assert!(target[..shift].iter().chain(&target[shift + bytes..]).all(|&byte| byte == 0xAA));
            }
        }
    }
}
