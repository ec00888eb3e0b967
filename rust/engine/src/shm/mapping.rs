//! A shared mapping of one file, and checked access to what lies in it.

use std::fs::File;
use std::ptr::NonNull;

use memmap2::{MmapOptions, MmapRaw};

use crate::error::{Error, ErrorKind, Result};
use crate::shm::rows::Shared;
use crate::sync::{LocalU32, Relaxed};

/// A whole file mapped shared and writable.
pub(crate) struct Mapping {
    raw: MmapRaw,
    number: u32,
}

/// How many mappings this process has made.
static MADE: LocalU32 = LocalU32::new(0);

impl Mapping {
    /// Map `bytes` of `file`, which has been claimed or checked to be that long.
    pub(crate) fn new(file: &File, bytes: usize) -> Result<Self> {
        let raw = MmapOptions::new().len(bytes).map_raw(file).map_err(|error| {
            Error::new(ErrorKind::ShmFull, format!("cannot map {bytes} bytes of shared memory: {error}"))
        })?;
        Ok(Self { raw, number: MADE.fetch_add(1, Relaxed) })
    }

    /// Which of this process's mappings it is; no other one ever has the same.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn len(&self) -> usize {
        self.raw.len()
    }

    /// Address of `bytes` bytes at `offset`; `None` outside the mapping.
    pub(crate) fn address(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        (offset.checked_add(bytes)? <= self.len()).then(|| self.raw.as_mut_ptr().wrapping_add(offset))
    }

    /// Bytes of a slot that is sealed: nobody writes it. For those who hold a lease, and for `verify`, on which no data
    /// depends.
    pub(crate) fn sealed_bytes(&self, offset: usize, bytes: usize) -> Option<&[u8]> {
        let address = self.address(offset, bytes)?;
        // SAFETY: inside the mapping, which lives as long as `self`; the caller leases the slot, or looked at a sealed
        // one of a pool that it was told nobody is changing.
        Some(unsafe { std::slice::from_raw_parts(address, bytes) })
    }

    /// `count` records at `offset`. Panics outside the mapping: offsets come from a checked geometry.
    pub(crate) fn table<T: Shared>(&self, offset: usize, count: usize) -> Table<T> {
        let address = self.address(offset, count * size_of::<T>()).expect("table inside the mapping").cast::<T>();
        assert!(address.is_aligned(), "table is aligned");
        Table { start: NonNull::new(address).expect("a mapping is not at address 0"), count }
    }
}

/// Records of one table, found once so that lookups need not check again.
pub(crate) struct Table<T: Shared> {
    start: NonNull<T>,
    count: usize,
}

impl<T: Shared> Table<T> {
    /// Records in plain memory.
    #[cfg(loom)]
    pub(crate) fn of(records: &[T]) -> Self {
        Self { start: NonNull::from(records).cast(), count: records.len() }
    }

    /// The records.
    ///
    /// # Safety
    /// The mapping that the table was made of is still mapped, and stays so as long as the result is used.
    pub(crate) unsafe fn records(&self) -> &[T] {
        // SAFETY: `table` checked bounds and alignment; the caller says that the memory is still mapped. `T: Shared`
        // has only atomic fields and no invalid bit patterns, so other processes may write it meanwhile.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

// SAFETY: a table is a view of shared memory of atomic records, which any thread may use.
unsafe impl<T: Shared> Send for Table<T> {}
// SAFETY: as above.
unsafe impl<T: Shared> Sync for Table<T> {}
