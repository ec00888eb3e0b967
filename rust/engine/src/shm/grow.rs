//! Growing a namespace by one extent: claim the row, create the segments, hand the slots out.
//!
//! The claim (a short step under the structure lock) names owner, segments and header range before anything exists;
//! the slow part (claiming a gigabyte of memory) runs without a lock; READY is the last store. Whoever dies in between
//! leaves a row in CREATING that names all there is to remove.

use std::sync::{Arc, PoisonError};

use crate::error::{Error, ErrorKind, Result};
use crate::limits::SLOTS_PER_RANGE;
use crate::shm::backing::{furnish, helpers};
use crate::shm::core::Core;
use crate::shm::extent::{Extent, ExtentState};
use crate::shm::file::{Place, set_length};
use crate::shm::geometry::slot_stride;
use crate::shm::mapping::Mapping;
use crate::shm::names::segment_file;
use crate::shm::namespace::{Namespace, NamespaceInfo};
use crate::shm::rows::SlotHeader;
use crate::shm::state::{NOBODY, SlotState, State};
use crate::sync::{Acquire, AtomicU64, Relaxed, Release, SeqCst};

/// Outcome of a try to grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grown {
    /// New slots are free.
    Yes,
    /// The pool has no segment or no slot number left.
    AtCapacity,
    /// Another process is growing this namespace now.
    InProgress,
}

impl Core {
    /// Add one extent to `ns`. Slow: background threads and callers that may wait only.
    pub(crate) fn grow(&self, ns: Namespace) -> Result<Grown> {
        let info = self.namespace_info(ns)?;
        let extent = match self.claim_extent(&info)? {
            Ok(extent) => extent,
            Err(outcome) => return Ok(outcome),
        };
        crate::crash_point::pass("grow.claimed");
        match self.build_extent(&extent, &info).and_then(|()| self.hand_out(&extent)) {
            Ok(()) => {
                #[cfg(not(loom))]
                self.remember_more();
                Ok(Grown::Yes)
            }
            Err(error) => {
                self.count_grow_failure(ns);
                self.drop_extent(&extent);
                Err(error)
            }
        }
    }

    fn claim_extent(&self, info: &NamespaceInfo) -> Result<std::result::Result<Extent, Grown>> {
        let _structure = self
            .lock(&self.control.header().structure_lock)
            .ok_or_else(|| Error::busy("another process holds the pool's structure lock for too long: try again"))?;
        crate::crash_point::pass("grow.locked");
        let all = self.all_extents();
        let busy = |extent: &Extent| extent.namespace == info.id && extent.state == ExtentState::Creating;
        if all.iter().any(busy) {
            return Ok(Err(Grown::InProgress));
        }
        let geometry = self.control.geometry();
        let Some(segments) = unused_segments(&all, geometry.segments_max() as u32, info.parts as usize) else {
            return Ok(Err(Grown::AtCapacity));
        };
        let Some((first_slot, slots)) = unused_slots(&all, geometry.slots_max, self.slots_of_extent(info)) else {
            return Ok(Err(Grown::AtCapacity));
        };
        let rows = self.control.extents();
        let Some((index, row)) =
            rows.iter().enumerate().find(|(_, row)| row.state.load(SeqCst) as u8 == ExtentState::Free as u8)
        else {
            return Ok(Err(Grown::AtCapacity));
        };
        let word = row.state.load(SeqCst);
        let extent = Extent {
            index: index as u32,
            generation: ((word >> 32) as u32).wrapping_add(1),
            owner: self.me.row,
            state: ExtentState::Creating,
            namespace: info.id,
            first_slot: first_slot as u32,
            slot_count: slots as u32,
            bytes: info.part_bytes.iter().map(|bytes| slots * slot_stride(*bytes)).sum(),
            segments,
        };
        // Who stood still here for so long that he was taken for dead no longer has the lock.
        self.check_usable()?;
        row.fill(&extent);
        crate::crash_point::pass("grow.filled");
        let is_mine = self.claim_row(row, word, &extent);
        Ok(if is_mine { Ok(extent) } else { Err(Grown::InProgress) })
    }

    /// Slots of a whole extent of a namespace.
    pub(crate) fn slots_of_extent(&self, info: &NamespaceInfo) -> u64 {
        let geometry = self.control.geometry();
        let slots = info.part_bytes.iter().map(|bytes| geometry.segment_bytes / slot_stride(*bytes)).min().unwrap_or(0);
        slots.min(geometry.slots_max)
    }

    /// Create segments and claim header memory.
    fn build_extent(&self, extent: &Extent, info: &NamespaceInfo) -> Result<()> {
        for (part, (segment, part_bytes)) in extent.segments.iter().zip(&info.part_bytes).enumerate() {
            self.check_extent(extent)?;
            let name = segment_file(*segment);
            // Left by somebody who died before this segment number was claimed anew.
            self.home.place.remove(&name);
            let file = self.home.place.create(&name)?;
            crate::crash_point::pass("grow.segment_created");
            let bytes = u64::from(extent.slot_count).checked_mul(slot_stride(*part_bytes));
            let bytes =
                bytes.and_then(|bytes| bytes.checked_next_multiple_of(self.home.page_bytes)).ok_or_else(|| {
                    Error::corrupt(format!("extent {} has impossible sizes: remove the pool", extent.index))
                })?;
            set_length(&file, bytes)?;
            let mapping = Mapping::new(&file, bytes as usize).map_err(|error| self.home.explain(bytes, error))?;
            let mapping = Arc::new(mapping);
            self.furnish(&mapping, info.id, part);
            self.home.claim(&file, bytes)?;
            crate::crash_point::pass("grow.segment_claimed");
            self.keep_segment((extent.index, extent.generation, part as u32), mapping);
            self.stats.segments_created.add(1);
        }
        let (offsets, ranges) = (self.control.offsets(), extent.ranges());
        let slots = (ranges.end - ranges.start) as u64 * SLOTS_PER_RANGE;
        let first = ranges.start as u64 * SLOTS_PER_RANGE;
        let control = self.lock_file.file();
        for (table, record) in [(offsets.slots, size_of::<SlotHeader>()), (offsets.stamps, size_of::<AtomicU64>())] {
            let record = record as u64;
            self.place.claim(control, table as u64 + first * record, slots * record, "slot headers")?;
        }
        crate::crash_point::pass("grow.allocated");
        Ok(())
    }

    /// Prepare the memory of a new segment, near the device that will use it if that is known.
    fn furnish(&self, mapping: &Mapping, namespace: u32, part: usize) {
        let nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        let node = nodes.get(&namespace).and_then(|nodes| nodes.get(part).copied().flatten());
        drop(nodes);
        // A private pool takes memory as it uses it.
        let threads = if matches!(self.place, Place::Directory(..)) { helpers() } else { 0 };
        if let Err(error) = furnish(mapping, node, threads)
            && self.placing_failures.fetch_add(1, Relaxed) == 0
        {
            log::warn!(
                "pegaflow: memory is not placed near its device ({error}): in a container, the capability SYS_NICE \
                 allows it"
            );
        }
    }

    /// Make the slots usable: range table and free hints first, READY last. An extent that is READY but whose slots
    /// nobody finds yet would have its users evict blocks for nothing.
    fn hand_out(&self, extent: &Extent) -> Result<()> {
        let is_mine = || self.has_extent(extent);
        if matches!(self.place, Place::Directory(..)) {
            // A process that died while it still had an older list of extents may have left its mark on a header.
            extent.slots().take_while(|_| is_mine()).for_each(|slot| self.clear_header(slot));
        }
        crate::crash_point::pass("grow.headers_cleared");
        for range in extent.ranges().take_while(|_| is_mine()) {
            self.control.ranges()[range].store(extent.index + 1, Release);
            crate::crash_point::pass("grow.ranged");
        }
        for slot in extent.slots().take_while(|_| is_mine()) {
            self.hint_free(slot);
            crate::crash_point::pass("grow.hinted");
        }
        if self.move_on(extent, self.me.row, ExtentState::Ready).is_none() {
            return self.check_extent(extent);
        }
        crate::crash_point::pass("grow.ready");
        self.extents_changed();
        crate::crash_point::pass("grow.announced");
        self.namespace_freed(extent.namespace);
        Ok(())
    }

    /// Remove an extent in CREATING or DROPPING: hints, range table, slots, segments, and the row last. Each step looks
    /// first whether it still is in this process's hands: what is gone may be another namespace's already.
    pub(crate) fn drop_extent(&self, extent: &Extent) {
        let is_mine = || self.has_extent(extent);
        for slot in extent.slots().take_while(|_| is_mine()) {
            self.unhint_free(slot);
            crate::crash_point::pass("drop.unhinted");
        }
        for range in extent.ranges().take_while(|_| is_mine()) {
            self.control.ranges()[range].store(0, Release);
            crate::crash_point::pass("drop.unranged");
        }
        if extent.state == ExtentState::Dropping {
            // Out of everybody's reach now; while CREATING, header memory may not even be claimed.
            extent.slots().take_while(|_| is_mine()).for_each(|slot| self.clear_header(slot));
            crate::crash_point::pass("drop.headers_cleared");
        }
        for segment in extent.segments.iter().take_while(|_| is_mine()) {
            self.home.place.remove(&segment_file(*segment));
            crate::crash_point::pass("drop.segment_removed");
        }
        if self.move_on(extent, 0, ExtentState::Free).is_some() {
            crate::crash_point::pass("drop.freed");
            self.extents_changed();
        }
        self.prune_segments();
    }

    /// Free, leased by nobody, at the same generation. The slot is out of everybody's reach.
    fn clear_header(&self, slot: u32) {
        let header = self.control.slot_unchecked(slot);
        let generation = (header.state.load(Acquire) >> 32) as u32;
        header.state.store(SlotState::new(generation, NOBODY, State::Free).encode(), SeqCst);
        header.leases.iter().for_each(|word| word.store(0, SeqCst));
        self.control.stamp(slot).store(0, Relaxed);
    }

    /// Bytes of data segments in use or being created.
    pub(crate) fn bytes_used(&self) -> u64 {
        self.all_extents().iter().map(|extent| extent.bytes).sum()
    }

    /// Grow and remember the outcome for people; used where nobody can take more of an error than its kind.
    pub(crate) fn grow_quietly(&self, ns: Namespace) -> std::result::Result<Grown, ErrorKind> {
        match self.grow(ns) {
            Ok(outcome) => {
                if outcome == Grown::Yes {
                    *self.grow_error.lock().unwrap_or_else(PoisonError::into_inner) = None;
                }
                Ok(outcome)
            }
            // Somebody else is at the list of extents; if that takes long it is noticed as a growth that does.
            Err(error) if error.kind() == ErrorKind::Busy => Ok(Grown::InProgress),
            Err(error) => {
                let mut last = self.grow_error.lock().unwrap_or_else(PoisonError::into_inner);
                if last.is_none() {
                    log::warn!("pegaflow: the pool stays as it is: {error}");
                }
                *last = Some(error.to_string());
                Err(error.kind())
            }
        }
    }
}

fn unused_segments(all: &[Extent], segments_max: u32, count: usize) -> Option<Vec<u32>> {
    let mut used = vec![false; segments_max as usize];
    for segment in all.iter().flat_map(|extent| &extent.segments) {
        used[*segment as usize] = true;
    }
    let free: Vec<u32> = (0..segments_max).filter(|segment| !used[*segment as usize]).take(count).collect();
    (free.len() == count).then_some(free)
}

/// First gap in the slot numbers for up to `slots` slots; a shorter one if none is long enough.
pub(crate) fn unused_slots(all: &[Extent], slots_max: u64, slots: u64) -> Option<(u64, u64)> {
    let mut used: Vec<(u64, u64)> = all
        .iter()
        .map(|extent| {
            let ranges = extent.ranges();
            (ranges.start as u64 * SLOTS_PER_RANGE, ranges.end as u64 * SLOTS_PER_RANGE)
        })
        .collect();
    used.sort_unstable();
    used.push((slots_max, slots_max));
    let mut best: Option<(u64, u64)> = None;
    let mut start = 0;
    for (next, end) in used {
        let gap = next.saturating_sub(start).min(slots);
        if gap > best.map_or(0, |(_, length)| length) {
            best = Some((start, gap));
        }
        if gap == slots {
            break;
        }
        start = start.max(end);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(first_slot: u32, slot_count: u32) -> Extent {
        let state = ExtentState::Ready;
        let segments = vec![first_slot / 64];
        Extent { index: 0, generation: 1, owner: 0, state, namespace: 0, first_slot, slot_count, bytes: 0, segments }
    }

    #[test]
    fn gaps_between_extents_are_used_again() {
        let all = [extent(0, 60), extent(128, 64)];
        assert_eq!(unused_slots(&all, 4096, 64), Some((64, 64)));
        assert_eq!(unused_slots(&all, 4096, 65), Some((192, 65)));
        assert_eq!(unused_slots(&all, 256, 100), Some((64, 64)));
        assert_eq!(unused_slots(&[extent(0, 64)], 64, 1), None);
    }

    #[test]
    fn segment_numbers_are_used_again() {
        assert_eq!(unused_segments(&[extent(0, 1), extent(128, 1)], 4, 2), Some(vec![1, 3]));
        assert_eq!(unused_segments(&[extent(0, 1)], 2, 2), None);
    }
}
