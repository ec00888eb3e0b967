//! Bytes of the pool's slots as the store takes and gives them: only this process's threads touch them, never the
//! kernel, and only while the slot is still what it was.

use std::sync::Arc;

use crate::key::BlockRef;
use crate::shm::core::Core;
use crate::slot_space::SlotSpace;
use crate::ssd::{ReadTarget, Record, RecordId};

/// A reserved slot that a record is read into.
pub(crate) struct SlotTarget {
    pub(crate) core: Arc<Core>,
    pub(crate) block: BlockRef,
}

impl ReadTarget for SlotTarget {
    fn put(&mut self, part: usize, offset: usize, bytes: &[u8]) {
        // Asked for each time: whoever was taken for dead has lost its slots.
        let Some(target) = self.core.write_target(self.block, part as u32) else { return };
        if offset.checked_add(bytes.len()).is_none_or(|end| end > target.bytes) {
            return;
        }
        // SAFETY: inside the part of a slot that this process has reserved, so nobody else reads or writes it; the
        // segment stays mapped while one of its slots is reserved.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.address.add(offset), bytes.len()) };
    }

    fn end_part(&mut self, part: usize, checksum: u64) {
        self.core.mark_part(self.block, part as u32, Some(checksum));
    }
}

/// Hand a leased block to `use_record` as a record of these parts. `None` if it is not readable.
pub(crate) fn with_record<R>(
    core: &Core,
    block: BlockRef,
    id: RecordId,
    parts: u32,
    use_record: impl FnOnce(&Record<'_>) -> R,
) -> Option<R> {
    let header = core.control.slot(block.slot())?;
    let mut slices: Vec<&[u8]> = Vec::with_capacity(parts as usize);
    for part in 0..parts {
        let source = core.read_source(block, part)?;
        // SAFETY: a part of a sealed block that the caller leases: its bytes stay as they are and mapped meanwhile.
        slices.push(unsafe { std::slice::from_raw_parts(source.address, source.bytes) });
    }
    Some(use_record(&Record { id, parts: &slices, checksum: Core::checksum_of(header) }))
}
