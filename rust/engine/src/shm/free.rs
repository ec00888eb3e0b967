//! Free slots: found by a bitmap of hints, taken by compare-and-swap on the header, which is the truth.

use std::ops::Range;
use std::sync::PoisonError;

use crate::limits::SLOTS_PER_RANGE;
use crate::shm::core::Core;
use crate::shm::extent::{Extent, Extents};
use crate::shm::namespace::Namespace;
use crate::shm::rows::SlotHeader;
use crate::shm::state::{NOBODY, SlotState, State, next_generation};
use crate::sync::{AcqRel, Acquire, Relaxed, Release, SeqCst, fence};

/// Where this process last found something free in a namespace.
#[derive(Clone, Copy, Default)]
pub(crate) struct FreeCursor {
    word: usize,
    /// `frees` of the namespace when a whole scan found nothing.
    empty_at: Option<u64>,
    /// Extents version of that scan.
    empty_version: u64,
    taken: u64,
}

impl Core {
    pub(crate) fn hint_free(&self, slot: u32) {
        self.control.free_words()[slot as usize / 64].fetch_or(1 << (slot % 64), Release);
    }

    pub(crate) fn unhint_free(&self, slot: u32) {
        self.control.free_words()[slot as usize / 64].fetch_and(!(1 << (slot % 64)), AcqRel);
    }

    /// Reserve any free slot of the namespace for this process.
    pub(crate) fn take_free(&self, ns: Namespace, extents: &Extents) -> Option<TakenSlot> {
        let frees = self.control.namespaces()[ns.0 as usize].frees.load(Acquire);
        let mut cursors = self.free_cursors.lock().unwrap_or_else(PoisonError::into_inner);
        let cursor = cursors.entry(ns.0).or_default();
        if cursor.empty_at == Some(frees) && cursor.empty_version == extents.version {
            return None;
        }
        let hints = self.control.free_words();
        for (extent, words) in words_from(extents, cursor.word) {
            for word in words {
                if hints[word].load(Relaxed) != 0
                    && let Some(taken) = self.take_from_word(extent, word)
                {
                    cursor.word = word;
                    cursor.empty_at = None;
                    cursor.taken += 1;
                    return Some(taken);
                }
            }
        }
        cursor.empty_at = Some(frees);
        cursor.empty_version = extents.version;
        None
    }

    /// Have the next search of the namespace begin at a slot that this process is about to free.
    pub(crate) fn search_from(&self, ns: Namespace, slot: u32) {
        let mut cursors = self.free_cursors.lock().unwrap_or_else(PoisonError::into_inner);
        cursors.entry(ns.0).or_default().word = slot as usize / SLOTS_PER_RANGE as usize;
    }

    /// Whether this process took enough since the last call to look again how much is left.
    pub(crate) fn due_for_free_count(&self, ns: Namespace, every: u64) -> bool {
        let mut cursors = self.free_cursors.lock().unwrap_or_else(PoisonError::into_inner);
        let cursor = cursors.entry(ns.0).or_default();
        let due = cursor.taken >= every;
        if due {
            cursor.taken = 0;
        }
        due
    }

    /// Slots that are hinted free.
    pub(crate) fn count_free_hints(&self, extents: &[Extent]) -> u64 {
        let words = self.control.free_words();
        let ranges = extents.iter().flat_map(|extent| extent.ranges());
        ranges.map(|word| u64::from(words[word].load(Relaxed).count_ones())).sum()
    }

    fn take_from_word(&self, extent: &Extent, word: usize) -> Option<TakenSlot> {
        let hints = &self.control.free_words()[word];
        loop {
            let bits = hints.load(Acquire);
            if bits == 0 {
                return None;
            }
            let bit = bits.trailing_zeros();
            if hints.fetch_and(!(1 << bit), AcqRel) & (1 << bit) == 0 {
                continue;
            }
            crate::crash_point::pass("reserve.unhinted");
            let slot = (word as u64 * SLOTS_PER_RANGE) as u32 + bit;
            if !extent.slots().contains(&slot) {
                if !extent.is_current(&self.control) {
                    // The range is another extent's since the list was made, and the slot is one of that.
                    self.hint_free(slot);
                    return None;
                }
                // Freed when the range was another extent's, by a process that was stopped before it left this hint.
                continue;
            }
            if let Some((slot, state)) = self.reserve_slot(slot) {
                if extent.is_current(&self.control) {
                    return Some((slot, state));
                }
                // The extent was taken out of use since the list was made.
                self.give_back(slot, state);
                return None;
            }
            if !self.is_member() {
                // Every slot that it takes goes back at once.
                return None;
            }
        }
    }

    /// FREE to RESERVED by this process; `None` if the slot was not free after all.
    pub(crate) fn reserve_slot(&self, slot: u32) -> Option<TakenSlot> {
        let header = self.control.slot(slot)?;
        let word = header.state.load(Acquire);
        let free = SlotState::decode(word).filter(|state| state.state == State::Free)?;
        let mine = SlotState::new(next_generation(free.generation), self.me.row, State::Reserved);
        header.state.compare_exchange(word, mine.encode(), AcqRel, Relaxed).ok()?;
        crate::crash_point::pass("reserve.claimed");
        self.still_mine(slot, mine)
    }

    /// A slot that this process has just reserved, unless it was reaped meanwhile: who reaps marks the row, then looks
    /// through the slots, so that one of the two gives it back.
    pub(crate) fn still_mine(&self, slot: u32, mine: SlotState) -> Option<TakenSlot> {
        // A reader that still holds the old key must see the new state word before any new field.
        fence(SeqCst);
        if !self.is_member() {
            self.give_back(slot, mine);
            return None;
        }
        Some((slot, mine))
    }

    /// Give a block back that is this process's alone (RESERVED or FREEING by it): its members, then itself.
    pub(crate) fn give_back(&self, slot: u32, mine: SlotState) -> bool {
        let header = self.control.slot_unchecked(slot);
        if header.state.load(Acquire) != mine.encode() {
            return false;
        }
        self.free_members(slot, mine);
        self.free_one(slot, header, mine)
    }

    fn free_one(&self, slot: u32, header: &SlotHeader, from: SlotState) -> bool {
        self.control.stamp(slot).store(0, Relaxed);
        crate::crash_point::pass("free.unstamped");
        let free = SlotState::new(from.generation, NOBODY, State::Free);
        if header.state.compare_exchange(from.encode(), free.encode(), AcqRel, Relaxed).is_err() {
            return false;
        }
        crate::crash_point::pass("free.freed");
        self.hint_free(slot);
        crate::crash_point::pass("free.hinted");
        self.namespace_freed(header.tag.load(Relaxed) >> 16);
        true
    }

    /// Free the member slots of a block; stops at anything that does not belong to it.
    fn free_members(&self, head: u32, head_state: SlotState) {
        let block = head_state.block(head);
        let mut link = self.control.slot_unchecked(head).member_next.load(Acquire);
        for _ in 0..self.control.geometry().slots_max {
            let Some((slot, header)) = link.checked_sub(1).and_then(|slot| Some((slot, self.control.slot(slot)?)))
            else {
                return;
            };
            let Some(state) = SlotState::decode(header.state.load(Acquire)) else { return };
            if state.state != State::Member || header.parent.load(Relaxed) != block.0 {
                return;
            }
            link = header.member_next.load(Acquire);
            self.free_one(slot, header, state);
        }
    }
}

/// A slot and the state word that was just stored in it.
pub(crate) type TakenSlot = (u32, SlotState);

/// Words of the hints of these extents, once around, from the word `start` on if it is one of theirs.
fn words_from(extents: &[Extent], start: usize) -> impl Iterator<Item = (&Extent, Range<usize>)> {
    let count = extents.len();
    let first = extents.iter().position(|extent| extent.ranges().contains(&start));
    let (first, start) = first.map_or((0, 0), |first| (first, start));
    // The extent in the middle of which the circle begins comes twice.
    (0..if count == 0 { 0 } else { count + 1 }).map(move |turn| {
        let extent = &extents[(first + turn) % count];
        let ranges = extent.ranges();
        let middle = start.clamp(ranges.start, ranges.end);
        let words = match turn {
            0 => middle..ranges.end,
            last if last == count => ranges.start..middle,
            _ => ranges,
        };
        (extent, words)
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::shm::extent::ExtentState;
    use crate::{OpenOptions, Pool};

    #[test]
    fn a_search_goes_once_around() {
        let extent = |first_slot, slot_count| {
            let (state, segments) = (ExtentState::Ready, vec![0]);
            Extent {
                index: 0,
                generation: 1,
                owner: 0,
                state,
                namespace: 0,
                first_slot,
                slot_count,
                bytes: 0,
                segments,
            }
        };
        let extents = [extent(640, 192), extent(0, 100)];
        let words = |start| words_from(&extents, start).flat_map(|(_, words)| words).collect::<Vec<_>>();
        assert_eq!(words(11), [11, 12, 0, 1, 10]);
        assert_eq!(words(0), [0, 1, 10, 11, 12]);
        assert_eq!(words(5), [10, 11, 12, 0, 1], "a word of nobody");
        assert_eq!(words_from(&[], 5).count(), 0);
    }

    #[test]
    fn a_hint_left_by_an_earlier_owner_of_the_range_gives_no_slot() {
        let options = OpenOptions { pool_bytes: Some(1 << 20), private: true, ..OpenOptions::default() };
        let pool = Pool::open("p", &OpenOptions { segment_bytes: Some(64 << 10), ..options }).expect("a private pool");
        let core = pool.core();
        let ns = pool.namespace(&[1; 32], 0, &[16 << 10], "test").expect("a namespace");
        core.grow(ns).expect("room");
        let extent = core.extents(ns)[0].clone();
        assert!(u64::from(extent.slot_count) < SLOTS_PER_RANGE);
        core.hint_free(extent.slots().end + 2);
        let taken: Vec<u32> =
            std::iter::from_fn(|| core.take_free(ns, &core.extents(ns))).map(|(slot, _)| slot).collect();
        assert_eq!(taken.len(), extent.slot_count as usize);
        assert!(taken.iter().all(|slot| extent.slots().contains(slot)), "{taken:?}");
    }
    #[test]
    fn a_list_of_extents_that_is_out_of_date_hides_no_slot_of_those_that_came_after() {
        let options = OpenOptions { pool_bytes: Some(64 << 10), private: true, ..OpenOptions::default() };
        let pool = Pool::open("p", &OpenOptions { segment_bytes: Some(64 << 10), ..options }).expect("a private pool");
        let core = pool.core();
        let space = |number, bytes| pool.namespace(&[number; 32], 0, &[bytes], "test").expect("a namespace");
        let (large, small) = (space(1, 64 << 10), space(2, 8 << 10));
        core.grow(large).expect("room");
        let outdated = core.extents(large);
        assert!(core.retire(&outdated[0], false));
        core.grow(small).expect("the same room");
        assert_eq!(core.extents(small)[0].first_slot, outdated[0].first_slot, "the same range");
        let take = || core.take_free(small, &core.extents(small)).map(|(slot, _)| slot);
        assert_eq!(take(), Some(outdated[0].first_slot), "the only one that both have");
        assert!(core.take_free(large, &outdated).is_none());
        assert_eq!(std::iter::from_fn(take).count() + 1, core.extents(small)[0].slot_count as usize);
    }
}
