//! `pegaflow._native.Namespace`.

use std::sync::Arc;

use pegaflow_engine::traffic::Prompt;
use pegaflow_engine::{Key, NamespaceInfo};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error::{Engine, NativeError, Result};
use crate::items::Items;
use crate::keys::{hashes_in, keys, keys_in, optional_keys};
use crate::pool::{PoolHandle, counters};
use crate::tier::{self, Prefetch};

/// Blocks of one model, layout and KV cache group.
#[pyclass(frozen, module = "pegaflow._native")]
pub(crate) struct Namespace {
    pool: Arc<PoolHandle>,
    engine: pegaflow_engine::Namespace,
    #[pyo3(get)]
    id: u32,
    #[pyo3(get)]
    parts: u32,
    #[pyo3(get)]
    part_bytes: Vec<u64>,
    #[pyo3(get)]
    block_bytes: u64,
}

impl Namespace {
    /// A namespace of an open pool.
    pub(crate) fn new(pool: Arc<PoolHandle>, engine: pegaflow_engine::Namespace, info: NamespaceInfo) -> Self {
        let block_bytes = info.part_bytes.iter().sum();
        Self { pool, engine, id: info.id, parts: info.parts, part_bytes: info.part_bytes, block_bytes }
    }

    /// What the engine calls it.
    pub(crate) fn engine(&self) -> pegaflow_engine::Namespace {
        self.engine
    }
}

/// Keys of a lookup that are converted before the first of them is looked up.
const LOOKUP_KEYS_FIRST: usize = 64;
/// Keys of a lookup that are converted at a time after that.
const LOOKUP_KEYS_MAX: usize = 1024;

/// Blocks by the reason for which they were missed.
type Misses = (u64, u64, u64, u64, u64);

#[pymethods]
impl Namespace {
    #[pyo3(signature = (keys, start=0))]
    fn lookup(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, start: usize) -> Result<usize> {
        let (pool, items) = (self.pool.get()?, Items::of(keys, "keys")?);
        let (mut run, mut batch) = (0, LOOKUP_KEYS_FIRST);
        // By batches, so that a miss at once is also known at once, however many keys there are.
        while start + run < items.len() {
            let first = start + run;
            let keys = keys_in(&items, first..items.len().min(first + batch))?;
            let found = py.engine(|| pool.lookup(self.engine, &keys, 0))?;
            run += found;
            if found < keys.len() {
                break;
            }
            batch = LOOKUP_KEYS_MAX;
        }
        Ok(run)
    }

    fn contains<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> Result<Bound<'py, PyBytes>> {
        let (pool, keys) = (self.pool.get()?, self::keys(keys)?);
        let present = py.engine(|| pool.contains(self.engine, &keys))?;
        let flags: Vec<u8> = present.into_iter().map(u8::from).collect();
        Ok(PyBytes::new(py, &flags))
    }

    #[pyo3(signature = (keys, start=0, stop=None))]
    fn lease(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, start: usize, stop: Option<usize>) -> Result<Vec<u64>> {
        let (pool, keys) = (self.pool.get()?, self::keys(keys)?);
        let stop = stop.unwrap_or(keys.len()).min(keys.len());
        let start = start.min(stop);
        let refs = py.engine(|| pool.lease(self.engine, &keys, start, stop))?;
        Ok(refs.into_iter().map(|block| block.0).collect())
    }

    fn touch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> Result<usize> {
        let (pool, keys) = (self.pool.get()?, self::keys(keys)?);
        py.engine(|| pool.touch(self.engine, &keys))
    }

    #[pyo3(signature = (keys, *, parents=None, evict=true))]
    fn reserve(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        parents: Option<&Bound<'_, PyAny>>,
        evict: bool,
    ) -> Result<Vec<(usize, u64)>> {
        let (pool, keys) = (self.pool.get()?, self::keys(keys)?);
        let parents = parents.map(optional_keys).transpose()?;
        if parents.as_ref().is_some_and(|parents| parents.len() != keys.len()) {
            return Err(NativeError::invalid("parents and keys differ in length: pass one parent per key, or None"));
        }
        let reserved = py.engine(|| pool.reserve(self.engine, &keys, parents.as_deref(), evict))?;
        Ok(reserved.into_iter().map(|(index, block)| (index, block.0)).collect())
    }

    fn others(&self, py: Python<'_>) -> Result<usize> {
        let pool = self.pool.get()?;
        py.engine(|| pool.others_in(self.engine))
    }

    fn use_ssd(&self, py: Python<'_>) -> Result<bool> {
        let pool = self.pool.get()?;
        py.engine(|| pool.use_ssd(self.engine))
    }

    fn tiers<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> Result<Bound<'py, PyBytes>> {
        let (pool, keys) = (self.pool.get()?, self::keys(keys)?);
        let tiers = py.engine(|| pool.tiers(self.engine, &keys))?;
        let numbers: Vec<u8> = tiers.into_iter().map(tier::number).collect();
        Ok(PyBytes::new(py, &numbers))
    }

    #[pyo3(signature = (keys, *, parent=None, chained=true))]
    fn prefetch(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        parent: Option<&[u8]>,
        chained: bool,
    ) -> Result<Option<Prefetch>> {
        let (pool, keys) = (self.pool.get()?, self::keys(keys)?);
        let parent = parent.map(Key::new).transpose()?;
        Ok(py.engine(|| pool.prefetch(self.engine, &keys, parent, chained))?.map(Prefetch::new))
    }

    #[pyo3(signature = (*, wait=true))]
    fn reset(&self, py: Python<'_>, wait: bool) -> Result<u64> {
        let pool = self.pool.get()?;
        py.engine(|| if wait { pool.reset(self.engine) } else { pool.reset_memory(self.engine) })
    }

    #[pyo3(signature = (keys, *, start, ram, ssd, peer, late, stop=None))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn note_prompt(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        start: usize,
        ram: usize,
        ssd: usize,
        peer: usize,
        late: usize,
        stop: Option<usize>,
    ) -> Result<Option<Misses>> {
        let (pool, items) = (self.pool.get()?, Items::of(keys, "keys")?);
        let keys = hashes_in(&items, 0..stop.map_or(items.len(), |stop| stop.min(items.len())))?;
        let prompt = Prompt { start, ram, ssd, peer, late };
        let missed = py.engine(|| pool.note_prompt(self.engine, &keys, &prompt))?;
        Ok(missed.map(|missed| (missed.never_stored, missed.evicted, missed.reset, missed.late, missed.tier_off)))
    }

    fn note_loaded(&self, py: Python<'_>, blocks: u64) -> Result<()> {
        let pool = self.pool.get()?;
        py.engine(|| pool.note_loaded(self.engine, blocks))
    }

    fn stats<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let pool = self.pool.get()?;
        counters(py, py.engine(|| pool.namespace_stats(self.engine))?)
    }
}
