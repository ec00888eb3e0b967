//! The engine of PegaFlow: a crash-proof pool of blocks in POSIX shared memory, used in process.
//!
//! No Python; CUDA is looked for at run time only. `docs/shm-format.md` has the bytes, `docs/crash-model.md` what each
//! death leaves behind.
#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "models leave out what has no part in them"))]

#[cfg(not(loom))]
pub mod admin;
pub mod checksum;
pub mod config;
#[cfg(not(loom))]
pub mod copy;
#[cfg(not(loom))]
mod counters;
pub mod crash_point;
#[cfg(not(loom))]
pub mod cuda;
pub mod error;
pub mod hash;
pub mod key;
pub mod limits;
#[cfg(loom)]
mod model_words;
#[cfg(not(loom))]
pub mod objects;
pub mod shm;
pub mod slot_space;
#[cfg(not(loom))]
pub mod ssd;
mod sync;
#[cfg(not(loom))]
pub mod tier;
#[cfg(not(loom))]
pub mod traffic;

pub use config::{HugePages, OpenOptions};
pub use error::{Error, ErrorKind, Result};
pub use key::{BlockRef, Key};
#[cfg(not(loom))]
pub use shm::fork::ForkGuard;
#[cfg(not(loom))]
pub use shm::lending::{DataSegment, Lent, LentPlace};
pub use shm::names;
pub use shm::namespace::{Namespace, NamespaceInfo};
pub use shm::pool::Pool;
pub use shm::process::Member;
pub use shm::shares::Share;
#[cfg(not(loom))]
pub use shm::survey::{BlockName, Sight, Survey};
