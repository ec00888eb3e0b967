//! `pegaflow._native.Pool`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use pegaflow_engine::{BlockRef, Error, ErrorKind, HugePages, OpenOptions};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{Engine, NativeError, Result};
use crate::items;
use crate::namespace::Namespace;
use crate::tier;

/// One handle to a pool, shared by what was made from it; empty once it was closed.
pub(crate) struct PoolHandle(RwLock<Option<Arc<pegaflow_engine::Pool>>>);

impl PoolHandle {
    /// The open pool.
    pub(crate) fn get(&self) -> Result<Arc<pegaflow_engine::Pool>> {
        let pool = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let closed = || Error::new(ErrorKind::Closed, "this handle of the pool was closed: open the pool again");
        Ok(Arc::clone(pool.as_ref().ok_or_else(closed)?))
    }

    fn close(&self) {
        let pool = self.0.write().unwrap_or_else(PoisonError::into_inner).take();
        // Outside of the lock: the last handle leaves the pool, which takes a while.
        drop(pool);
    }
}

/// One shared pool, mapped into this process.
#[pyclass(frozen, module = "pegaflow._native")]
pub(crate) struct Pool {
    handle: Arc<PoolHandle>,
    #[pyo3(get)]
    name: String,
    #[pyo3(get)]
    path: OsString,
    #[pyo3(get)]
    shm_dir: OsString,
    #[pyo3(get)]
    pool_bytes: u64,
    #[pyo3(get)]
    segment_bytes: u64,
    #[pyo3(get)]
    slots_max: u64,
    #[pyo3(get)]
    created: bool,
}

impl Pool {
    /// The open pool behind this handle.
    pub(crate) fn get(&self) -> Result<Arc<pegaflow_engine::Pool>> {
        self.handle.get()
    }
}

/// Counters as a dict.
pub(crate) fn counters<'py>(py: Python<'py>, counters: Vec<(&'static str, u64)>) -> Result<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, value) in counters {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

#[pymethods]
impl Pool {
    #[staticmethod]
    #[pyo3(signature = (
        name, *, shm_dir="/dev/shm", pool_bytes=None, segment_bytes=None, slots_max=None, create=true, label="",
        huge_pages=false, huge_pages_dir=None, weight=None, policy=None
    ))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn open(
        py: Python<'_>,
        name: &str,
        shm_dir: &str,
        pool_bytes: Option<u64>,
        segment_bytes: Option<u64>,
        slots_max: Option<u64>,
        create: bool,
        label: &str,
        huge_pages: bool,
        huge_pages_dir: Option<&str>,
        weight: Option<f64>,
        policy: Option<String>,
    ) -> Result<Self> {
        let options = OpenOptions {
            shm_dir: shm_dir.into(),
            pool_bytes,
            segment_bytes,
            slots_max,
            create,
            label: label.to_owned(),
            huge_pages: huge_pages
                .then(|| HugePages { dir: huge_pages_dir.map(PathBuf::from), ..HugePages::default() }),
            weight,
            policy,
            ..OpenOptions::default()
        };
        let pool = py.engine(|| pegaflow_engine::Pool::open(name, &options))?;
        Ok(Self {
            name: pool.name().to_owned(),
            path: pool.path().as_os_str().to_owned(),
            shm_dir: pool.shm_dir().as_os_str().to_owned(),
            pool_bytes: pool.pool_bytes(),
            segment_bytes: pool.segment_bytes(),
            slots_max: pool.slots_max(),
            created: pool.created(),
            handle: Arc::new(PoolHandle(RwLock::new(Some(pool)))),
        })
    }

    fn member(&self) -> Result<(u32, u64)> {
        let member = self.get()?.member()?;
        Ok((member.row, member.epoch))
    }

    fn join(&self, py: Python<'_>, leader: (u32, u64)) -> Result<()> {
        let pool = self.get()?;
        let (row, epoch) = leader;
        py.engine(|| pool.join(pegaflow_engine::Member { row, epoch }))
    }

    #[pyo3(signature = (fingerprint, group, part_bytes, *, label=""))]
    fn namespace(
        &self,
        py: Python<'_>,
        fingerprint: &[u8],
        group: u32,
        part_bytes: &Bound<'_, PyAny>,
        label: &str,
    ) -> Result<Namespace> {
        let pool = self.get()?;
        let given = fingerprint.len();
        let fingerprint = <&[u8; 32]>::try_from(fingerprint).map_err(|_| {
            NativeError::invalid(format!("a fingerprint has 32 bytes, this one has {given}: pass a SHA-256 digest"))
        })?;
        let part_bytes = items::numbers::<u64>(part_bytes, "part_bytes")?;
        let namespace = py.engine(|| pool.namespace(fingerprint, group, &part_bytes, label))?;
        let info = pool.namespace_info(namespace)?;
        Ok(Namespace::new(Arc::clone(&self.handle), namespace, info))
    }

    fn release(&self, py: Python<'_>, refs: &Bound<'_, PyAny>) -> Result<()> {
        let (pool, refs) = (self.get()?, items::refs(refs)?);
        py.engine(|| pool.release(&refs))
    }

    fn publish(&self, py: Python<'_>, refs: &Bound<'_, PyAny>) -> Result<usize> {
        let (pool, refs) = (self.get()?, items::refs(refs)?);
        py.engine(|| pool.publish(&refs))
    }

    fn abort(&self, py: Python<'_>, refs: &Bound<'_, PyAny>) -> Result<()> {
        let (pool, refs) = (self.get()?, items::refs(refs)?);
        py.engine(|| pool.abort(&refs))
    }

    fn quarantine(&self, py: Python<'_>, refs: &Bound<'_, PyAny>) -> Result<()> {
        let (pool, refs) = (self.get()?, items::refs(refs)?);
        py.engine(|| pool.quarantine(&refs))
    }

    #[pyo3(signature = (part, refs, checksums=None))]
    fn mark_written(
        &self,
        py: Python<'_>,
        part: u32,
        refs: &Bound<'_, PyAny>,
        checksums: Option<&Bound<'_, PyAny>>,
    ) -> Result<usize> {
        let (pool, refs) = (self.get()?, items::refs(refs)?);
        let checksums = checksums.map(|sequence| items::numbers::<u64>(sequence, "checksums")).transpose()?;
        if checksums.as_ref().is_some_and(|checksums| checksums.len() != refs.len()) {
            return Err(NativeError::invalid(
                "checksums and refs differ in length: pass one checksum per ref, or None",
            ));
        }
        py.engine(|| pool.mark_written(part, &refs, checksums.as_deref()))
    }

    #[pyo3(signature = (r#ref, part))]
    fn locate(&self, r#ref: u64, part: u32) -> Result<Option<(OsString, u64, u64)>> {
        let place = self.get()?.locate(BlockRef(r#ref), part)?;
        Ok(place.map(|(file, offset, bytes)| (file.into_os_string(), offset, bytes)))
    }

    fn grow_ahead(&self, py: Python<'_>, namespace: &Bound<'_, Namespace>) -> Result<()> {
        let (pool, namespace) = (self.get()?, namespace.get().engine());
        py.engine(|| pool.grow_ahead(namespace))
    }

    fn set_nodes(&self, py: Python<'_>, namespace: &Bound<'_, Namespace>, nodes: Vec<Option<u32>>) -> Result<()> {
        let (pool, namespace) = (self.get()?, namespace.get().engine());
        py.engine(|| pool.set_nodes(namespace, nodes))
    }

    #[pyo3(signature = (
        directories, *, capacity_bytes, admission="second_touch", write_bytes_per_second_max=0, read_depth=16,
        write_depth=8, backend="auto"
    ))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn serve_ssd(
        &self,
        py: Python<'_>,
        directories: Vec<PathBuf>,
        capacity_bytes: u64,
        admission: &str,
        write_bytes_per_second_max: u64,
        read_depth: u16,
        write_depth: u16,
        backend: &str,
    ) -> Result<()> {
        let depths = (read_depth, write_depth);
        let options =
            tier::options(directories, capacity_bytes, admission, write_bytes_per_second_max, depths, backend)?;
        let pool = self.get()?;
        py.engine(|| pool.serve_ssd(options))
    }

    fn ssd<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyDict>>> {
        let pool = self.get()?;
        py.engine(|| pool.ssd())?.map(|facts| tier::facts(py, facts)).transpose()
    }

    fn ssd_read_seconds(&self, py: Python<'_>, block_bytes: u64) -> Result<Option<f64>> {
        let pool = self.get()?;
        py.engine(|| pool.ssd_read_seconds(block_bytes))
    }

    fn reap(&self, py: Python<'_>) -> Result<usize> {
        let pool = self.get()?;
        py.engine(|| pool.reap())
    }

    fn rebuild_index(&self, py: Python<'_>) -> Result<usize> {
        let pool = self.get()?;
        py.engine(|| pool.rebuild_index())
    }

    fn stats<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let pool = self.get()?;
        counters(py, py.detach(|| pool.stats()))
    }

    fn windows(&self, py: Python<'_>) -> Result<Vec<(u64, u64, u64)>> {
        let pool = self.get()?;
        let windows = py.engine(|| pool.windows())?;
        Ok(windows.into_iter().map(|window| (window.seconds, window.asked, window.distinct)).collect())
    }

    fn last_grow_error(&self) -> Result<Option<String>> {
        Ok(self.get()?.last_grow_error())
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.handle.close());
    }
}
