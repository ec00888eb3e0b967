//! A value that a reader holds.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::error::Result;
use crate::key::BlockRef;
use crate::limits::OBJECT_PARALLEL_BYTES_MIN;
use crate::shm::core::Core;

use super::bytes;
use super::find::Pinned;
use super::record::{Record, ValueKind};
use super::store::Inner;

/// One value, pinned: its bytes stay as they are until this is dropped, whatever becomes of the key.
pub struct Value {
    inner: Arc<Inner>,
    block: BlockRef,
    record: Record,
}

impl Value {
    /// Take over the pin.
    pub(super) fn new(inner: &Arc<Inner>, pinned: Pinned<'_>, record: Record) -> Self {
        let block = ManuallyDrop::new(pinned).block;
        Self { inner: Arc::clone(inner), block, record }
    }

    /// What went in.
    pub fn kind(&self) -> ValueKind {
        self.record.kind
    }

    /// Length of the value.
    pub fn bytes(&self) -> usize {
        self.record.value_bytes
    }

    /// The value in memory of its own. Fails if its checksum does not match.
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut copy = vec![0; self.bytes()];
        // SAFETY: the vector has that many bytes and is nobody else's.
        unsafe { self.copy_to(copy.as_mut_ptr()) }?;
        Ok(copy)
    }

    /// Copy the value. Fails if its checksum does not match; then the bytes at `target` mean nothing.
    ///
    /// # Safety
    /// `target` is writable for [`Self::bytes`] bytes, is no memory of the pool, and nobody else uses it meanwhile.
    pub unsafe fn copy_to(&self, target: *mut u8) -> Result<()> {
        let core = self.inner.core();
        core.check_usable()?;
        let header = core.control.slot_unchecked(self.block.slot());
        let expected = Core::checksum_of(header).filter(|_| self.inner.checksum);
        let threads = if self.bytes() >= OBJECT_PARALLEL_BYTES_MIN { self.inner.threads() } else { None };
        let place = (self.record.total_bytes(), self.record.prefix_bytes());
        // SAFETY: handed on from the caller; the block is pinned by this value.
        unsafe { bytes::read(core, self.block, place, target, threads.as_deref(), expected) }
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        drop(Pinned { core: self.inner.core(), block: self.block });
    }
}
