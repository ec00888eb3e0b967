//! What the tests of transports are made of.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "each test binary uses some of them")]

#[path = "../../../engine/tests/common/mod.rs"]
pub mod common;
pub mod leases;
pub mod numbers;
pub mod pools;
pub mod rig;
pub mod scripted;
pub mod talk;
