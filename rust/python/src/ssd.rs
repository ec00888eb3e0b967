//! Functions of `pegaflow._native` that work on cache files on SSD while no pool uses them.

use std::path::{Path, PathBuf};

use pegaflow_engine::admin;
use pyo3::prelude::*;

use crate::error::{Engine, NativeError, Result};

/// See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (directory, progress=None))]
pub(crate) fn ssd_inspect(py: Python<'_>, directory: PathBuf, progress: Option<Py<PyAny>>) -> Result<String> {
    with_progress(py, progress, |report| admin::ssd_inspect(&directory, report))
}

/// See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (directories, name, progress=None))]
pub(crate) fn ssd_verify(
    py: Python<'_>,
    directories: Vec<PathBuf>,
    name: &str,
    progress: Option<Py<PyAny>>,
) -> Result<String> {
    with_progress(py, progress, |report| admin::ssd_verify(&directories, name, report))
}

/// See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (directory, name, force=false))]
pub(crate) fn ssd_remove(py: Python<'_>, directory: PathBuf, name: &str, force: bool) -> Result<u64> {
    py.engine(|| admin::ssd_remove(Path::new(&directory), name, force))
}

/// A call that reports to `progress` and ends early with what that raised, Ctrl-C included.
fn with_progress(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    call: impl FnOnce(&mut admin::GoOn<'_>) -> pegaflow_engine::Result<String> + Send,
) -> Result<String> {
    let mut raised = None;
    let mut report = |done: u64, total: u64| {
        raised = Python::attach(|py| {
            let told = progress.as_ref().map_or(Ok(()), |progress| progress.call1(py, (done, total)).map(drop));
            told.and_then(|()| py.check_signals()).err()
        });
        raised.is_none()
    };
    let outcome = py.engine(|| call(&mut report));
    match raised {
        Some(error) => Err(NativeError::from(error)),
        None => outcome,
    }
}
