//! Chains of keys of the model tests: those of one group begin alike.

use pegaflow_engine::Key;

use super::blocks::key;

const GROUP: u64 = 4;
const SHARED_LENGTH: u64 = 4;

/// Keys of chain `number`, `length` blocks long.
pub fn chain(number: u64, length: u64) -> Vec<Key> {
    let name = |position| if position < SHARED_LENGTH { 1_000_000 + number / GROUP * 100 } else { number * 100 };
    (0..length).map(|position| key(name(position) + position)).collect()
}
