//! One part of one block: gathered from its fragments into the slot, or scattered from the slot over its fragments.

use crate::key::BlockRef;
use crate::slot_space::SlotSpace;

use super::layout::KvLayout;
use super::stream::{PartStream, StreamOptions, prefetch};

/// What all blocks of one job have in common.
pub(super) struct PartCopy<'a> {
    pub(super) space: &'a dyn SlotSpace,
    pub(super) layout: &'a KvLayout,
    pub(super) part: u32,
    pub(super) options: StreamOptions,
}

impl PartCopy<'_> {
    /// Copy a block into its reserved slot and mark the part written. `false`: stale ref or other length; then the
    /// part was not marked.
    pub(super) fn save(&self, block: BlockRef, block_id: u32) -> bool {
        let Some(slot) = self.space.write_target(block, self.part) else { return false };
        if slot.bytes != self.layout.block_bytes() {
            return false;
        }
        let mut stream = PartStream::new(self.part, slot.bytes, self.options);
        let mut offset = 0;
        let mut fragments = self.fragments(block_id).peekable();
        while let Some((address, bytes)) = fragments.next() {
            if let Some(&(next, next_bytes)) = fragments.peek() {
                prefetch(next, next_bytes);
            }
            // SAFETY: whoever made the layout vouches for the fragment until the job is done. The slot has as many
            // bytes as all fragments together, is ours while reserved, and is shared memory of the pool, so it does
            // not overlap the fragment.
            unsafe { stream.copy(slot.address.add(offset), address.cast_const(), bytes) };
            offset += bytes;
        }
        let checksum = stream.finish();
        self.space.mark_part(block, self.part, checksum)
    }

    /// Copy a leased slot into its block. `false`: stale ref, other length or checksum; then the block's bytes are
    /// not to be used.
    pub(super) fn load(&self, block: BlockRef, block_id: u32) -> bool {
        let Some(slot) = self.space.read_source(block, self.part) else { return false };
        if slot.bytes != self.layout.block_bytes() {
            return false;
        }
        let expected = slot.checksum.filter(|_| self.options.checksum);
        let options = StreamOptions { checksum: expected.is_some(), ..self.options };
        let mut stream = PartStream::new(self.part, slot.bytes, options);
        let mut offset = 0;
        for (address, bytes) in self.fragments(block_id) {
            // SAFETY: as in `save`, with the roles swapped: the caller's lease keeps the slot's bytes as they are, and
            // nobody else touches the fragment until the job is done.
            unsafe { stream.copy(address, slot.address.cast_const().add(offset), bytes) };
            offset += bytes;
        }
        // The lease ought to keep the block, but its holder may have been declared dead meanwhile: look again.
        stream.finish() == expected && self.space.is_readable(block)
    }

    /// Address and length of each fragment of a block. No overflow: the layout was checked for ids in range, and so
    /// was the id.
    fn fragments(&self, block_id: u32) -> impl Iterator<Item = (*mut u8, usize)> {
        self.layout.regions().iter().map(move |region| {
            let address = region.address + block_id as usize * region.stride_bytes;
            (std::ptr::with_exposed_provenance_mut(address), region.length_bytes)
        })
    }
}
