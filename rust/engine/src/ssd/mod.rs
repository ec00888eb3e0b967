//! The SSD tier: blocks in files of several directories, found again after any crash, trusted only as far as their
//! checksums. `docs/ssd-format.md` has the bytes.
//!
//! From the outside in: [`store`] is what to use; `writer`, `reader` and `recover` are the rest of it; `member` is one
//! directory; `queue` makes operations end; `io` is what an operating system has to offer.

mod bounded;
mod buffer;
pub mod check;
#[cfg(test)]
mod check_tests;
mod counters;
#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod damage_tests;
mod epochs;
#[cfg(test)]
pub(crate) mod fake_block;
#[cfg(test)]
pub(crate) mod fake_disk;
mod fields;
pub(crate) mod file;
mod geometry;
mod index;
mod io;
#[cfg(test)]
mod io_tests;
mod member;
mod open;
mod options;
pub(crate) mod peek;
mod queue;
mod reader;
mod record;
mod recover;
pub mod store;
#[cfg(test)]
mod store_tests;
mod summary;
mod superblock;
mod threads;
mod uring;
mod writer;

pub use buffer::Buffer;
pub use counters::Counters;
pub use epochs::Fingerprint;
pub use file::{SSD_LAYOUT_VERSION, cache_path};
pub use geometry::Geometry;
pub use index::IndexView;
pub(crate) use index::IndexWatch;
pub use io::{Completion, Direction, Io, Operation};
pub use options::{Backend, StoreOptions};
pub use reader::{ReadOutcome, ReadStart, ReadTarget};
pub use record::RecordId;
pub use recover::Progress;
pub use store::{Event, Store, Ticket};
pub use writer::{Record, WriteStart};
