//! Blocks that prove themselves: every part carries its key, its part number, and a checksum over all its bytes.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pegaflow_engine::checksum::part_checksum;
use pegaflow_engine::{BlockRef, ErrorKind, Key, Namespace, OpenOptions, Pool};

use super::patience::PATIENCE;
use super::random::mix;

pub const PART_BYTES: [u64; 2] = [512, 1024];
pub const SEGMENT_BYTES: u64 = 64 << 10;
/// Two segments per extent of 64 slots: 256 slots in all.
pub const POOL_BYTES: u64 = 8 * SEGMENT_BYTES;
pub const POOL_NAME: &str = "p";
pub const MAIN: u8 = 9;
/// Number of a key that several processes of one test want to store.
pub const CONTESTED: u64 = 1 << 43;

/// Options of the pool that all processes of a test share.
pub fn options(shm_dir: &Path) -> OpenOptions {
    OpenOptions {
        shm_dir: shm_dir.to_owned(),
        pool_bytes: Some(POOL_BYTES),
        segment_bytes: Some(SEGMENT_BYTES),
        ..OpenOptions::default()
    }
}

pub fn open(shm_dir: &Path) -> Arc<Pool> {
    Pool::open(POOL_NAME, &options(shm_dir)).unwrap()
}

/// As [`open`], for a process whose new blocks go in the order in which they came.
pub fn open_lru(shm_dir: &Path) -> Arc<Pool> {
    let options = OpenOptions { policy: Some("lru".into()), ..options(shm_dir) };
    Pool::open(POOL_NAME, &options).unwrap()
}

/// The namespace whose fingerprint consists of `byte`.
pub fn namespace(pool: &Pool, byte: u8) -> Namespace {
    let started = Instant::now();
    loop {
        match pool.namespace(&[byte; 32], 0, &PART_BYTES, "kill tests") {
            Ok(ns) => return ns,
            // Who holds the lock has no CPU just now.
            Err(error) if error.kind() == ErrorKind::Busy && started.elapsed() < PATIENCE => {}
            Err(error) => panic!("{error}"),
        }
    }
}

pub fn key(number: u64) -> Key {
    let mut bytes = [0u8; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..16].copy_from_slice(&mix(number).to_le_bytes());
    Key::new(&bytes).unwrap()
}

pub fn keys(numbers: std::ops::Range<u64>) -> Vec<Key> {
    numbers.map(key).collect()
}

fn words_of(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.chunks_exact(8).map(|chunk| u64::from_le_bytes(chunk.try_into().unwrap()))
}

fn sum_of(key: &Key, part: u32, words: impl Iterator<Item = u64>) -> u64 {
    words.fold(mix(hash_of(key) ^ u64::from(part)), |sum, word| (sum ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

fn hash_of(key: &Key) -> u64 {
    words_of(&key.to_bytes()).fold(7, |hash, word| mix(hash ^ word))
}

/// Bytes of one part: `nonce` (different for every store of a key), key, part, filler, checksum.
pub fn content(key: &Key, part: u32, nonce: u64, bytes: usize) -> Vec<u8> {
    let mut words = Vec::with_capacity(bytes / 8);
    words.extend([nonce, hash_of(key), u64::from(part)]);
    while words.len() < bytes / 8 - 1 {
        words.push(mix(nonce.wrapping_add(words.len() as u64)));
    }
    words.push(sum_of(key, part, words.iter().copied()));
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// What is wrong with the bytes of a part, if anything is.
pub fn wrong(key: &Key, part: u32, bytes: &[u8]) -> Option<String> {
    let words: Vec<u64> = words_of(bytes).collect();
    let (sum, rest) = words.split_last()?;
    if words[1] != hash_of(key) || words[2] != u64::from(part) {
        return Some(format!("part {part} holds part {} of another block ({:#x})", words[2], words[1]));
    }
    if *sum != sum_of(key, part, rest.iter().copied()) {
        return Some(format!("part {part} has bytes that do not match their checksum"));
    }
    None
}

/// A fingerprint that nobody else has.
pub fn fingerprint_of(seed: u64) -> [u8; 32] {
    let words: Vec<u8> = (0..4).flat_map(|word| mix(seed ^ word << 60).to_le_bytes()).collect();
    words.try_into().unwrap()
}

/// Bytes of a value of several slots: `nonce`, then what follows from it and from the name of the value.
pub fn value_of(name: &str, nonce: u64) -> Vec<u8> {
    let seed = name.bytes().fold(nonce, |seed, byte| mix(seed ^ u64::from(byte)));
    let words = (0..150).map(|word| mix(seed ^ word << 32));
    std::iter::once(nonce).chain(words).flat_map(u64::to_le_bytes).collect()
}

/// Whether these are the bytes of a value of that name, whole.
pub fn is_value_of(name: &str, bytes: &[u8]) -> bool {
    words_of(bytes).next().is_some_and(|nonce| value_of(name, nonce) == bytes)
}

/// Write both parts of a reserved block of [`PART_BYTES`] and mark them. `false` if the block is gone.
pub fn fill(pool: &Pool, block: BlockRef, key: &Key, nonce: u64) -> bool {
    fill_parts(pool, block, key, nonce, PART_BYTES.len())
}

/// Write all parts of a reserved block and mark them. `false` if the block is gone.
pub fn fill_parts(pool: &Pool, block: BlockRef, key: &Key, nonce: u64, parts: usize) -> bool {
    let space = pool.space();
    (0..parts as u32).all(|part| {
        let Some(target) = space.write_target(block, part) else { return false };
        let bytes = content(key, part, nonce, target.bytes);
        // SAFETY: reserved by this process, so nobody else touches it; address and length come from the pool.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.address, bytes.len()) };
        space.mark_part(block, part, Some(part_checksum(part, &bytes)))
    })
}

/// What is wrong with a leased block of [`PART_BYTES`], if anything is.
pub fn wrong_block(pool: &Pool, block: BlockRef, key: &Key) -> Option<String> {
    nonce_of(pool, block, key, PART_BYTES.len()).err()
}

/// The nonce with which a leased block was stored, or what is wrong with its bytes.
pub fn nonce_of(pool: &Pool, block: BlockRef, key: &Key, parts: usize) -> Result<u64, String> {
    let space = pool.space();
    let mut nonces = Vec::new();
    for part in 0..parts as u32 {
        let Some(source) = space.read_source(block, part) else {
            return Err(format!("leased block {:#x} has no readable part {part}", block.0));
        };
        // SAFETY: leased by this process, so the bytes stay; address and length come from the pool.
        let bytes = unsafe { std::slice::from_raw_parts(source.address, source.bytes) };
        if let Some(what) = wrong(key, part, bytes) {
            return Err(format!("block {:#x}: {what}", block.0));
        }
        nonces.push(u64::from_le_bytes(bytes[..8].try_into().unwrap()));
    }
    if nonces.iter().any(|nonce| *nonce != nonces[0]) {
        return Err(format!("block {:#x} has parts of several stores", block.0));
    }
    Ok(nonces[0])
}

/// Parts of a block of `ns`.
pub fn parts_of(pool: &Pool, ns: Namespace) -> usize {
    pool.namespace_info(ns).unwrap().part_bytes.len()
}

/// Store what is absent of a chain of keys; what finds no slot is left out. Returns how many became visible.
pub fn store_chain(pool: &Pool, ns: Namespace, chain: &[Key], nonce: u64) -> usize {
    let parts = parts_of(pool, ns);
    let reserved = pool.reserve(ns, chain, None, true).unwrap();
    let blocks: Vec<BlockRef> = reserved.iter().map(|(_, block)| *block).collect();
    for (position, block) in &reserved {
        assert!(
            fill_parts(pool, *block, &chain[*position], nonce, parts),
            "a reserved block is there until it is published"
        );
    }
    pool.publish(&blocks).unwrap()
}

/// Store single blocks without parents until all are there, waiting while the pool grows.
pub fn store_all(pool: &Pool, ns: Namespace, keys: &[Key], nonce: u64) {
    let started = Instant::now();
    for key in keys {
        while store_chain(pool, ns, &[*key], nonce) == 0 && !pool.contains(ns, &[*key]).unwrap()[0] {
            assert!(started.elapsed() < PATIENCE, "a block cannot be stored: {:?}", pool.last_grow_error());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Lease, check and release the longest present prefix. Returns its length.
pub fn check_chain(pool: &Pool, ns: Namespace, chain: &[Key]) -> usize {
    let parts = parts_of(pool, ns);
    let leased = pool.lease(ns, chain, 0, chain.len()).unwrap();
    for (block, key) in leased.iter().zip(chain) {
        if let Err(what) = nonce_of(pool, *block, key, parts) {
            panic!("wrong bytes: {what}");
        }
    }
    pool.release(&leased).unwrap();
    leased.len()
}
