//! Values of an object store that prove themselves, as the blocks of `blocks.rs` do.

use std::path::Path;

use pegaflow_engine::ErrorKind;
use pegaflow_engine::objects::{ObjectStore, ObjectStoreOptions};

use super::blocks::POOL_NAME;
use super::random::mix;

const HEAD_BYTES: usize = 24;

/// A store in the pool of the run, which is there already.
pub fn open_store(shm_dir: &Path) -> ObjectStore {
    let options = ObjectStoreOptions { shm_dir: shm_dir.to_owned(), evict: true, ..ObjectStoreOptions::default() };
    loop {
        match ObjectStore::open(Some(POOL_NAME), &options) {
            Ok(store) => return store,
            // A sibling is stopped with the lock over namespaces.
            Err(error) => assert_eq!(error.kind(), ErrorKind::Busy, "{error}"),
        }
    }
}

pub fn name(number: u64) -> String {
    format!("value {number}")
}

/// Bytes of a value: its number, its nonce, its length, and what follows from them; of a short one, what fits.
pub fn content(number: u64, nonce: u64, bytes: usize) -> Vec<u8> {
    let head = [number, nonce, bytes as u64];
    let rest = (0..).map(|position| mix(number ^ mix(nonce.wrapping_add(position))));
    let mut value: Vec<u8> = head.into_iter().chain(rest).flat_map(u64::to_le_bytes).take(bytes).collect();
    if bytes < HEAD_BYTES {
        value.iter_mut().for_each(|byte| *byte = number as u8);
    }
    value
}

/// What is wrong with the value of `number`, if anything is.
pub fn wrong_value(number: u64, value: &[u8]) -> Option<String> {
    let nonce = value.get(8..16).map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().unwrap()));
    (value != content(number, nonce, value.len())).then(|| format!("value {number} of {} bytes", value.len()))
}

/// Nobody else uses the pool: every value that it names is there and right; afterwards there is none.
pub fn assert_values_right_and_remove(store: &ObjectStore) {
    let keys = store.keys().unwrap();
    assert_eq!(store.count().unwrap(), keys.len());
    for key in keys {
        let number = key.strip_prefix("value ").unwrap().parse().unwrap();
        let value = store.remove(&key).unwrap().unwrap_or_else(|| panic!("{key} is named and not there"));
        assert_eq!(wrong_value(number, &value.to_vec().unwrap()), None);
    }
    assert_eq!(store.keys().unwrap(), [""; 0]);
}
