//! The SSD tier of a pool: which process drives the store of [`crate::ssd`], how the others find what is in it and ask
//! for it, and what is written. `docs/ssd-tier.md` has the bytes and the rules.
//!
//! `segment` is the file that all processes share; `ask` is what each of them may do; `leader` is the thread that one
//! of them runs for all.

mod ask;
mod board;
mod counters;
#[cfg(test)]
mod fake_pool;
mod gauges;
mod hints;
mod leader;
mod options;
#[cfg(test)]
mod property_tests;
mod requests;
mod resets;
mod rows;
mod scan;
mod seat;
mod segment;
mod slots;
mod spill;
#[cfg(test)]
mod tier_tests;

pub use ask::{Prefetch, Tier, TierFacts, TierState};
pub use options::{Admission, TierOptions};
pub(crate) use seat::TierSeat;
pub(crate) use segment::Segment;
