//! The parts of the soak test.
#![allow(missing_docs, unreachable_pub, reason = "a test")]

pub mod coroner;
pub mod facts;
pub mod outcome;
pub mod round;
pub mod table;
