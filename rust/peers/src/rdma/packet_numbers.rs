//! Where the packet numbers of a queue pair begin: elsewhere each time, so that packets of an earlier one do not fit.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

/// Packet numbers have so many bits.
const BITS: u32 = 24;

/// A number from the random seed that the process has.
pub(super) fn first() -> u32 {
    within(RandomState::new().build_hasher().finish() as u32)
}

/// As many bits of a number as packet numbers have.
pub(super) fn within(number: u32) -> u32 {
    number & ((1 << BITS) - 1)
}
