//! The bytes of any bytes-like object, without a copy where they lie in one piece.
//!
//! The buffer protocol joined the stable ABI with Python 3.11. One wheel for 3.10 and later needs it nevertheless, so
//! its two functions and one structure are declared here. Both functions are exported by every CPython since 2.6, and
//! the structure's layout was frozen into the stable ABI as it had been since 3.0 (PEP 3118, PEP 688).

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;

use pyo3::ffi::{Py_ssize_t, PyObject};
use pyo3::prelude::*;

use crate::error::{NativeError, Result};
use crate::items::type_name;

#[repr(C)]
struct RawBuffer {
    address: *mut c_void,
    owner: *mut PyObject,
    bytes: Py_ssize_t,
    item_bytes: Py_ssize_t,
    readonly: c_int,
    dimensions: c_int,
    format: *mut c_char,
    shape: *mut Py_ssize_t,
    strides: *mut Py_ssize_t,
    suboffsets: *mut Py_ssize_t,
    internal: *mut c_void,
}

/// Plain bytes in C order: exporters refuse this request if their memory is not contiguous.
const SIMPLE: c_int = 0;

unsafe extern "C" {
    fn PyObject_GetBuffer(exporter: *mut PyObject, view: *mut RawBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawBuffer);
}

/// Memory of an object that exports it; neither moves nor goes before this is dropped.
pub(crate) struct Buffer<'py> {
    // Boxed: exporters may point into the structure (`PyBuffer_FillInfo` does), so it must not move.
    raw: Box<RawBuffer>,
    _py: Python<'py>,
}

impl<'py> Buffer<'py> {
    /// The bytes of `value`, which must be contiguous. Fails for objects that are not bytes-like.
    pub(crate) fn of(value: &Bound<'py, PyAny>) -> Result<Self> {
        let mut raw = Box::new(MaybeUninit::<RawBuffer>::uninit());
        // SAFETY: the object is alive, we are attached to the interpreter, and the structure has the layout that the
        // function fills in; see the head of this file.
        let failed = unsafe { PyObject_GetBuffer(value.as_ptr(), raw.as_mut_ptr(), SIMPLE) } != 0;
        if failed {
            let reason = PyErr::fetch(value.py());
            return Err(NativeError::invalid(format!(
                "a value of type {} is no contiguous bytes ({}): pass str, bytes or a C-contiguous bytes-like object",
                type_name(value),
                reason.value(value.py())
            )));
        }
        // SAFETY: on success the function has filled in every field.
        let raw = unsafe { Box::from_raw(Box::into_raw(raw).cast::<RawBuffer>()) };
        Ok(Self { raw, _py: value.py() })
    }

    /// The bytes. Other Python threads may write a mutable object while they are read; then what is read is a mix of
    /// old and new bytes, as with any other reader of the object.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.raw.bytes == 0 {
            return &[];
        }
        // SAFETY: exported memory of that length, alive until it is released in `drop`.
        unsafe { std::slice::from_raw_parts(self.raw.address.cast::<u8>(), self.raw.bytes as usize) }
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        // SAFETY: filled in by `PyObject_GetBuffer`, released once; attached, since a `Python` token is held.
        unsafe { PyBuffer_Release(&mut *self.raw) }
    }
}
