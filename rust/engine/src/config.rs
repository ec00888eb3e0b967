//! What a caller may choose when opening a pool.

use std::path::PathBuf;

/// Options of [`crate::Pool::open`]. Sizes are used by the creator only; an existing pool keeps its geometry.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Directory (a mount of tmpfs) that holds pools.
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
    /// Share of the pool against the weights of other instances, from 0.001 to 1,000,000; default 1. Opening the pool
    /// again in the same process changes it.
    pub weight: Option<f64>,
    /// Where new blocks of this process start among those that go in turn: `probation` (default) or `lru`. Opening the
    /// pool again in the same process changes it.
    pub policy: Option<String>,
    /// Keep segments in huge pages that were reserved for good, if there are enough; `None`: in ordinary pages.
    pub huge_pages: Option<HugePages>,
    /// Nameless: the pool lives in anonymous memory of this process and leaves nothing behind.
    pub private: bool,
}

/// Where to look for huge pages.
#[derive(Clone, Debug)]
pub struct HugePages {
    /// A directory on a hugetlbfs; `None`: on any that this user may write.
    pub dir: Option<PathBuf>,
    /// Where the kernel's own file systems are; another one than `/` in tests only.
    pub system_root: PathBuf,
}

impl Default for HugePages {
    fn default() -> Self {
        Self { dir: None, system_root: PathBuf::from("/") }
    }
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
            weight: None,
            policy: None,
            huge_pages: None,
            private: false,
        }
    }
}
