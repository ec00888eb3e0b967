//! `pegaflow._native.CudaCopier`.

use std::sync::Arc;

use pegaflow_engine::cuda::{self, Backend, CudaOptions};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::copier::{CopyDone, wait};
use crate::error::{Engine, Result};
use crate::items;
use crate::layout::PyKvLayout;
use crate::namespace::Namespace;
use crate::pool::{Pool, counters};

/// Copies between the memory of a CUDA device and slots. The engine's thread keeps the pool attached while it lives.
#[pyclass(frozen, module = "pegaflow._native")]
pub(crate) struct CudaCopier {
    copier: cuda::CudaCopier,
    #[pyo3(get)]
    device: u32,
}

#[pymethods]
impl CudaCopier {
    #[new]
    #[pyo3(signature = (
        pool, device=0, *, backend="auto", ctas=32, ring_buffers=3, ring_buffer_bytes=16_777_216, copy_streams=1,
        batch_copies=true, direct_bytes_min=0, direct_save_bytes_min=0, save_bytes_per_second_max=0, register=true,
        register_chunk_bytes=16_777_216
    ))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python<'_>,
        pool: &Bound<'_, Pool>,
        device: u32,
        backend: &str,
        ctas: u32,
        ring_buffers: usize,
        ring_buffer_bytes: usize,
        copy_streams: usize,
        batch_copies: bool,
        direct_bytes_min: usize,
        direct_save_bytes_min: usize,
        save_bytes_per_second_max: u64,
        register: bool,
        register_chunk_bytes: usize,
    ) -> Result<Self> {
        let pool = pool.get().get()?;
        let options = CudaOptions {
            backend: Backend::parse(backend)?,
            ctas,
            ring_buffers,
            ring_buffer_bytes,
            copy_streams,
            batch_copies,
            direct_bytes_min,
            direct_save_bytes_min,
            save_bytes_per_second_max,
            register,
            register_chunk_bytes,
        };
        let copier = py.engine(|| {
            let copier = cuda::CudaCopier::new(Arc::clone(&pool) as _, device, options)?;
            pool.set_device_writes()?;
            pegaflow_engine::Result::Ok(copier)
        })?;
        Ok(Self { copier, device })
    }

    fn register(&self, py: Python<'_>, namespace: &Bound<'_, Namespace>, part: u32) -> Result<()> {
        let namespace = namespace.get().engine();
        py.engine(|| self.copier.register(namespace, part))
    }

    fn unregister(&self, py: Python<'_>, namespace: &Bound<'_, Namespace>, part: u32) -> Result<()> {
        let namespace = namespace.get().engine();
        py.engine(|| self.copier.unregister(namespace, part))
    }

    fn set_stepping(&self, stepping: bool) {
        self.copier.set_stepping(stepping);
    }

    #[pyo3(signature = (part, layout, refs, block_ids, after_stream=None))]
    fn save(
        &self,
        py: Python<'_>,
        part: u32,
        layout: &Bound<'_, PyKvLayout>,
        refs: &Bound<'_, PyAny>,
        block_ids: &Bound<'_, PyAny>,
        after_stream: Option<u64>,
    ) -> Result<u64> {
        let (refs, block_ids) = (items::refs(refs)?, items::numbers::<u32>(block_ids, "block_ids")?);
        let layout = layout.get().layout();
        py.engine(|| self.copier.save(part, layout, refs, block_ids, after_stream))
    }

    #[pyo3(signature = (part, layout, refs, block_ids, after_stream=None, stage_ends=None))]
    #[allow(clippy::too_many_arguments, reason = "arguments of Python")]
    fn load(
        &self,
        py: Python<'_>,
        part: u32,
        layout: &Bound<'_, PyKvLayout>,
        refs: &Bound<'_, PyAny>,
        block_ids: &Bound<'_, PyAny>,
        after_stream: Option<u64>,
        stage_ends: Option<Vec<usize>>,
    ) -> Result<u64> {
        let (refs, block_ids) = (items::refs(refs)?, items::numbers::<u32>(block_ids, "block_ids")?);
        let layout = layout.get().layout();
        py.engine(|| match stage_ends {
            Some(ends) => self.copier.load_in_stages(part, layout, refs, block_ids, after_stream, &ends),
            None => self.copier.load(part, layout, refs, block_ids, after_stream),
        })
    }

    fn take_queued(&self, py: Python<'_>) -> Result<Vec<u64>> {
        py.engine(|| self.copier.take_queued())
    }

    fn wait_stage(&self, py: Python<'_>, job: u64, stage: usize, stream: u64) -> Result<()> {
        py.engine(|| self.copier.wait_stage(job, stage, stream))
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

    fn healthy(&self) -> bool {
        self.copier.problem().is_none()
    }

    fn problem(&self) -> Option<String> {
        self.copier.problem()
    }

    fn progress<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let progress = py.detach(|| self.copier.registration());
        let dict = PyDict::new(py);
        dict.set_item("segments", progress.segments)?;
        dict.set_item("bytes_seen", progress.bytes_seen)?;
        dict.set_item("bytes_registered", progress.bytes_registered)?;
        dict.set_item("bytes_total", progress.bytes_total)?;
        dict.set_item("seconds", progress.seconds)?;
        dict.set_item("driver_seconds", progress.driver_seconds)?;
        dict.set_item("problem", progress.problem)?;
        Ok(dict)
    }

    fn stats<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        counters(py, self.copier.stats())
    }

    fn close(&self, py: Python<'_>) -> Result<()> {
        py.engine(|| self.copier.close())
    }
}

impl Drop for CudaCopier {
    fn drop(&mut self) {
        // Finishes what is queued: other Python threads need not wait for that. Whatever cannot be closed is logged by
        // the engine's own drop.
        let _closed = Python::try_attach(|py| py.detach(|| self.copier.close()));
    }
}
