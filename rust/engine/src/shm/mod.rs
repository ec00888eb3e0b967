//! The pool in shared memory. `docs/shm-format.md` has the bytes, `docs/crash-model.md` the deaths.

pub(crate) mod accounts;
pub(crate) mod backing;
pub(crate) mod clock;
pub(crate) mod control;
pub(crate) mod core;
pub(crate) mod evict;
pub(crate) mod extent;
pub(crate) mod file;
#[cfg(not(loom))]
pub(crate) mod fork;
pub(crate) mod free;
pub(crate) mod geometry;
#[cfg(not(loom))]
pub(crate) mod gone;
pub(crate) mod grow;
pub(crate) mod home;
pub(crate) mod huge;
mod index;
pub(crate) mod lease;
#[cfg(not(loom))]
pub mod lending;
#[cfg(not(loom))]
pub(crate) mod liveness;
pub(crate) mod lock;
mod maintenance;
pub(crate) mod mapping;
#[cfg(loom)]
mod models;
mod moves;
pub mod names;
pub(crate) mod namespace;
mod notice;
pub(crate) mod open;
mod orphans;
pub(crate) mod policy;
pub(crate) mod pool;
mod pressure;
pub(crate) mod process;
pub(crate) mod publish;
mod reap;
mod rebuild;
pub(crate) mod recency;
mod relocate;
pub(crate) mod reserve;
mod retire;
pub(crate) mod rows;
pub(crate) mod segments_dir;
pub(crate) mod shares;
mod shortage;
mod space;
pub(crate) mod state;
pub(crate) mod stats;
pub(crate) mod superblock;
#[cfg(not(loom))]
pub(crate) mod survey;
mod victims;

#[cfg(loom)]
pub(crate) use models::locks as liveness;
