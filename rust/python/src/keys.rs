//! Block keys from a Python sequence.

use std::ops::Range;

use pegaflow_engine::Key;
use pegaflow_engine::traffic::KeyHash;
use pyo3::prelude::*;
use pyo3::{Borrowed, ffi};

use crate::error::{NativeError, Result};
use crate::items::{Items, collect_borrowed, type_name};

/// Keys of a sequence of `bytes`.
pub(crate) fn keys(sequence: &Bound<'_, PyAny>) -> Result<Vec<Key>> {
    // SAFETY: `key` runs no Python code before it is through with the item.
    unsafe { collect_borrowed(sequence, "keys", |index, item| key("keys", index, item)) }
}

/// Some keys of a sequence of `bytes`.
pub(crate) fn keys_in(items: &Items<'_>, range: Range<usize>) -> Result<Vec<Key>> {
    // SAFETY: as above.
    unsafe { items.convert(range, |index, item| key("keys", index, item)) }
}

/// Hashes of some keys of a sequence of `bytes`.
pub(crate) fn hashes_in(items: &Items<'_>, range: Range<usize>) -> Result<Vec<KeyHash>> {
    // SAFETY: as above.
    unsafe { items.convert(range, |index, item| Ok(KeyHash::of(bytes_of("keys", index, &item)?)?)) }
}

/// Keys of a sequence of `bytes | None`.
pub(crate) fn optional_keys(sequence: &Bound<'_, PyAny>) -> Result<Vec<Option<Key>>> {
    let convert = |index, item: Borrowed<'_, '_, PyAny>| {
        if item.is_none() { Ok(None) } else { key("parents", index, item).map(Some) }
    };
    // SAFETY: as above.
    unsafe { collect_borrowed(sequence, "parents", convert) }
}

#[inline]
fn key(name: &str, index: usize, item: Borrowed<'_, '_, PyAny>) -> Result<Key> {
    Ok(Key::new(bytes_of(name, index, &item)?)?)
}

/// Bytes of an item.
#[inline]
fn bytes_of<'a>(name: &str, index: usize, item: &'a Borrowed<'_, '_, PyAny>) -> Result<&'a [u8]> {
    let mut address = std::ptr::null_mut();
    let mut length = 0;
    // SAFETY: the item is alive; both places are ours. The function checks the type itself.
    if unsafe { ffi::PyBytes_AsStringAndSize(item.as_ptr(), &mut address, &mut length) } != 0 {
        return Err(not_bytes(name, index, item));
    }
    // SAFETY: on success, that many bytes are at the address for as long as the item lives; bytes are immutable.
    Ok(unsafe { std::slice::from_raw_parts(address.cast::<u8>(), length as usize) })
}

#[cold]
fn not_bytes(name: &str, index: usize, item: &Borrowed<'_, '_, PyAny>) -> NativeError {
    let item = (*item).to_owned();
    drop(PyErr::take(item.py()));
    NativeError::invalid(format!(
        "{name}[{index}] is of type {}, not bytes: pass vLLM's block hashes as they are",
        type_name(&item)
    ))
}
