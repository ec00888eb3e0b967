//! vLLM's block hashes that can be computed outside of Python: a digest over canonical CBOR (RFC 8949, section 4.2).
//!
//! A block is the array of its parent's hash, its tokens and its extra keys. vLLM's other two algorithms pickle the
//! same triple; those are refused by name.

use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_128;

use crate::error::{Error, Result};

/// Digest of a block hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashAlgorithm {
    /// xxh3-128, 16 bytes, big-endian.
    XxhashCbor,
    /// SHA-256, 32 bytes.
    Sha256Cbor,
}

/// What a block's hash depends on beside its tokens: LoRA, cache salt, images, prompt embeddings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// Python's `None`.
    None,
    /// Python's `bool`.
    Bool(bool),
    /// Python's `int` from `-2**64` to `2**64 - 1`; those beyond are refused.
    Int(i128),
    /// Python's `str`.
    Text(String),
    /// Python's `bytes`.
    Bytes(Vec<u8>),
    /// Python's `tuple` (or `list`).
    Tuple(Vec<ExtraKey>),
}

impl HashAlgorithm {
    /// The algorithm that vLLM calls `name`.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "xxhash_cbor" => Ok(Self::XxhashCbor),
            "sha256_cbor" => Ok(Self::Sha256Cbor),
            _ => Err(Error::invalid(format!(
                "hash algorithm {name:?} cannot be computed natively: use xxhash_cbor or sha256_cbor"
            ))),
        }
    }

    fn digest(self, bytes: &[u8]) -> Vec<u8> {
        match self {
            Self::XxhashCbor => xxh3_128(bytes).to_be_bytes().to_vec(),
            Self::Sha256Cbor => Sha256::digest(bytes).to_vec(),
        }
    }
}

/// Hash of a block: 16 or 32 bytes. `parent`: hash of the block before it, or vLLM's live `NONE_HASH`.
pub fn block_hash(
    algorithm: HashAlgorithm,
    parent: &[u8],
    tokens: &[u64],
    extra_keys: Option<&[ExtraKey]>,
) -> Result<Vec<u8>> {
    Ok(algorithm.digest(&encode_block(parent, tokens, extra_keys)?))
}

fn encode_block(parent: &[u8], tokens: &[u64], extra_keys: Option<&[ExtraKey]>) -> Result<Vec<u8>> {
    let mut cbor = Vec::with_capacity(parent.len() + 5 * tokens.len() + 32);
    head(&mut cbor, Major::Array, 3);
    string(&mut cbor, Major::Bytes, parent);
    head(&mut cbor, Major::Array, tokens.len() as u64);
    tokens.iter().for_each(|&token| head(&mut cbor, Major::Unsigned, token));
    match extra_keys {
        None => cbor.push(NULL),
        Some(keys) => array(&mut cbor, keys)?,
    }
    Ok(cbor)
}

#[derive(Clone, Copy)]
enum Major {
    Unsigned = 0,
    Negative = 1,
    Bytes = 2,
    Text = 3,
    Array = 4,
}

const FALSE: u8 = 0xf4;
const TRUE: u8 = 0xf5;
const NULL: u8 = 0xf6;

/// Type and argument in the shortest form, which is what makes the encoding canonical.
fn head(cbor: &mut Vec<u8>, major: Major, argument: u64) {
    let major = (major as u8) << 5;
    let bytes = argument.to_be_bytes();
    match argument {
        0..=23 => cbor.push(major | bytes[7]),
        24..=0xff => cbor.extend_from_slice(&[major | 24, bytes[7]]),
        0x100..=0xffff => {
            cbor.push(major | 25);
            cbor.extend_from_slice(&bytes[6..]);
        }
        0x1_0000..=0xffff_ffff => {
            cbor.push(major | 26);
            cbor.extend_from_slice(&bytes[4..]);
        }
        _ => {
            cbor.push(major | 27);
            cbor.extend_from_slice(&bytes);
        }
    }
}

fn string(cbor: &mut Vec<u8>, major: Major, bytes: &[u8]) {
    head(cbor, major, bytes.len() as u64);
    cbor.extend_from_slice(bytes);
}

fn array(cbor: &mut Vec<u8>, items: &[ExtraKey]) -> Result<()> {
    head(cbor, Major::Array, items.len() as u64);
    items.iter().try_for_each(|item| value(cbor, item))
}

fn value(cbor: &mut Vec<u8>, item: &ExtraKey) -> Result<()> {
    match item {
        ExtraKey::None => cbor.push(NULL),
        ExtraKey::Bool(flag) => cbor.push(if *flag { TRUE } else { FALSE }),
        ExtraKey::Int(number) => int(cbor, *number)?,
        ExtraKey::Text(text) => string(cbor, Major::Text, text.as_bytes()),
        ExtraKey::Bytes(bytes) => string(cbor, Major::Bytes, bytes),
        ExtraKey::Tuple(items) => array(cbor, items)?,
    }
    Ok(())
}

fn int(cbor: &mut Vec<u8>, number: i128) -> Result<()> {
    let (major, argument) = if number < 0 { (Major::Negative, -1 - number) } else { (Major::Unsigned, number) };
    let argument = u64::try_from(argument)
        .map_err(|_| Error::invalid(format!("extra key {number} does not fit 64 bits: hash this block in Python")))?;
    head(cbor, major, argument);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn unhex(text: &str) -> Vec<u8> {
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
    }

    fn text(value: &str) -> ExtraKey {
        ExtraKey::Text(value.into())
    }

    /// Hashes of a chain, each block the child of the one before.
    fn chain(algorithm: HashAlgorithm, root: &str, blocks: &[&[u64]]) -> Vec<String> {
        let mut parent = unhex(root);
        let mut hashes = Vec::new();
        for tokens in blocks {
            parent = block_hash(algorithm, &parent, tokens, None).unwrap();
            hashes.push(hex(&parent));
        }
        hashes
    }

    fn numbers(range: std::ops::Range<u64>) -> Vec<u64> {
        range.collect()
    }

    const NONE_XXHASH: &str = "1ebe36576dcb573f26b99533a20aaeca";
    const NONE_SHA256: &str = "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e";

    // The expected values are vLLM's own, computed by it for PYTHONHASHSEED=0 or 42.

    #[test]
    fn xxhash_chain_equals_that_of_vllm() {
        let blocks = [numbers(0..16), numbers(16..32), numbers(32..37)];
        let hashes = chain(HashAlgorithm::XxhashCbor, NONE_XXHASH, &[&blocks[0], &blocks[1], &blocks[2]]);
        assert_eq!(
            hashes,
            [
                "209f5d549fc07c8e39d823615ede61ce",
                "03888914ee75b87e89df867a21beb72b",
                "bb1136747cf30f228e58f3fc25205f1e"
            ]
        );
        let other_seed =
            chain(HashAlgorithm::XxhashCbor, "a9d2e63407fce1a26c9dc9d7fa2d7caf", &[&[1, 2, 300, 70000], &[5, 6]]);
        assert_eq!(other_seed, ["1f4fdc1a907013a9097472d1e95c9c5c", "719614804dd10cb242e024165bed0b81"]);
    }

    #[test]
    fn sha256_chain_equals_that_of_vllm() {
        let blocks = [numbers(0..16), numbers(16..32), numbers(32..37)];
        let hashes = chain(HashAlgorithm::Sha256Cbor, NONE_SHA256, &[&blocks[0], &blocks[1], &blocks[2]]);
        assert_eq!(
            hashes,
            [
                "d830de3d42c00f25a2949b5d12d98642664a44872c1614c5b0147556276afc9c",
                "fedd9e4abebebbe6f6cf96b682f08d316063fe2f22a5c552192dd62904fcccac",
                "5434400f3a25cc501ee4e7810bac3d3ea43224a4ea470e34bd8c7bc10710bf6c"
            ]
        );
    }

    #[test]
    fn extra_keys_equal_those_of_both_vllm_generations() {
        let tokens = numbers(0..16);
        let root = unhex(NONE_XXHASH);
        let hash = |keys: &[ExtraKey]| hex(&block_hash(HashAlgorithm::XxhashCbor, &root, &tokens, Some(keys)).unwrap());
        let tagged = [
            ExtraKey::Tuple(vec![text("lora"), text("ad"), text("/p")]),
            ExtraKey::Tuple(vec![text("cache_salt"), text("s")]),
        ];
        assert_eq!(hash(&tagged), "edf8b7f0131e6a5693f8f2396cecccdb");
        assert_eq!(hash(&[text("ad"), text("s")]), "d8dbd89b743a506cc59649f1da7a864f");
    }

    #[test]
    fn integers_and_strings_take_the_shortest_form() {
        let block = encode_block(&[], &[151_643, 255, 256, 65_535, 65_536, 1 << 32], None).unwrap();
        assert_eq!(hex(&block), "8340861a0002505b18ff19010019ffff1a000100001b0000000100000000f6");
        let mut keys = Vec::new();
        let items = [
            ExtraKey::Tuple(vec![text("lora"), text("ad"), text("/p")]),
            ExtraKey::Tuple(vec![text("mm"), text("idA"), ExtraKey::Int(-3)]),
            ExtraKey::Tuple(vec![text("cache_salt"), text("s")]),
            ExtraKey::Tuple(vec![text("prompt_embeds"), ExtraKey::Bytes(vec![1; 4])]),
        ];
        array(&mut keys, &items).unwrap();
        assert_eq!(
            hex(&keys),
            "8483646c6f7261626164622f7083626d6d6369644122826a63616368655f73616c746173826d70726f6d70745f656d62656473\
             4401010101"
        );
    }

    #[test]
    fn integers_beyond_64_bits_are_refused() {
        let edge = [ExtraKey::Int(-(1 << 64)), ExtraKey::Int((1 << 64) - 1), ExtraKey::Bool(true), ExtraKey::None];
        let mut cbor = Vec::new();
        array(&mut cbor, &edge).unwrap();
        assert_eq!(hex(&cbor), "843bffffffffffffffff1bfffffffffffffffff5f6");
        for number in [-(1 << 64) - 1, 1 << 64, i128::MIN, i128::MAX] {
            let keys = [ExtraKey::Int(number)];
            assert!(block_hash(HashAlgorithm::XxhashCbor, &[], &[], Some(&keys)).is_err(), "{number}");
        }
    }

    #[test]
    fn pickled_algorithms_are_refused_by_name() {
        assert_eq!(HashAlgorithm::from_name("sha256_cbor").unwrap(), HashAlgorithm::Sha256Cbor);
        let error = HashAlgorithm::from_name("sha256").unwrap_err();
        assert!(error.to_string().contains("sha256_cbor"), "{error}");
    }
}
