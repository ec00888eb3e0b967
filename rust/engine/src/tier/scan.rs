//! Which blocks are worth writing: a pass over the stamps, a bounded part of it in each round.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::options::Admission;
use super::segment::Segment;
use crate::key::BlockRef;
use crate::limits::{SSD_SAMPLES_MAX, SSD_SCAN_PAUSE, SSD_SCAN_REST, SSD_SCAN_SLOTS_MAX};
use crate::shm::clock::thread_time;
use crate::shm::core::Core;
use crate::shm::extent::{Extent, ExtentState};
use crate::shm::namespace::Namespace;
use crate::shm::recency::tick_of;
use crate::shm::state::{SlotState, State};
use crate::sync::{Acquire, Relaxed};

/// Of a namespace's blocks, one in so many is old.
const OLD_SHARE: usize = 8;

/// What was seen in a slot.
#[derive(Clone, Copy, Default)]
struct Seen {
    stamp: u64,
    generation: u32,
    /// It was handed on.
    chosen: bool,
}

/// One of them for every slot there may be, in memory that the kernel gives when it is first written.
struct Table {
    stamps: Vec<u64>,
    /// `generation << 1 | chosen`.
    words: Vec<u64>,
}

impl Table {
    fn new(slots_max: usize) -> Self {
        Self { stamps: vec![0; slots_max], words: vec![0; slots_max] }
    }

    fn get(&self, slot: u32) -> Option<Seen> {
        let (stamp, word) = (*self.stamps.get(slot as usize)?, *self.words.get(slot as usize)?);
        Some(Seen { stamp, generation: (word >> 1) as u32, chosen: word & 1 == 1 })
    }

    fn set(&mut self, slot: u32, seen: Seen) {
        if let (Some(stamp), Some(word)) = (self.stamps.get_mut(slot as usize), self.words.get_mut(slot as usize)) {
            (*stamp, *word) = (seen.stamp, u64::from(seen.generation) << 1 | u64::from(seen.chosen));
        }
    }
}

/// Stamps of one namespace in this pass.
#[derive(Default)]
struct Samples {
    ticks: Vec<u64>,
    blocks: usize,
}

/// Where the pass is, and what earlier ones saw.
pub(crate) struct Scan {
    admission: Admission,
    seen: Table,
    extents: Vec<Extent>,
    /// Extent and slot within it to go on with.
    at: (usize, u32),
    next_pass: Instant,
    /// What this pass took so far.
    spent: Duration,
    samples: HashMap<u32, Samples>,
    /// Of each namespace: blocks up to this tick are next to be evicted.
    old: HashMap<u32, u64>,
}

impl Scan {
    pub(crate) fn new(core: &Core, admission: Admission) -> Self {
        let seen = Table::new(core.control.geometry().slots_max as usize);
        let (extents, samples, old) = (Vec::new(), HashMap::new(), HashMap::new());
        Self { admission, seen, extents, at: (0, 0), next_pass: Instant::now(), spent: Duration::ZERO, samples, old }
    }

    /// Go on. Hands blocks to `choose` until it says that this was the last it takes.
    pub(crate) fn round(&mut self, core: &Core, segment: &Segment, choose: impl FnMut(BlockRef) -> bool) {
        let started = Instant::now();
        if self.at.0 >= self.extents.len() {
            if started < self.next_pass {
                return;
            }
            self.begin_pass(core, segment);
        }
        let before = thread_time();
        self.go_on(core, choose);
        // Not what passed while others had the processor: on a busy host the next pass would be far off.
        self.spent += thread_time().saturating_sub(before);
        if self.at.0 >= self.extents.len() {
            self.end_pass(core);
        }
    }

    fn go_on(&mut self, core: &Core, mut choose: impl FnMut(BlockRef) -> bool) {
        let mut left = SSD_SCAN_SLOTS_MAX;
        while left > 0 {
            let Some(extent) = self.extents.get(self.at.0) else { return };
            let (ns, slots) = (extent.namespace, extent.slots());
            let slot = slots.start + self.at.1;
            if slot >= slots.end {
                self.at = (self.at.0 + 1, 0);
                continue;
            }
            self.at.1 += 1;
            left -= 1;
            if let Some(block) = self.look(core, ns, slot)
                && !choose(block)
            {
                return;
            }
        }
    }

    fn begin_pass(&mut self, core: &Core, segment: &Segment) {
        self.at = (0, 0);
        self.spent = Duration::ZERO;
        self.extents = core.all_extents();
        self.extents.retain(|extent| {
            let origin = core.origin_of(Namespace(extent.namespace));
            extent.state == ExtentState::Ready && origin.is_some_and(|origin| segment.is_used(origin.first))
        });
        self.samples.clear();
    }

    /// When the next pass begins, and what is old in it.
    fn end_pass(&mut self, core: &Core) {
        self.next_pass = Instant::now() + SSD_SCAN_PAUSE.max(self.spent * SSD_SCAN_REST);
        self.old.clear();
        for (ns, samples) in &mut self.samples {
            let own: Vec<Extent> = self.extents.iter().filter(|extent| extent.namespace == *ns).cloned().collect();
            let slots = own.iter().map(|extent| u64::from(extent.slot_count)).sum::<u64>();
            let is_full = core.count_free_hints(&own) < slots / OLD_SHARE as u64;
            if !is_full || core.may_grow(Namespace(*ns)) || samples.ticks.is_empty() {
                continue;
            }
            let rank = samples.ticks.len() / OLD_SHARE;
            let (_, tick, _) = samples.ticks.select_nth_unstable(rank);
            self.old.insert(*ns, *tick);
        }
    }

    fn sample(&mut self, ns: u32, tick: u64) {
        let samples = self.samples.entry(ns).or_default();
        samples.blocks += 1;
        if samples.ticks.len() < SSD_SAMPLES_MAX {
            samples.ticks.push(tick);
        } else {
            // Each later block takes the place of some earlier one, fewer and fewer of them.
            let place = tick.wrapping_mul(0x9E37_79B9_7F4A_7C15) as usize % samples.blocks;
            if let Some(sample) = samples.ticks.get_mut(place) {
                *sample = tick;
            }
        }
    }

    /// The block in `slot`, if it is to be written.
    fn look(&mut self, core: &Core, ns: u32, slot: u32) -> Option<BlockRef> {
        let stamp = core.control.slot(slot).map(|_| core.control.stamp(slot).load(Relaxed))?;
        let seen = self.seen.get(slot)?;
        if stamp == 0 {
            if seen.stamp != 0 {
                self.seen.set(slot, Seen::default());
            }
            return None;
        }
        let tick = tick_of(stamp);
        self.sample(ns, tick);
        let old = self.old.get(&ns).is_some_and(|old| tick <= *old);
        if stamp == seen.stamp && (seen.chosen || !old) {
            return None;
        }
        let state = SlotState::decode(core.control.slot(slot)?.state.load(Acquire))?;
        if state.state != State::Sealed {
            return None;
        }
        let again = seen.stamp != 0 && seen.generation == state.generation;
        let touched = again && tick > tick_of(seen.stamp);
        let wanted = old || touched || self.admission == Admission::All;
        self.seen.set(slot, Seen { stamp, generation: state.generation, chosen: wanted });
        wanted.then(|| state.block(slot))
    }

    /// A block that was chosen could not be taken: it is looked at again in the next pass.
    pub(crate) fn unchoose(&mut self, block: BlockRef) {
        self.seen.set(block.slot(), Seen::default());
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake_pool::{Life, keys};
    use super::*;
    use crate::ssd::fake_block::Fixture;

    #[test]
    fn a_pass_that_was_kept_from_running_is_not_rested_for() {
        let fixture = Fixture::new(1, 25);
        let life = Life::new(&fixture, Admission::All, 64);
        life.until_serving();
        life.store_all(&keys(0..4), 1);
        let core = life.pool.core();
        let mut scan = Scan::new(core, Admission::All);
        let mut seen = 0;
        scan.round(core, core.tier_segment().unwrap(), |_| {
            seen += 1;
            std::thread::sleep(Duration::from_millis(250));
            true
        });
        assert_eq!(seen, 4);
        assert!(scan.next_pass < Instant::now() + Duration::from_secs(20), "it stood still for a second");
    }
}
