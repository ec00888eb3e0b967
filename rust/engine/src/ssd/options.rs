//! How a store is opened.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::limits::{
    SSD_BLOCK_BYTES_MAX, SSD_CHUNK_BYTES_MAX, SSD_CHUNK_BYTES_MIN, SSD_DEPTH_MAX, SSD_DIRECTORIES_MAX, SSD_HANG_MAX,
};

/// How the kernel is asked for I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// io_uring, or threads where it is not to be had.
    #[default]
    Auto,
    /// io_uring or nothing.
    Uring,
    /// pread and pwrite by threads.
    Threads,
}

/// Options of [`super::Store::open`].
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// One per device.
    pub directories: Vec<PathBuf>,
    /// Name of the cache: 1 to 64 letters, digits, '.', '_' or '-'.
    pub name: String,
    /// Of all directories together; their files never take more. `None`: as large as they are.
    pub capacity_bytes: Option<u64>,
    /// Make files that do not exist.
    pub create: bool,
    /// Change nothing in the files, which take no writes then; for looking at them. They are locked all the same.
    pub read_only: bool,
    /// Block of new files: a power of two from 512; default 4,096, and never less than the device needs.
    pub block_bytes: Option<usize>,
    /// Zone of new files; default capacity / 64 within 4 and 256 MiB.
    pub zone_bytes: Option<u64>,
    /// Bytes of one operation; also of each buffer, of which there are `read_depth + write_depth + 2` per directory.
    pub chunk_bytes: usize,
    /// Reads on their way to one directory.
    pub read_depth: u16,
    /// Writes on their way to one directory.
    pub write_depth: u16,
    /// How the kernel is asked.
    pub backend: Backend,
    /// An operation without an answer for so long turns its directory off.
    pub hang_max: Duration,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            directories: Vec::new(),
            name: "default".into(),
            capacity_bytes: Some(512_000_000_000),
            create: true,
            read_only: false,
            block_bytes: None,
            zone_bytes: None,
            chunk_bytes: 1 << 20,
            read_depth: 16,
            write_depth: 8,
            backend: Backend::Auto,
            hang_max: SSD_HANG_MAX,
        }
    }
}

impl StoreOptions {
    pub(crate) fn check(&self) -> Result<()> {
        let directories = self.directories.len();
        if directories == 0 || directories > SSD_DIRECTORIES_MAX {
            return Err(Error::invalid(format!("an SSD cache has 1 to {SSD_DIRECTORIES_MAX} directories")));
        }
        if !(1..=SSD_DEPTH_MAX).contains(&self.read_depth) || !(1..=SSD_DEPTH_MAX).contains(&self.write_depth) {
            return Err(Error::invalid(format!("queue depths of an SSD cache are 1 to {SSD_DEPTH_MAX}")));
        }
        if self.read_only && (self.create || self.capacity_bytes.is_some()) {
            return Err(Error::invalid("who only reads an SSD cache neither makes its files nor sets their capacity"));
        }
        if !self.chunk_bytes.is_power_of_two()
            || !(SSD_CHUNK_BYTES_MIN..=SSD_CHUNK_BYTES_MAX).contains(&self.chunk_bytes)
            || self.block_bytes.is_some_and(|block_bytes| block_bytes > self.chunk_bytes.min(SSD_BLOCK_BYTES_MAX))
        {
            return Err(Error::invalid(format!(
                "one operation on an SSD has a power of two of bytes, from {SSD_CHUNK_BYTES_MIN} to \
                 {SSD_CHUNK_BYTES_MAX}, and no fewer than a block"
            )));
        }
        Ok(())
    }

    /// Buffers of one directory: for reads, for writes, and for what is waited for.
    pub(crate) fn buffers(&self) -> u16 {
        self.read_depth + self.write_buffers() + 1
    }

    /// Those for writes: one is filled while the others are on their way.
    pub(crate) fn write_buffers(&self) -> u16 {
        self.write_depth + 1
    }
}
