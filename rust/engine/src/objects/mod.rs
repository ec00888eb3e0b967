//! Values by name on the pool: the engine of `PegaEngine`. `docs/objects.md` has the format.
//!
//! `store` is the face; `put` writes, `find` looks, `value` is what a reader holds, `scan` goes over all; `room` and
//! `evict` find slots; `classes` and `record` are the format, `bytes` moves it.

mod bytes;
mod classes;
mod evict;
mod find;
mod patience;
mod put;
mod record;
mod room;
mod scan;
mod store;
mod value;

pub use record::ValueKind;
pub use store::{ObjectStore, ObjectStoreOptions};
pub use value::Value;
