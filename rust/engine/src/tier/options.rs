//! How a process serves a pool's SSD tier.

use crate::error::{Error, Result};
use crate::ssd::StoreOptions;

/// Which blocks are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admission {
    /// Blocks that were used again, and those next to be evicted.
    #[default]
    SecondTouch,
    /// Every block.
    All,
}

/// Options of [`crate::Pool::serve_ssd`].
#[derive(Clone, Debug, Default)]
pub struct TierOptions {
    /// Where and how; the name is the pool's, whatever it says.
    pub store: StoreOptions,
    /// Which blocks are written.
    pub admission: Admission,
    /// Bytes per second written at most; 0: as fast as the disks are.
    pub write_bytes_per_second_max: u64,
}

impl TierOptions {
    pub(crate) fn check(&self) -> Result<u64> {
        self.store.check()?;
        self.store.capacity_bytes.ok_or_else(|| Error::invalid("an SSD tier needs a capacity: say how many bytes"))
    }
}
