//! Peers that die, stand still, are cut off, evict or talk garbage at any moment, and transports that fail in every
//! way: right bytes or none, nothing waits for ever, and all slots and leases come back. `PEGAFLOW_PEER_CASES` says how
//! often.
#![allow(missing_docs, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;
mod eviction;
mod frozen;
mod garbage;
mod hosts;
mod kills;
mod link;
mod middleman;
#[path = "../parts/numbers.rs"]
mod numbers;
mod report;
mod transports;
