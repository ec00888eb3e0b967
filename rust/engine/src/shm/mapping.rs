//! A shared mapping of one file, and checked access to what lies in it.

use std::fs::File;

use memmap2::{MmapOptions, MmapRaw};

use crate::error::{Error, ErrorKind, Result};
use crate::shm::rows::Shared;

/// A whole file mapped shared and writable.
pub(crate) struct Mapping {
    raw: MmapRaw,
}

impl Mapping {
    /// Map `bytes` of `file`, which has been claimed or checked to be that long.
    pub(crate) fn new(file: &File, bytes: usize) -> Result<Self> {
        let raw = MmapOptions::new().len(bytes).map_raw(file).map_err(|error| {
            Error::new(ErrorKind::ShmFull, format!("cannot map {bytes} bytes of shared memory: {error}"))
        })?;
        Ok(Self { raw })
    }

    pub(crate) fn len(&self) -> usize {
        self.raw.len()
    }

    /// Address of `bytes` bytes at `offset`; `None` outside the mapping.
    pub(crate) fn address(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        (offset.checked_add(bytes)? <= self.len()).then(|| self.raw.as_mut_ptr().wrapping_add(offset))
    }

    /// Bytes of a slot that is sealed: nobody writes it. For `verify` only, which nobody's data depends on.
    pub(crate) fn sealed_bytes(&self, offset: usize, bytes: usize) -> Option<&[u8]> {
        let address = self.address(offset, bytes)?;
        // SAFETY: inside the mapping, which lives as long as `self`; the caller looked at a sealed slot of a pool that
        // it was told nobody is changing.
        Some(unsafe { std::slice::from_raw_parts(address, bytes) })
    }

    /// `count` records at `offset`. Panics outside the mapping: offsets come from a checked geometry.
    pub(crate) fn records<T: Shared>(&self, offset: usize, count: usize) -> &[T] {
        let address = self.address(offset, count * size_of::<T>()).expect("table inside the mapping").cast::<T>();
        assert!(address.is_aligned(), "table is aligned");
        // SAFETY: the range lies inside the mapping, which lives as long as `self`; `T: Shared` has only atomic fields
        // and no invalid bit patterns, so other processes may write it while we hold a shared reference.
        unsafe { std::slice::from_raw_parts(address, count) }
    }
}
