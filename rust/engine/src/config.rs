//! What a caller may choose when opening a pool.

use std::path::PathBuf;

/// Options of [`crate::Pool::open`]. Sizes are used by the creator only; an existing pool keeps its geometry.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Directory (a mount of tmpfs or hugetlbfs) that holds pools.
    pub shm_dir: PathBuf,
    /// Bytes of data segments at most; default: the smaller of 30 GB and half of what the file system has left.
    pub pool_bytes: Option<u64>,
    /// Bytes of one data segment; default 1 GiB, less for small pools.
    pub segment_bytes: Option<u64>,
    /// Slots at most; default one per 16 KiB of the pool.
    pub slots_max: Option<u64>,
    /// Create the pool if it does not exist.
    pub create: bool,
    /// Shown by `pegaflow inspect` for this process.
    pub label: String,
    /// Nameless: the pool lives in anonymous memory of this process and leaves nothing behind.
    pub private: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            shm_dir: PathBuf::from("/dev/shm"),
            pool_bytes: None,
            segment_bytes: None,
            slots_max: None,
            create: true,
            label: String::new(),
            private: false,
        }
    }
}
