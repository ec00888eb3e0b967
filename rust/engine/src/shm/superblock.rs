//! The part of the control file that never changes: who made it, with which layout and geometry.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use xxhash_rust::xxh3::xxh3_64;

use crate::error::{Error, Result};
use crate::shm::geometry::Geometry;
use crate::shm::names::{CONTROL, LAYOUT_VERSION, removal_command};

/// "PEGAPOOL", little endian.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"PEGAPOOL");
/// Words of the superblock; the last one is the checksum of the others.
pub(crate) const WORDS: usize = 16;

/// Word with the pool's id.
pub(crate) const POOL_ID_WORD: usize = 6;

/// Contents of the superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub(crate) geometry: Geometry,
    pub(crate) created_unix_s: u64,
    pub(crate) pool_id: u64,
    /// Size of the pages that segments lie in, in a directory of their own; 0: ordinary ones, beside the control file.
    pub(crate) page_bytes: u64,
    /// Checksum of that directory's name; see `segments_dir.rs`.
    pub(crate) name_checksum: u64,
}

impl Superblock {
    /// The words as they stand in the file.
    pub(crate) fn encode(&self) -> [u64; WORDS] {
        let mut words = [0u64; WORDS];
        words[0] = MAGIC;
        words[1] = u64::from(LAYOUT_VERSION);
        words[2] = self.geometry.pool_bytes;
        words[3] = self.geometry.segment_bytes;
        words[4] = self.geometry.slots_max;
        words[5] = self.created_unix_s;
        words[POOL_ID_WORD] = self.pool_id;
        words[7] = self.page_bytes;
        words[8] = self.name_checksum;
        words[WORDS - 1] = checksum(&words);
        words
    }

    /// Read and check the superblock of the pool in `dir`; every mismatch is refused with its reason.
    pub(crate) fn read(file: &File, dir: &Path) -> Result<Self> {
        let refuse = |reason: String| {
            Err(Error::refused(format!(
                "{} {reason}: remove it with {} or use another name",
                dir.join(CONTROL).display(),
                removal_command(dir)
            )))
        };
        let mut bytes = [0u8; WORDS * 8];
        if file.read_exact_at(&mut bytes, 0).is_err() {
            return refuse("is too short to be a pool's control file".into());
        }
        let mut words = [0u64; WORDS];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(chunk.try_into().expect("chunk of 8"));
        }
        if words[0] != MAGIC {
            return refuse("is not a pool's control file".into());
        }
        if words[1] != u64::from(LAYOUT_VERSION) {
            return refuse(format!("has layout version {}, this program has {LAYOUT_VERSION}", words[1]));
        }
        if words[WORDS - 1] != checksum(&words) {
            return refuse("has a damaged superblock".into());
        }
        let geometry = Geometry { pool_bytes: words[2], segment_bytes: words[3], slots_max: words[4] };
        if let Err(reason) = geometry.check() {
            return refuse(format!("has an impossible geometry ({reason})"));
        }
        let page_bytes = words[7];
        if page_bytes != 0 && !(page_bytes.is_power_of_two() && geometry.segment_bytes.is_multiple_of(page_bytes)) {
            return refuse(format!("has impossible pages of {page_bytes} bytes"));
        }
        let expected = geometry.offsets().end as u64;
        let actual = file.metadata().map(|meta| meta.len()).unwrap_or(0);
        if actual != expected {
            return refuse(format!("has {actual} bytes instead of {expected}"));
        }
        Ok(Self {
            geometry,
            created_unix_s: words[5],
            pool_id: words[POOL_ID_WORD],
            page_bytes,
            name_checksum: words[8],
        })
    }
}

fn checksum(words: &[u64; WORDS]) -> u64 {
    let bytes: Vec<u8> = words[..WORDS - 1].iter().flat_map(|word| word.to_le_bytes()).collect();
    xxh3_64(&bytes)
}
