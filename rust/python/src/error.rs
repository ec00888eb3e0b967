//! Engine errors as the exceptions of `pegaflow.errors`.

use std::panic::AssertUnwindSafe;

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

/// Calls into the engine, made without the GIL.
pub(crate) trait Engine {
    /// Result of `call`. A panic, which would be a bug of the engine, becomes an error like any other: Python would
    /// see it as an exception that `except Exception` does not catch, and vLLM would die of it.
    fn engine<T: Send, E: Into<NativeError> + Send>(
        self,
        call: impl FnOnce() -> std::result::Result<T, E> + Send,
    ) -> Result<T>;
}

impl Engine for Python<'_> {
    fn engine<T: Send, E: Into<NativeError> + Send>(
        self,
        call: impl FnOnce() -> std::result::Result<T, E> + Send,
    ) -> Result<T> {
        match self.detach(|| std::panic::catch_unwind(AssertUnwindSafe(call))) {
            Ok(result) => result.map_err(Into::into),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
                Err(Error::new(
                    ErrorKind::Corrupt,
                    format!("the engine stopped at a bug or at damaged shared memory ({text}): remove the pool"),
                )
                .into())
            }
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
        ErrorKind::Device => "DeviceError",
        _ => "PegaFlowError",
    }
}
