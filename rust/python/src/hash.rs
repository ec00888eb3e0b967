//! `pegaflow._native.block_hash`.

use pegaflow_engine::hash::{self, ExtraKey, HashAlgorithm};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyInt, PyList, PyString, PyTuple};

use crate::error::{NativeError, Result};
use crate::items::{collect, numbers, type_name};

/// Tuples within tuples; vLLM's have two levels.
const DEPTH_MAX: usize = 16;

/// See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (algorithm, parent, tokens, extra_keys=None))]
pub(crate) fn block_hash<'py>(
    py: Python<'py>,
    algorithm: &str,
    parent: &[u8],
    tokens: &Bound<'py, PyAny>,
    extra_keys: Option<&Bound<'py, PyTuple>>,
) -> Result<Bound<'py, PyBytes>> {
    let algorithm = HashAlgorithm::from_name(algorithm)?;
    let tokens = numbers::<u64>(tokens, "tokens")?;
    let extra_keys = extra_keys.map(|keys| extra_key_list(keys.as_any(), 0)).transpose()?;
    let hash = hash::block_hash(algorithm, parent, &tokens, extra_keys.as_deref())?;
    Ok(PyBytes::new(py, &hash))
}

fn extra_key_list(keys: &Bound<'_, PyAny>, depth: usize) -> Result<Vec<ExtraKey>> {
    if depth == DEPTH_MAX {
        return Err(NativeError::invalid(format!("extra keys are nested deeper than {DEPTH_MAX}: flatten them")));
    }
    collect(keys, "extra_keys", |_, item| extra_key(&item, depth))
}

fn extra_key(key: &Bound<'_, PyAny>, depth: usize) -> Result<ExtraKey> {
    if key.is_none() {
        Ok(ExtraKey::None)
    } else if let Ok(flag) = key.cast::<PyBool>() {
        Ok(ExtraKey::Bool(flag.is_true()))
    } else if key.is_instance_of::<PyInt>() {
        let number = key.extract::<i128>().map_err(|_| {
            NativeError::invalid("an extra key is an int of more than 64 bits: hash this block in Python")
        })?;
        Ok(ExtraKey::Int(number))
    } else if let Ok(text) = key.cast::<PyString>() {
        Ok(ExtraKey::Text(text.to_str()?.to_owned()))
    } else if let Ok(bytes) = key.cast::<PyBytes>() {
        Ok(ExtraKey::Bytes(bytes.as_bytes().to_vec()))
    } else if key.is_instance_of::<PyTuple>() || key.is_instance_of::<PyList>() {
        Ok(ExtraKey::Tuple(extra_key_list(key, depth + 1)?))
    } else {
        Err(NativeError::invalid(format!(
            "an extra key is of type {}: only None, bool, int, str, bytes and tuples of them are hashed natively",
            type_name(key)
        )))
    }
}
