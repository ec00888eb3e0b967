//! Looking at pools and cleaning up, with no engine running: all state is in the files.

mod inspect;
mod list;
mod remove;
mod ssd;
mod system;
mod tier;
mod verify;
mod verify_blocks;
mod view;

pub use inspect::inspect;
pub use list::list_pools;
pub use remove::{reap, remove};
pub use ssd::{GoOn, ssd_inspect, ssd_remove, ssd_verify};
pub use system::system_info;
pub use verify::{Progress, verify};
