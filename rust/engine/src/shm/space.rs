//! The pool as the copy engine sees it.

use crate::key::BlockRef;
use crate::shm::core::Core;
use crate::shm::extent::ExtentState;
use crate::shm::namespace::Namespace;
use crate::shm::pool::Pool;
use crate::shm::publish::is_reserved;
use crate::shm::rows::SlotHeader;
use crate::shm::state::{SlotState, State};
use crate::slot_space::{Segment, SlotBytes, SlotSpace};
use crate::sync::Acquire;

impl SlotSpace for Core {
    fn write_target(&self, block: BlockRef, part: u32) -> Option<SlotBytes> {
        let header = self.control.slot(block.slot())?;
        if !self.is_member() || !is_reserved(header, block) {
            return None;
        }
        let (address, bytes) = self.address_of(block, part)?;
        Some(SlotBytes { address, bytes, checksum: None })
    }

    fn read_source(&self, block: BlockRef, part: u32) -> Option<SlotBytes> {
        if !self.is_member() || !self.is_readable(block) {
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
        // A leased block can be Evicting for a moment: until its evictor sees the lease, and brings it back.
        self.control.slot(block.slot()).and_then(state).is_some_and(|state| {
            let whole = matches!(state.state, State::Sealed | State::Doomed | State::Evicting);
            state.generation == block.generation() && whole
        })
    }

    fn segments(&self, namespace: Namespace, part: u32) -> Vec<Segment> {
        if !self.is_member() {
            return Vec::new();
        }
        // An extent that is retiring may yet be reopened, and until then its slots may be in use.
        let in_use = |state| matches!(state, ExtentState::Ready | ExtentState::Retiring);
        self.all_extents()
            .into_iter()
            .filter(|extent| extent.namespace == namespace.0 && in_use(extent.state))
            .filter_map(|extent| {
                let mapping = self.segment_of(&extent, part)?;
                let address = mapping.address(0, mapping.len())?.expose_provenance();
                Some(Segment { address, bytes: mapping.len(), mapping })
            })
            .collect()
    }

    fn segments_version(&self) -> u64 {
        self.control.header().extents_version.load(Acquire)
    }
}

/// A pool handle as a copy engine sees it: for engines whose threads must not outlive this process's membership.
impl SlotSpace for Pool {
    fn write_target(&self, block: BlockRef, part: u32) -> Option<SlotBytes> {
        self.core().write_target(block, part)
    }

    fn read_source(&self, block: BlockRef, part: u32) -> Option<SlotBytes> {
        self.core().read_source(block, part)
    }

    fn mark_part(&self, block: BlockRef, part: u32, checksum: Option<u64>) -> bool {
        self.core().mark_part(block, part, checksum)
    }

    fn is_readable(&self, block: BlockRef) -> bool {
        self.core().is_readable(block)
    }

    fn segments(&self, namespace: Namespace, part: u32) -> Vec<Segment> {
        self.core().segments(namespace, part)
    }

    fn segments_version(&self) -> u64 {
        self.core().segments_version()
    }
}
