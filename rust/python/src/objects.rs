//! `pegaflow._native.ObjectStore`.

use std::ffi::OsString;
use std::sync::{Arc, PoisonError, RwLock};

use pegaflow_engine::objects::{self, ObjectStoreOptions, Value, ValueKind};
use pegaflow_engine::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};
use pyo3::{ffi, intern};

use crate::buffer::Buffer;
use crate::error::{Engine, NativeError, Result};
use crate::pool::counters;

/// Values up to this size are copied without releasing the GIL: giving it back takes longer.
const ATTACHED_COPY_BYTES_MAX: usize = 16 << 10;

/// Engine of `pegaflow.PegaEngine`.
#[pyclass(frozen, module = "pegaflow._native")]
pub(crate) struct ObjectStore {
    store: RwLock<Option<Arc<objects::ObjectStore>>>,
    #[pyo3(get)]
    path: OsString,
    #[pyo3(get)]
    pool_bytes: u64,
}

impl ObjectStore {
    fn get_open(&self) -> Result<Arc<objects::ObjectStore>> {
        let store = self.store.read().unwrap_or_else(PoisonError::into_inner);
        let closed = || Error::new(ErrorKind::Closed, "this PegaEngine was closed: open a new one");
        Ok(Arc::clone(store.as_ref().ok_or_else(closed)?))
    }
}

#[pymethods]
impl ObjectStore {
    #[staticmethod]
    #[pyo3(signature = (name, *, shm_dir="/dev/shm", pool_bytes=None, evict=false, checksum=true))]
    fn open(
        py: Python<'_>,
        name: Option<&str>,
        shm_dir: &str,
        pool_bytes: Option<u64>,
        evict: bool,
        checksum: bool,
    ) -> Result<Self> {
        let options = ObjectStoreOptions { shm_dir: shm_dir.into(), pool_bytes, evict, checksum };
        let store = py.engine(|| objects::ObjectStore::open(name, &options))?;
        Ok(Self {
            path: store.path().as_os_str().to_owned(),
            pool_bytes: store.pool_bytes(),
            store: RwLock::new(Some(Arc::new(store))),
        })
    }

    fn put(&self, py: Python<'_>, key: &Bound<'_, PyString>, value: &Bound<'_, PyAny>) -> Result<()> {
        let (store, key) = (self.get_open()?, key_text(key)?);
        if let Ok(text) = value.cast::<PyString>() {
            return with_utf8(text, |bytes| py.engine(|| store.put(key, ValueKind::Str, bytes)));
        }
        let buffer = Buffer::of(value)?;
        let bytes = buffer.bytes();
        py.engine(|| store.put(key, ValueKind::Bytes, bytes))
    }

    fn get<'py>(&self, py: Python<'py>, key: &Bound<'py, PyString>) -> Result<Option<Bound<'py, PyAny>>> {
        let (store, key) = (self.get_open()?, key_text(key)?);
        let Some(value) = py.engine(|| store.get(key))? else { return Ok(None) };
        to_python(py, value).map(Some)
    }

    fn remove<'py>(&self, py: Python<'py>, key: &Bound<'py, PyString>) -> Result<Option<Bound<'py, PyAny>>> {
        let (store, key) = (self.get_open()?, key_text(key)?);
        let Some(value) = py.engine(|| store.remove(key))? else { return Ok(None) };
        to_python(py, value).map(Some)
    }

    fn contains(&self, py: Python<'_>, key: &Bound<'_, PyString>) -> Result<bool> {
        let (store, key) = (self.get_open()?, key_text(key)?);
        py.engine(|| store.contains(key))
    }

    fn count(&self, py: Python<'_>) -> Result<usize> {
        let store = self.get_open()?;
        py.engine(|| store.count())
    }

    fn keys(&self, py: Python<'_>) -> Result<Vec<String>> {
        let store = self.get_open()?;
        py.engine(|| store.keys())
    }

    fn stats<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let store = self.get_open()?;
        counters(py, py.engine(|| store.stats())?)
    }

    fn close(&self, py: Python<'_>) {
        let store = self.store.write().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(store));
    }
}

/// A key as the engine takes it.
fn key_text<'a>(key: &'a Bound<'_, PyString>) -> Result<&'a str> {
    key.to_str().map_err(|_| NativeError::invalid("a key holds a lone surrogate: pass text that UTF-8 can express"))
}

/// Call `take` with the text as UTF-8, in which lone surrogates, which Python's `str` may hold, have their three-byte
/// form.
fn with_utf8<T>(text: &Bound<'_, PyString>, take: impl FnOnce(&[u8]) -> Result<T>) -> Result<T> {
    // Only ASCII is lent as it is: for other text, Python would keep a second copy for as long as the text lives.
    if text.call_method0(intern!(text.py(), "isascii"))?.is_truthy()? {
        return take(text.to_str()?.as_bytes());
    }
    let encoded = text.call_method1(intern!(text.py(), "encode"), ("utf-8", "surrogatepass"))?;
    take(encoded.cast::<PyBytes>().map_err(PyErr::from)?.as_bytes())
}

/// A value as the type that went in.
fn to_python<'py>(py: Python<'py>, value: Value) -> Result<Bound<'py, PyAny>> {
    match value.kind() {
        ValueKind::Bytes => to_bytes(py, value).map(Bound::into_any),
        ValueKind::Str => {
            let text = to_bytes(py, value)?;
            Ok(text.call_method1(intern!(py, "decode"), ("utf-8", "surrogatepass"))?)
        }
    }
}

/// One copy, from the slots into the object that Python gets.
fn to_bytes<'py>(py: Python<'py>, value: Value) -> Result<Bound<'py, PyBytes>> {
    let length = value.bytes();
    // SAFETY: a null source asks for an object whose bytes are not set yet; nobody else has it before this returns it.
    let object = unsafe {
        let size = length as ffi::Py_ssize_t;
        Bound::from_owned_ptr_or_err(py, ffi::PyBytes_FromStringAndSize(std::ptr::null(), size))?
    };
    let object = object.cast_into::<PyBytes>().map_err(PyErr::from)?;
    // The address goes through the detached closure as a number, since pointers are not `Send`.
    // SAFETY: the object is bytes.
    let address = unsafe { ffi::PyBytes_AsString(object.as_ptr()) } as usize;
    let copy = move || {
        let target = std::ptr::with_exposed_provenance_mut::<u8>(address);
        // SAFETY: the object has `length` bytes and lives until after this; it is not shared yet, and a failed copy
        // drops it. The lease is given back here too, outside of the GIL.
        unsafe { value.copy_to(target) }
    };
    if length <= ATTACHED_COPY_BYTES_MAX {
        copy()?
    } else {
        py.detach(copy)?
    }
    Ok(object)
}
