//! `pegaflow._native.HostCopier` and `CopyDone`.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pegaflow_engine::copy;
use pyo3::prelude::*;

use crate::error::{Engine, Result};
use crate::items;
use crate::layout::PyKvLayout;
use crate::pool::Pool;

/// A wait is cut in pieces of this length, between which signals such as Ctrl-C are seen.
const WAIT_PIECE: Duration = Duration::from_millis(100);

/// Outcome of one copy job.
#[pyclass(frozen, get_all, module = "pegaflow._native")]
pub(crate) struct CopyDone {
    job: u64,
    ok: bool,
    failed: Vec<u32>,
    bytes: u64,
    seconds: f64,
    error: Option<String>,
}

impl From<copy::CopyDone> for CopyDone {
    fn from(done: copy::CopyDone) -> Self {
        let ok = done.ok();
        Self { job: done.job, ok, failed: done.failed, bytes: done.bytes, seconds: done.seconds, error: done.error }
    }
}

/// Wait for jobs, in pieces between which signals are seen.
pub(crate) fn wait(
    py: Python<'_>,
    timeout_ms: u64,
    piece: impl Fn(Duration) -> pegaflow_engine::Result<Vec<copy::CopyDone>> + Sync,
    in_flight: impl Fn() -> pegaflow_engine::Result<usize>,
) -> Result<Vec<CopyDone>> {
    let deadline = Instant::now().checked_add(Duration::from_millis(timeout_ms));
    loop {
        let left = deadline.map_or(WAIT_PIECE, |deadline| deadline.saturating_duration_since(Instant::now()));
        let done = py.engine(|| piece(left.min(WAIT_PIECE)))?;
        if !done.is_empty() || left <= WAIT_PIECE && deadline.is_some() || in_flight()? == 0 {
            return Ok(done.into_iter().map(CopyDone::from).collect());
        }
        py.check_signals()?;
    }
}

/// Copies between host memory and slots on its own threads.
#[pyclass(frozen, module = "pegaflow._native")]
pub(crate) struct HostCopier {
    copier: copy::HostCopier,
    /// Until the threads have stopped, this process must not leave the pool: leaving frees what they write.
    pool: Mutex<Option<Arc<pegaflow_engine::Pool>>>,
    #[pyo3(get)]
    threads: usize,
}

#[pymethods]
impl HostCopier {
    #[new]
    #[pyo3(signature = (pool, *, threads=0, checksum=true))]
    fn new(py: Python<'_>, pool: &Bound<'_, Pool>, threads: usize, checksum: bool) -> Result<Self> {
        let pool = pool.get().get()?;
        let copier = py.engine(|| copy::HostCopier::new(pool.space(), threads, checksum))?;
        Ok(Self { threads: copier.threads(), copier, pool: Mutex::new(Some(pool)) })
    }

    fn save(
        &self,
        py: Python<'_>,
        part: u32,
        layout: &Bound<'_, PyKvLayout>,
        refs: &Bound<'_, PyAny>,
        block_ids: &Bound<'_, PyAny>,
    ) -> Result<u64> {
        let (refs, block_ids) = (items::refs(refs)?, items::numbers::<u32>(block_ids, "block_ids")?);
        let layout = layout.get().layout();
        py.engine(|| self.copier.save(part, layout, refs, block_ids))
    }

    fn load(
        &self,
        py: Python<'_>,
        part: u32,
        layout: &Bound<'_, PyKvLayout>,
        refs: &Bound<'_, PyAny>,
        block_ids: &Bound<'_, PyAny>,
    ) -> Result<u64> {
        let (refs, block_ids) = (items::refs(refs)?, items::numbers::<u32>(block_ids, "block_ids")?);
        let layout = layout.get().layout();
        py.engine(|| self.copier.load(part, layout, refs, block_ids))
    }

    fn poll(&self, py: Python<'_>) -> Result<Vec<CopyDone>> {
        let done = py.engine(|| self.copier.poll())?;
        Ok(done.into_iter().map(CopyDone::from).collect())
    }

    fn wait(&self, py: Python<'_>, timeout_ms: u64) -> Result<Vec<CopyDone>> {
        wait(py, timeout_ms, |piece| self.copier.wait(piece), || self.copier.in_flight())
    }

    fn in_flight(&self, py: Python<'_>) -> Result<usize> {
        py.engine(|| self.copier.in_flight())
    }

    fn close(&self, py: Python<'_>) -> Result<()> {
        Ok(py.detach(|| self.stop())?)
    }
}

impl HostCopier {
    fn stop(&self) -> pegaflow_engine::Result<()> {
        let stopped = self.copier.close();
        let pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Outside of the lock: the last handle leaves the pool, which takes a while.
        drop(pool);
        stopped
    }
}

impl Drop for HostCopier {
    fn drop(&mut self) {
        // Finishes what is queued: other Python threads need not wait for that.
        let closed = Python::try_attach(|py| py.detach(|| self.stop()));
        // None: the interpreter is shutting down; the engine's own drop closes then. An error: a forked child, in
        // which there is nothing to close.
        drop(closed);
    }
}
