//! The state word of a slot: one `u64` moved by compare-and-swap, so that no step is ever half done.
//!
//! `generation << 32 | owner row << 8 | state`. The generation rises with every reservation, so a reference to an
//! earlier use of the slot can never match.

use crate::key::BlockRef;

/// What a slot is doing. `docs/shm-format.md` has the table of transitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// Nobody's.
    Free = 0,
    /// Being filled for its owner; invisible.
    Reserved = 1,
    /// Visible and immutable.
    Sealed = 2,
    /// Its owner is trying to take it out of the index.
    Evicting = 3,
    /// Out of the index, still leased; goes free with the last lease.
    Doomed = 4,
    /// Somebody may still be writing it.
    Quarantined = 5,
    /// Part of the block whose head is named by `parent`; shares the head's fate.
    Member = 6,
    /// Out of the index and leased by nobody; its owner is giving it back.
    Freeing = 7,
}

/// Owner of a slot that nobody owns.
pub(crate) const NOBODY: u32 = 0xFF_FFFF;

/// A decoded state word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotState {
    pub(crate) generation: u32,
    pub(crate) owner: u32,
    pub(crate) state: State,
}

impl SlotState {
    pub(crate) fn new(generation: u32, owner: u32, state: State) -> Self {
        Self { generation, owner, state }
    }

    /// Decode; `None` if no writer of this layout can have made the word.
    pub(crate) fn decode(word: u64) -> Option<Self> {
        let state = match word as u8 {
            0 => State::Free,
            1 => State::Reserved,
            2 => State::Sealed,
            3 => State::Evicting,
            4 => State::Doomed,
            5 => State::Quarantined,
            6 => State::Member,
            7 => State::Freeing,
            _ => return None,
        };
        Some(Self { generation: (word >> 32) as u32, owner: (word >> 8) as u32 & NOBODY, state })
    }

    pub(crate) fn encode(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.owner & NOBODY) << 8 | self.state as u64
    }

    /// The same generation and owner in another state.
    pub(crate) fn to(self, state: State) -> Self {
        Self { state, ..self }
    }

    pub(crate) fn block(self, slot: u32) -> BlockRef {
        BlockRef::new(slot, self.generation)
    }
}

/// Word of a sealed slot at `generation`.
pub(crate) fn sealed_word(generation: u32) -> u64 {
    SlotState::new(generation, NOBODY, State::Sealed).encode()
}

/// Generation of the next use; 0 is skipped, so that no reference is ever 0.
pub(crate) fn next_generation(generation: u32) -> u32 {
    generation.wrapping_add(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_encoding() {
        for state in [State::Free, State::Reserved, State::Sealed, State::Freeing] {
            let word = SlotState::new(7, 127, state);
            assert_eq!(SlotState::decode(word.encode()), Some(word));
        }
        assert_eq!(SlotState::decode(8), None);
    }

    #[test]
    fn no_reference_is_ever_zero() {
        assert_eq!(next_generation(u32::MAX), 1);
        assert_ne!(SlotState::new(next_generation(0), NOBODY, State::Sealed).block(0).0, 0);
    }
}
