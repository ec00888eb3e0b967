//! The engine of PegaFlow: a crash-proof pool of blocks in POSIX shared memory, used in process.
//!
//! No Python, no CUDA. `docs/shm-format.md` has the bytes, `docs/crash-model.md` what each death leaves behind.

pub mod checksum;
pub mod error;
pub mod hash;
pub mod key;
pub mod slot_space;

pub use error::{Error, ErrorKind, Result};
pub use key::{BlockRef, Key};
