//! `pegaflow._native.KVLayout`.

use std::sync::Arc;

use pegaflow_engine::copy::{KvLayout, Region};
use pyo3::prelude::*;

use crate::error::{NativeError, Result};
use crate::items::collect;

/// Where the blocks of one KV cache group lie in this process's memory.
#[pyclass(frozen, name = "KVLayout", module = "pegaflow._native")]
pub(crate) struct PyKvLayout {
    layout: Arc<KvLayout>,
}

impl PyKvLayout {
    /// The engine's layout.
    pub(crate) fn layout(&self) -> &Arc<KvLayout> {
        &self.layout
    }
}

#[pymethods]
impl PyKvLayout {
    #[new]
    fn new(regions: &Bound<'_, PyAny>, blocks: u64) -> Result<Self> {
        let parsed = collect(regions, "regions", |index, item| {
            let (address, stride_bytes, length_bytes) = item.extract::<(usize, usize, usize)>().map_err(|_| {
                NativeError::invalid(format!(
                    "regions[{index}] is not a region: pass (address, stride_bytes, length_bytes), numbers from 0"
                ))
            })?;
            Ok(Region { address, stride_bytes, length_bytes })
        })?;
        // SAFETY: the documentation of `KVLayout` makes the caller vouch for the memory until every job that uses the
        // layout is done; numbers from Python cannot be checked further than for overflow.
        let layout = unsafe { KvLayout::new(&parsed, blocks) }?;
        Ok(Self { layout: Arc::new(layout) })
    }

    #[getter]
    fn block_bytes(&self) -> usize {
        self.layout.block_bytes()
    }

    #[getter]
    fn blocks(&self) -> u32 {
        self.layout.blocks()
    }
}
