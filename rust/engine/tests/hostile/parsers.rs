//! Everything that is decoded without a pool: keys, block hashes with their extra keys, names.

use pegaflow_engine::hash::{ExtraKey, HashAlgorithm, block_hash};
use pegaflow_engine::{Key, OpenOptions, Pool};

use super::bytes::Bytes;

const DEPTH_MAX: usize = 8;

pub fn run(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    match bytes.byte() % 3 {
        0 => key(bytes.take(usize::MAX)),
        1 => hash(&mut bytes),
        _ => name(&String::from_utf8_lossy(bytes.take(usize::MAX))),
    }
}

fn key(bytes: &[u8]) {
    match Key::new(bytes) {
        Ok(key) => assert_eq!(key.to_bytes(), bytes),
        Err(_) => assert!(bytes.is_empty() || bytes.len() > 32),
    }
}

fn hash(bytes: &mut Bytes<'_>) {
    let algorithm = if bytes.flag() { HashAlgorithm::Sha256Cbor } else { HashAlgorithm::XxhashCbor };
    let length = bytes.below(40);
    let parent = bytes.take(length);
    let tokens: Vec<u64> = (0..bytes.below(20)).map(|_| bytes.word()).collect();
    let extra: Option<Vec<ExtraKey>> = bytes.flag().then(|| (0..bytes.below(5)).map(|_| extra_key(bytes, 0)).collect());
    let once = block_hash(algorithm, parent, &tokens, extra.as_deref());
    if let Ok(hash) = &once {
        assert_eq!(hash.len(), if algorithm == HashAlgorithm::Sha256Cbor { 32 } else { 16 });
        let more: Vec<u64> = tokens.iter().copied().chain([1]).collect();
        assert_ne!(block_hash(algorithm, parent, &more, extra.as_deref()).unwrap(), *hash);
    }
}

fn extra_key(bytes: &mut Bytes<'_>, depth: usize) -> ExtraKey {
    match bytes.byte() % 6 {
        0 => ExtraKey::None,
        1 => ExtraKey::Bool(bytes.flag()),
        2 => ExtraKey::Int(i128::from(bytes.word() as i64) << (bytes.byte() % 65)),
        3 => ExtraKey::Text(String::from_utf8_lossy(bytes.take(9)).into_owned()),
        5 if depth < DEPTH_MAX => ExtraKey::Tuple((0..bytes.below(4)).map(|_| extra_key(bytes, depth + 1)).collect()),
        _ => ExtraKey::Bytes(bytes.take(9).to_vec()),
    }
}

/// Names come from users; none leads out of the directory.
fn name(name: &str) {
    let options = OpenOptions { create: false, shm_dir: "/dev/shm/pega-test-nothing".into(), ..OpenOptions::default() };
    assert!(Pool::open(name, &options).is_err());
    assert!(HashAlgorithm::from_name(name).is_ok() == ["sha256_cbor", "xxhash_cbor"].contains(&name));
}
