//! Extents: equally many slots in one segment per part. Slot *i* of all parts is one block.

use std::sync::{Arc, PoisonError};

use crate::error::{Error, Result};
use crate::key::BlockRef;
use crate::limits::{PARTS_MAX, SLOTS_PER_RANGE};
use crate::shm::control::Control;
use crate::shm::core::Core;
use crate::shm::geometry::slot_stride;
use crate::shm::mapping::Mapping;
use crate::shm::names::segment_file;
use crate::shm::namespace::Namespace;
use crate::shm::rows::ExtentRow;
use crate::sync::{Acquire, Relaxed, SeqCst, fence};

/// What an extent is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExtentState {
    Free = 0,
    /// Its owner is creating the segments.
    Creating = 1,
    Ready = 2,
    /// Its owner is taking its slots.
    Retiring = 3,
    /// Its owner has all its slots and is removing it.
    Dropping = 4,
}

/// A checked copy of an extent's row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) index: u32,
    pub(crate) generation: u32,
    pub(crate) owner: u32,
    pub(crate) state: ExtentState,
    pub(crate) namespace: u32,
    pub(crate) first_slot: u32,
    pub(crate) slot_count: u32,
    pub(crate) bytes: u64,
    pub(crate) segments: Vec<u32>,
}

/// Ready extents of one namespace as of one version of the table.
#[derive(Debug)]
pub(crate) struct Extents {
    pub(crate) version: u64,
    list: Vec<Extent>,
}

impl std::ops::Deref for Extents {
    type Target = [Extent];

    fn deref(&self) -> &[Extent] {
        &self.list
    }
}

impl Extent {
    /// Read row `index`; `None` if it is free, an error if it holds what no writer writes.
    pub(crate) fn load(control: &Control, index: u32) -> Result<Option<Self>> {
        let row = control
            .extents()
            .get(index as usize)
            .ok_or_else(|| Error::corrupt(format!("there is no extent {index}: remove the pool")))?;
        loop {
            let word = row.state.load(Acquire);
            let extent = Self::load_as(control, row, index, word);
            fence(Acquire);
            // A row is only filled while it is free: if its word is the same, the fields belong to it.
            if row.state.load(Relaxed) == word {
                return extent;
            }
        }
    }

    fn load_as(control: &Control, row: &ExtentRow, index: u32, word: u64) -> Result<Option<Self>> {
        let state = match word as u8 {
            0 => return Ok(None),
            1 => ExtentState::Creating,
            2 => ExtentState::Ready,
            3 => ExtentState::Retiring,
            4 => ExtentState::Dropping,
            other => return Err(Error::corrupt(format!("extent {index} has the impossible state {other}"))),
        };
        let parts = row.parts.load(Relaxed) as usize;
        let extent = Self {
            index,
            generation: (word >> 32) as u32,
            owner: (word >> 8) as u32 & 0xFF_FFFF,
            state,
            namespace: row.namespace.load(Relaxed),
            first_slot: row.first_slot.load(Relaxed),
            slot_count: row.slots.load(Relaxed),
            bytes: row.bytes.load(Relaxed),
            segments: row.segments[..parts.min(PARTS_MAX)].iter().map(|word| word.load(Relaxed)).collect(),
        };
        let geometry = control.geometry();
        let end = u64::from(extent.first_slot) + u64::from(extent.slot_count);
        let possible = (1..=PARTS_MAX).contains(&parts)
            && extent.slot_count > 0
            && u64::from(extent.first_slot).is_multiple_of(SLOTS_PER_RANGE)
            && end <= geometry.slots_max
            && (extent.namespace as usize) < control.namespaces().len()
            && extent.bytes <= geometry.pool_bytes
            && extent.segments.iter().all(|segment| u64::from(*segment) < geometry.segments_max());
        if !possible {
            return Err(Error::corrupt(format!("extent {index} has impossible bounds: remove the pool")));
        }
        Ok(Some(extent))
    }

    /// Whether the row still says what this copy says of generation, owner and state.
    pub(crate) fn is_current(&self, control: &Control) -> bool {
        control.extents()[self.index as usize].state.load(Acquire) == self.word()
    }

    fn word(&self) -> u64 {
        state_word(self.generation, self.owner, self.state)
    }

    /// Numbers of its slots.
    pub(crate) fn slots(&self) -> std::ops::Range<u32> {
        self.first_slot..self.first_slot + self.slot_count
    }

    /// Bytes of one block.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.bytes / u64::from(self.slot_count.max(1))
    }

    /// Ranges of header memory that it takes.
    pub(crate) fn ranges(&self) -> std::ops::Range<usize> {
        let first = u64::from(self.first_slot) / SLOTS_PER_RANGE;
        let count = u64::from(self.slot_count).div_ceil(SLOTS_PER_RANGE);
        first as usize..(first + count) as usize
    }
}

impl ExtentRow {
    /// Say what a free row is going to be, but for its state.
    pub(crate) fn fill(&self, extent: &Extent) {
        self.namespace.store(extent.namespace, Relaxed);
        self.parts.store(extent.segments.len() as u32, Relaxed);
        self.first_slot.store(extent.first_slot, Relaxed);
        self.slots.store(extent.slot_count, Relaxed);
        self.bytes.store(extent.bytes, Relaxed);
        self.segments.iter().zip(&extent.segments).for_each(|(word, segment)| word.store(*segment, Relaxed));
    }
}

fn state_word(generation: u32, owner: u32, state: ExtentState) -> u64 {
    u64::from(generation) << 32 | u64::from(owner) << 8 | state as u64
}

/// One mapped segment: extent, its generation, part.
pub(crate) type SegmentKey = (u32, u32, u32);

impl Core {
    /// Ready extents of a namespace; a cached list, renewed when any extent of the pool changes.
    pub(crate) fn extents(&self, ns: Namespace) -> Arc<Extents> {
        let version = self.control.header().extents_version.load(Acquire);
        let mut cache = self.extent_cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = cache.get(&ns.0)
            && known.version == version
        {
            return Arc::clone(known);
        }
        let list: Vec<Extent> = self
            .all_extents()
            .into_iter()
            .filter(|extent| extent.state == ExtentState::Ready && extent.namespace == ns.0)
            .collect();
        let extents = Arc::new(Extents { version, list });
        cache.insert(ns.0, Arc::clone(&extents));
        extents
    }

    /// All extents in use; damaged rows are left out and logged.
    pub(crate) fn all_extents(&self) -> Vec<Extent> {
        let count = self.control.extents().len() as u32;
        (0..count)
            .filter_map(|index| {
                Extent::load(&self.control, index).unwrap_or_else(|error| {
                    log::error!("pegaflow: {error}");
                    None
                })
            })
            .collect()
    }

    /// Whether an extent that this process is creating or taking out of use, for itself or for a dead one, still is in
    /// its hands. A process that loses its lock without knowing is taken for dead, and others go on with its extents.
    pub(crate) fn has_extent(&self, extent: &Extent) -> bool {
        self.is_member() && extent.is_current(&self.control)
    }

    /// Move the row of an extent in this process's hands on to `state`. `None` if it is in other hands.
    pub(crate) fn move_on(&self, extent: &Extent, owner: u32, state: ExtentState) -> Option<Extent> {
        let next = Extent { owner, state, ..extent.clone() };
        let row = &self.control.extents()[extent.index as usize];
        let mine = self.is_member() && row.state.compare_exchange(extent.word(), next.word(), SeqCst, Relaxed).is_ok();
        mine.then_some(next)
    }

    /// As [`Self::has_extent`], as an error.
    pub(crate) fn check_extent(&self, extent: &Extent) -> Result<()> {
        self.check_usable()?;
        let lost = || Error::busy(format!("extent {} went into other hands while it was made", extent.index));
        extent.is_current(&self.control).then_some(()).ok_or_else(lost)
    }

    /// Claim a free row that is filled for `extent`; `free` is its word from before.
    pub(crate) fn claim_row(&self, row: &ExtentRow, free: u64, extent: &Extent) -> bool {
        if row.state.compare_exchange(free, extent.word(), SeqCst, Relaxed).is_err() {
            return false;
        }
        crate::crash_point::pass("grow.creating");
        self.still_claimed(extent, &Extent { owner: 0, state: ExtentState::Free, ..extent.clone() })
    }

    /// An extent that this process has just claimed is its own, unless it was reaped meanwhile: who reaps marks the
    /// process, then looks through the extents, so that one of the two gives it back, as it was `before`.
    pub(crate) fn still_claimed(&self, claimed: &Extent, before: &Extent) -> bool {
        fence(SeqCst);
        if self.is_member() {
            return true;
        }
        let row = &self.control.extents()[claimed.index as usize];
        let _or_the_reaper_did = row.state.compare_exchange(claimed.word(), before.word(), SeqCst, Relaxed);
        self.extents_changed();
        false
    }

    pub(crate) fn extents_changed(&self) {
        self.control.header().extents_version.fetch_add(1, SeqCst);
    }

    /// Where part `part` of a slot lies: `(extent, offset in its segment, bytes)`.
    pub(crate) fn place_of(&self, block: BlockRef, part: u32) -> Option<(Extent, u64, u64)> {
        let extent = Extent::load(&self.control, self.control.extent_of(block.slot())?).ok()??;
        let position = block.slot().checked_sub(extent.first_slot)?;
        let bytes = *self.namespace_info(Namespace(extent.namespace)).ok()?.part_bytes.get(part as usize)?;
        if position >= extent.slot_count || part as usize >= extent.segments.len() {
            return None;
        }
        let offset = u64::from(position).checked_mul(slot_stride(bytes))?;
        let inside = offset.checked_add(bytes)? <= self.control.geometry().segment_bytes;
        inside.then_some((extent, offset, bytes))
    }

    /// Address of part `part` of a slot in this process, mapping its segment at first use.
    pub(crate) fn address_of(&self, block: BlockRef, part: u32) -> Option<(*mut u8, usize)> {
        let (extent, offset, bytes) = self.place_of(block, part)?;
        let mapping = self.segment_of(&extent, part)?;
        // A segment shorter than its row says is corrupt; it gives no address rather than one outside.
        Some((mapping.address(offset as usize, bytes as usize)?, bytes as usize))
    }

    /// The segment of one part of an extent, mapped at first use.
    pub(crate) fn segment_of(&self, extent: &Extent, part: u32) -> Option<Arc<Mapping>> {
        let key = (extent.index, extent.generation, part);
        let known = self.segments.read().unwrap_or_else(PoisonError::into_inner).get(&key).map(Arc::clone);
        known.or_else(|| self.map_segment(key, *extent.segments.get(part as usize)?))
    }

    fn map_segment(&self, key: SegmentKey, segment: u32) -> Option<Arc<Mapping>> {
        let mapping = self.home.place.open(&segment_file(segment)).and_then(|file| {
            let bytes = file.metadata().map(|meta| meta.len()).unwrap_or(0);
            Mapping::new(&file, bytes as usize)
        });
        match mapping {
            Ok(mapping) => {
                // Another thread may have been faster, and others may already use the addresses of its mapping.
                let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
                Some(Arc::clone(segments.entry(key).or_insert_with(|| Arc::new(mapping))))
            }
            Err(error) => {
                log::error!("pegaflow: {error}");
                None
            }
        }
    }

    pub(crate) fn keep_segment(&self, key: SegmentKey, mapping: Arc<Mapping>) {
        self.segments.write().unwrap_or_else(PoisonError::into_inner).insert(key, mapping);
    }

    /// Unmap segments of extents that were taken out of use. Nobody can hold a valid reference into them.
    pub(crate) fn prune_segments(&self) {
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        segments.retain(|(index, generation, _), _| {
            matches!(Extent::load(&self.control, *index), Ok(Some(extent)) if extent.generation == *generation)
        });
    }
}
