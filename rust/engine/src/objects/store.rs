//! The face of the object store.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::config::OpenOptions;
use crate::copy::CopyThreads;
use crate::error::{Error, Result};
use crate::limits::{
    OBJECT_POOL_BYTES_MIN, OBJECT_SEGMENT_BYTES_MAX, OBJECT_SLOTS_MAX, POOL_BYTES_DEFAULT, SEGMENT_BYTES_MIN,
    SEGMENTS_MAX,
};
use crate::shm::core::Core;
use crate::shm::file::free_bytes;
use crate::shm::pool::Pool;
use crate::shm::stats::Counter;
use crate::sync::AtomicU64;

use super::classes::{CLASSES, Classes};
use super::evict::Candidates;
use super::record::ValueKind;
use super::value::Value;

/// Segments of a pool that an object store creates.
const SEGMENTS_WANTED: u64 = 64;

/// What a caller may choose when opening an object store.
#[derive(Clone, Debug)]
pub struct ObjectStoreOptions {
    /// Directory (a mount of tmpfs) that holds pools.
    pub shm_dir: PathBuf,
    /// Bytes of the pool if this call creates it; default: as for [`Pool::open`].
    pub pool_bytes: Option<u64>,
    /// Whether values of the pool that were used longest ago may go when it is full.
    pub evict: bool,
    /// Whether to store a checksum with each value, and compare it when the value is read.
    pub checksum: bool,
}

impl Default for ObjectStoreOptions {
    fn default() -> Self {
        Self { shm_dir: PathBuf::from("/dev/shm"), pool_bytes: None, evict: false, checksum: true }
    }
}

/// Values by name, in a pool that other processes may share.
pub struct ObjectStore {
    inner: Arc<Inner>,
}

/// What a store and the values that it lends share.
pub(super) struct Inner {
    pub(super) pool: Arc<Pool>,
    pub(super) classes: Classes,
    pub(super) evict: bool,
    pub(super) checksum: bool,
    pub(super) candidates: [Mutex<Candidates>; CLASSES],
    /// Version of the pool's extents at which a class could not grow any more.
    pub(super) at_capacity: [AtomicU64; CLASSES],
    pub(super) stats: Stats,
    threads: Mutex<Option<Arc<CopyThreads>>>,
}

/// Counters of this store.
#[derive(Default)]
pub(super) struct Stats {
    pub(super) puts: Counter,
    pub(super) gets: Counter,
    pub(super) hits: Counter,
    pub(super) removed: Counter,
    pub(super) evicted: Counter,
}

impl ObjectStore {
    /// Open the store in pool `name`, creating the pool if need be; without a name, in anonymous memory that goes with
    /// the last handle.
    pub fn open(name: Option<&str>, options: &ObjectStoreOptions) -> Result<Self> {
        let pool = Pool::open(name.unwrap_or("private"), &pool_options(name.is_none(), options)?)?;
        let classes = Classes::open(&pool)?;
        let inner = Inner {
            pool,
            classes,
            evict: options.evict,
            checksum: options.checksum,
            candidates: Default::default(),
            at_capacity: [const { AtomicU64::new(u64::MAX) }; CLASSES],
            stats: Stats::default(),
            threads: Mutex::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Directory of the pool's files; empty for a private pool.
    pub fn path(&self) -> &Path {
        self.inner.pool.path()
    }

    /// Bytes of the pool at most.
    pub fn pool_bytes(&self) -> u64 {
        self.inner.pool.pool_bytes()
    }

    /// Store `value` under `key`, in place of what was there. All or nothing, whatever dies meanwhile.
    pub fn put(&self, key: &str, kind: ValueKind, value: &[u8]) -> Result<()> {
        self.inner.put(key, kind, value)
    }

    /// The value of `key`, held until it is dropped: it can be copied out even if it is replaced or removed meanwhile.
    pub fn get(&self, key: &str) -> Result<Option<Value>> {
        self.inner.core().check_usable()?;
        Inner::get(&self.inner, key)
    }

    /// Take the value of `key` out. Of several that race for it, one gets it.
    pub fn remove(&self, key: &str) -> Result<Option<Value>> {
        self.inner.core().check_usable()?;
        Inner::remove(&self.inner, key)
    }

    /// Whether there is a value of `key`.
    pub fn contains(&self, key: &str) -> Result<bool> {
        self.inner.core().check_usable()?;
        self.inner.contains(key)
    }

    /// How many values there are.
    pub fn count(&self) -> Result<usize> {
        self.inner.core().check_usable()?;
        self.inner.count()
    }

    /// Keys of all values, in no order. A key that is there all the while is in it once.
    pub fn keys(&self) -> Result<Vec<String>> {
        self.inner.core().check_usable()?;
        self.inner.keys()
    }

    /// Counters of this store, then those of its pool.
    pub fn stats(&self) -> Result<Vec<(&'static str, u64)>> {
        self.inner.core().check_usable()?;
        let own = &self.inner.stats;
        let mut stats = vec![
            ("values_put", own.puts.get()),
            ("values_asked_for", own.gets.get()),
            ("values_found", own.hits.get()),
            ("values_removed", own.removed.get()),
            ("values_evicted", own.evicted.get()),
        ];
        stats.extend(self.inner.pool.stats());
        Ok(stats)
    }
}

impl Inner {
    pub(super) fn core(&self) -> &Core {
        self.pool.core()
    }

    /// Threads for large copies, started with the first one. `None` if there cannot be any: then the caller copies.
    pub(super) fn threads(&self) -> Option<Arc<CopyThreads>> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if threads.is_none() {
            match CopyThreads::new(0) {
                Ok(new) => *threads = Some(Arc::new(new)),
                Err(error) => log::warn!("pegaflow: values are copied by one thread: {error}"),
            }
        }
        threads.clone()
    }
}

/// Many small segments, since each belongs to one size class; many slots, since most values are small.
fn pool_options(private: bool, options: &ObjectStoreOptions) -> Result<OpenOptions> {
    if let Some(bytes) = options.pool_bytes.filter(|bytes| *bytes < OBJECT_POOL_BYTES_MIN) {
        return Err(Error::invalid(format!(
            "a pool of {bytes} bytes is too small: choose a pool_size of at least {OBJECT_POOL_BYTES_MIN} bytes"
        )));
    }
    let pool_bytes = match options.pool_bytes {
        Some(bytes) => bytes,
        None => POOL_BYTES_DEFAULT.min(free_bytes(&options.shm_dir)? / 2).max(OBJECT_POOL_BYTES_MIN),
    };
    let wanted = 1 << (pool_bytes / SEGMENTS_WANTED).ilog2();
    let fewest = (pool_bytes / SEGMENTS_MAX + 1).next_power_of_two();
    Ok(OpenOptions {
        shm_dir: options.shm_dir.clone(),
        pool_bytes: Some(pool_bytes),
        segment_bytes: Some(u64::clamp(wanted, SEGMENT_BYTES_MIN, OBJECT_SEGMENT_BYTES_MAX).max(fewest)),
        slots_max: Some((pool_bytes / 512).min(OBJECT_SLOTS_MAX)),
        label: "PegaEngine".into(),
        private,
        ..OpenOptions::default()
    })
}
