//! Functions of `pegaflow._native` that work on pools without attaching to them, and the crash points of tests.

use std::path::Path;

use pegaflow_engine::{admin, crash_point};
use pyo3::prelude::*;

use crate::error::{Engine, Result};

/// See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (shm_dir="/dev/shm"))]
pub(crate) fn list_pools(py: Python<'_>, shm_dir: &str) -> Result<String> {
    py.engine(|| admin::list_pools(Path::new(shm_dir)))
}

/// See `_native.pyi`.
#[pyfunction]
pub(crate) fn inspect(py: Python<'_>, path: &str) -> Result<String> {
    py.engine(|| admin::inspect(Path::new(path)))
}

/// See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (path, checksums=true, progress=None))]
pub(crate) fn verify(py: Python<'_>, path: &str, checksums: bool, progress: Option<Py<PyAny>>) -> Result<String> {
    let mut raised = None;
    let mut report = |done: u64, total: u64| {
        let Some(progress) = progress.as_ref().filter(|_| raised.is_none()) else { return };
        raised = Python::attach(|py| progress.call1(py, (done, total)).err());
    };
    let json = py.engine(|| admin::verify(Path::new(path), checksums, &mut report))?;
    match raised {
        None => Ok(json),
        Some(error) => Err(error.into()),
    }
}

/// See `_native.pyi`.
#[pyfunction]
pub(crate) fn reap(py: Python<'_>, path: &str) -> Result<usize> {
    py.engine(|| admin::reap(Path::new(path)))
}

/// See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (path, force=false))]
pub(crate) fn remove(py: Python<'_>, path: &str, force: bool) -> Result<()> {
    py.engine(|| admin::remove(Path::new(path), force))
}

/// See `_native.pyi`.
#[pyfunction]
pub(crate) fn system_info(py: Python<'_>) -> String {
    py.detach(admin::system_info)
}

/// See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (name, action="kill"))]
pub(crate) fn crash_point_arm(name: &str, action: &str) -> Result<()> {
    Ok(crash_point::arm(name, action)?)
}

/// See `_native.pyi`.
#[pyfunction]
pub(crate) fn crash_points() -> Vec<&'static str> {
    crash_point::names().to_vec()
}
