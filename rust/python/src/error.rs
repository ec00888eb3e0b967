//! Engine errors as the exceptions of `pegaflow.errors`.

use pegaflow_engine::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// What went wrong in a call: the engine's refusal, or an exception that Python itself raised.
pub(crate) enum NativeError {
    Engine(Error),
    Python(PyErr),
}

/// Result of everything that Python calls.
pub(crate) type Result<T> = std::result::Result<T, NativeError>;

impl NativeError {
    /// An argument that the engine never gets to see.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::Engine(Error::new(ErrorKind::InvalidArgument, message))
    }
}

impl From<Error> for NativeError {
    fn from(error: Error) -> Self {
        Self::Engine(error)
    }
}

impl From<PyErr> for NativeError {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<NativeError> for PyErr {
    fn from(error: NativeError) -> Self {
        match error {
            NativeError::Python(error) => error,
            NativeError::Engine(error) => Python::attach(|py| exception(py, &error)),
        }
    }
}

/// Imported with the first error rather than with this module: `pegaflow` itself imports this module.
static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let class = ERRORS
        .get_or_try_init(py, || py.import("pegaflow.errors").map(Bound::unbind))
        .and_then(|module| module.bind(py).getattr(class_name(error.kind())))
        .and_then(|class| Ok(class.cast_into()?));
    match class {
        Ok(class) => PyErr::from_type(class, error.to_string()),
        Err(import_error) => import_error,
    }
}

fn class_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::InvalidArgument => "InvalidArgument",
        ErrorKind::NotFound => "PoolNotFound",
        ErrorKind::Refused => "PoolRefused",
        ErrorKind::Corrupt => "PoolCorrupt",
        ErrorKind::Full => "PoolFull",
        ErrorKind::ShmFull => "ShmFull",
        ErrorKind::Busy => "PoolBusy",
        ErrorKind::InUse => "PoolInUse",
        ErrorKind::Closed => "PoolClosed",
        ErrorKind::Forked => "ForkedProcess",
        _ => "PegaFlowError",
    }
}
