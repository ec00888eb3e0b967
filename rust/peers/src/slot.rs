//! Bytes of reserved slots, for reads straight from the network.

use pegaflow_engine::BlockRef;
use pegaflow_engine::slot_space::SlotSpace;

/// The part of a slot that a transport fills, as long as the slot is reserved.
pub(crate) struct Target<'a> {
    space: &'a dyn SlotSpace,
    block: BlockRef,
    part: u32,
    bytes: usize,
}

impl<'a> Target<'a> {
    /// `None` if the slot is not reserved any more, or its part is not `bytes` long.
    pub(crate) fn new(space: &'a dyn SlotSpace, block: BlockRef, part: u32, bytes: u64) -> Option<Self> {
        let bytes = usize::try_from(bytes).ok()?;
        let target = Self { space, block, part, bytes };
        (bytes > 0 && target.address().is_some()).then_some(target)
    }

    /// Address of the first byte; `None` if the slot is not reserved any more.
    pub(crate) fn address(&self) -> Option<*mut u8> {
        let slot = self.space.write_target(self.block, self.part)?;
        (slot.bytes == self.bytes).then_some(slot.address)
    }

    /// Bytes `offset..offset + count`, to write to; `None` outside the part, or if the slot is not reserved any more.
    pub(crate) fn piece(&mut self, offset: usize, count: usize) -> Option<&mut [u8]> {
        if offset.checked_add(count)? > self.bytes {
            return None;
        }
        let address = self.address()?;
        // SAFETY: inside the part, as was just checked. The slot is reserved by this process for this read alone, so
        // nobody else looks at it, and reserved slots stay mapped; `&mut self` lets one piece exist at a time.
        Some(unsafe { std::slice::from_raw_parts_mut(address.add(offset), count) })
    }

    /// Length of the part.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}
