//! What the tests that kill, stop and damage things share.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "each test binary uses some of them")]

pub mod blocks;
pub mod chains;
pub mod child;
pub mod histogram;
pub mod patience;
pub mod plan;
pub mod random;
pub mod records;
pub mod report;
pub mod settled;
pub mod stopwatch;
pub mod tier;
pub mod values;
