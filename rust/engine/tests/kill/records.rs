//! Records of an SSD cache whose bytes follow from their number, for processes that write, die and read again.

use std::path::Path;

use pegaflow_engine::Key;
use pegaflow_engine::ssd::{Backend, ReadTarget, RecordId, Store, StoreOptions};

use super::random::Random;

pub const CHUNK_BYTES: usize = 64 << 10;
pub const DEPTH: u16 = 4;

/// Takes what is read.
pub struct Target(pub Vec<u8>);

impl ReadTarget for Target {
    fn put(&mut self, _part: usize, offset: usize, bytes: &[u8]) {
        self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

pub fn record_id(number: u64) -> RecordId {
    RecordId { fingerprint: [3; 32], group: 1, key: Key::new(&number.to_le_bytes()).unwrap() }
}

/// 10 to 40 KB.
pub fn record_bytes(number: u64) -> Vec<u8> {
    let mut random = Random::new(number);
    (0..(10_000 + random.below(30_000)) / 8).flat_map(|_| random.next().to_le_bytes()).collect()
}

/// The store in `dir`, recovered; by `uring` as far as there is io_uring, else by threads.
pub fn open_store(dir: &Path, backend: &str) -> Store<Target> {
    let mut store = Store::open(StoreOptions {
        directories: vec![dir.to_owned()],
        capacity_bytes: Some(192 << 20),
        chunk_bytes: CHUNK_BYTES,
        read_depth: DEPTH,
        write_depth: DEPTH,
        backend: if backend == "uring" { Backend::Auto } else { Backend::Threads },
        ..StoreOptions::default()
    })
    .unwrap();
    store.recover();
    store
}
