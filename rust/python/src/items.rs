//! Items of Python sequences, with errors that name the argument and the item.
//!
//! A lookup of a thousand keys would spend more time here than in the pool if each item cost more than a few
//! nanoseconds, so lists and tuples are read by borrowed references.

use std::ops::Range;

use pegaflow_engine::BlockRef;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use pyo3::{Borrowed, ffi};

use crate::error::{NativeError, Result};

/// Convert each item, given its index.
pub(crate) fn collect<'py, T>(
    sequence: &Bound<'py, PyAny>,
    name: &str,
    convert: impl Fn(usize, Bound<'py, PyAny>) -> Result<T>,
) -> Result<Vec<T>> {
    // SAFETY: the item is owned before anything is done with it.
    unsafe { collect_borrowed(sequence, name, |index, item| convert(index, item.to_owned())) }
}

/// Convert each item, given its index, by a borrowed reference.
///
/// # Safety
/// As for [`Items::convert`].
pub(crate) unsafe fn collect_borrowed<'py, T>(
    sequence: &Bound<'py, PyAny>,
    name: &str,
    convert: impl Fn(usize, Borrowed<'_, 'py, PyAny>) -> Result<T>,
) -> Result<Vec<T>> {
    let items = Items::of(sequence, name)?;
    // SAFETY: as the caller says.
    unsafe { items.convert(0..items.len(), convert) }
}

/// A list or tuple, or any other sequence made a list.
pub(crate) struct Items<'py> {
    items: Bound<'py, PyAny>,
    get_item: unsafe extern "C" fn(*mut ffi::PyObject, ffi::Py_ssize_t) -> *mut ffi::PyObject,
    count: usize,
}

impl<'py> Items<'py> {
    pub(crate) fn of(sequence: &Bound<'py, PyAny>, name: &str) -> Result<Self> {
        if let Ok(given) = sequence.cast::<PyTuple>() {
            return Ok(Self { items: sequence.clone(), get_item: ffi::PyTuple_GetItem, count: given.len() });
        }
        let list = match sequence.cast::<PyList>() {
            Ok(given) => given.clone(),
            Err(_) => list_of(sequence, name)?,
        };
        Ok(Self { count: list.len(), items: list.into_any(), get_item: ffi::PyList_GetItem })
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Convert some of the items, given their indices, by borrowed references.
    ///
    /// # Safety
    /// `convert` must not use the reference any more once it has run Python code (which takes no more than dropping
    /// another object): that could take the item out of the sequence and free it.
    pub(crate) unsafe fn convert<T>(
        &self,
        range: Range<usize>,
        convert: impl Fn(usize, Borrowed<'_, 'py, PyAny>) -> Result<T>,
    ) -> Result<Vec<T>> {
        let mut converted = Vec::with_capacity(range.len());
        for index in range {
            // SAFETY: the function fits the type and checks the index. The sequence keeps the item until Python code
            // runs, which cannot happen before `convert` lets it: the interpreter's lock is held.
            let item = unsafe {
                let item = (self.get_item)(self.items.as_ptr(), index as ffi::Py_ssize_t);
                Borrowed::from_ptr_or_err(self.items.py(), item)?
            };
            converted.push(convert(index, item)?);
        }
        Ok(converted)
    }
}

/// Any other sequence as a list.
fn list_of<'py>(sequence: &Bound<'py, PyAny>, name: &str) -> Result<Bound<'py, PyList>> {
    let list = PyList::empty(sequence.py());
    let items = sequence.try_iter().map_err(|_| {
        NativeError::invalid(format!("{name} is of type {}, not a sequence: pass a list", type_name(sequence)))
    })?;
    for item in items {
        list.append(item?)?;
    }
    Ok(list)
}

/// Name of a value's type, for messages.
pub(crate) fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "value".into(), |name| name.to_string())
}

/// Whole numbers that fit `T`.
pub(crate) fn numbers<'py, T>(sequence: &Bound<'py, PyAny>, name: &str) -> Result<Vec<T>>
where
    T: TryFrom<u64> + for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    let convert = |index: usize, item: Borrowed<'_, 'py, PyAny>| {
        // SAFETY: the item is alive. For an int, no Python code runs; for anything else the call only fails.
        let number = unsafe { ffi::PyLong_AsUnsignedLongLong(item.as_ptr()) };
        if number != u64::MAX
            && let Ok(number) = T::try_from(number)
        {
            return Ok(number);
        }
        slow_number(&item.to_owned(), name, index)
    };
    // SAFETY: the item is owned before any Python code can run.
    unsafe { collect_borrowed(sequence, name, convert) }
}

/// A number that is not an `int`, out of range, or the largest of all, which is also how an error looks.
fn slow_number<'py, T>(item: &Bound<'py, PyAny>, name: &str, index: usize) -> Result<T>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    drop(PyErr::take(item.py()));
    item.extract::<T>().map_err(|_| {
        let shown = item.repr().map_or_else(|_| type_name(item), |text| text.to_string());
        let bits = 8 * size_of::<T>();
        NativeError::invalid(format!("{name}[{index}] is {shown}: pass whole numbers from 0 of at most {bits} bits"))
    })
}

/// Refs of blocks.
pub(crate) fn refs(sequence: &Bound<'_, PyAny>) -> Result<Vec<BlockRef>> {
    Ok(numbers::<u64>(sequence, "refs")?.into_iter().map(BlockRef).collect())
}
