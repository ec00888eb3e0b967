//! What was asked of a pool, where it was found, and why it was not: counters over all processes, living and dead, in a
//! file of their own. `docs/traffic.md` has the bytes and the rules.
//!
//! Nothing of the pool depends on it. A number that a death leaves half done is a wrong number, and no more: what is
//! read is checked against the tables, and what is not there is not counted.

mod counters;
mod curve;
mod file;
mod name;
mod note;
mod pressure;
mod report;
mod rows;
mod samples;
mod seat;
mod seen;
#[cfg(test)]
mod traffic_tests;
mod windows;

pub(crate) use counters::Counter;
pub use name::KeyHash;
pub use note::{Missed, Prompt};
pub(crate) use report::{TrafficReport, report};
pub(crate) use seat::TrafficSeat;
pub use windows::Window;
