//! The pool as the copy engine sees it.

use crate::key::BlockRef;
use crate::shm::core::Core;
use crate::shm::publish::is_reserved;
use crate::shm::rows::SlotHeader;
use crate::shm::state::{SlotState, State};
use crate::slot_space::{SlotBytes, SlotSpace};
use crate::sync::Acquire;

impl SlotSpace for Core {
    fn write_target(&self, block: BlockRef, part: u32) -> Option<SlotBytes> {
        let header = self.control.slot(block.slot())?;
        if self.lock_file.forked() || !is_reserved(header, block) {
            return None;
        }
        let (address, bytes) = self.address_of(block, part)?;
        Some(SlotBytes { address, bytes, checksum: None })
    }

    fn read_source(&self, block: BlockRef, part: u32) -> Option<SlotBytes> {
        if self.lock_file.forked() || !self.is_readable(block) {
            return None;
        }
        let header = self.control.slot(block.slot())?;
        let (address, bytes) = self.address_of(block, part)?;
        let single = header.parts_written.load(Acquire) == 1;
        let checksum = if single { Self::checksum_of(header) } else { None };
        Some(SlotBytes { address, bytes, checksum })
    }

    fn mark_part(&self, block: BlockRef, part: u32, checksum: Option<u64>) -> bool {
        self.mark_part_written(block, part, checksum).unwrap_or(false)
    }

    fn is_readable(&self, block: BlockRef) -> bool {
        let state = |header: &SlotHeader| SlotState::decode(header.state.load(Acquire));
        self.control.slot(block.slot()).and_then(state).is_some_and(|state| {
            state.generation == block.generation() && matches!(state.state, State::Sealed | State::Doomed)
        })
    }
}
