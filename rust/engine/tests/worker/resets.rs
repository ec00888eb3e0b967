//! When each namespace was reset, told to all workers of a run: what was reserved before is seen by nobody afterwards.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use nix::time::{ClockId, clock_gettime};

use crate::random::Random;

/// Low bits of a nonce that no clock sets, so that no two stores have the same.
const RANDOM_BITS: u32 = 8;

/// A file with the time of the last finished reset of each namespace.
pub struct Resets {
    file: File,
}

/// Nanoseconds since boot, the same for all processes.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).unwrap();
    now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64
}

/// A nonce that says when it was made.
pub fn nonce(random: &mut Random) -> u64 {
    now_ns() << RANDOM_BITS | random.below(1 << RANDOM_BITS)
}

impl Resets {
    pub fn open(dir: &Path) -> Self {
        let options = File::options().read(true).write(true).create(true).truncate(false).open(dir.join("resets"));
        Self { file: options.unwrap() }
    }

    /// A reset of namespace `space` that began at `began_ns` has returned.
    pub fn finished(&self, space: usize, began_ns: u64) {
        self.file.write_all_at(&began_ns.to_le_bytes(), space as u64 * 8).unwrap();
    }

    /// When the last finished reset of namespace `space` began; 0 for never.
    pub fn last_ns(&self, space: usize) -> u64 {
        let mut bytes = [0u8; 8];
        let _none_yet = self.file.read_at(&mut bytes, space as u64 * 8).unwrap();
        u64::from_le_bytes(bytes)
    }
}

/// When the nonce was made.
pub fn made_ns(nonce: u64) -> u64 {
    nonce >> RANDOM_BITS
}
