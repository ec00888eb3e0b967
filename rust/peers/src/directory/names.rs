//! What things are called in the store, and how they are written down. `docs/directory.md` has the table.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::limits::DIRECTORY_RECORD_BYTES_MAX;

/// Bytes of a block's tag in its bucket.
pub(super) const TAG_BYTES: usize = 6;
/// Tag and owner.
pub(super) const MEMBER_BYTES: usize = TAG_BYTES + 4;
const TAG_BITS: u32 = 8 * TAG_BYTES as u32;

/// How many buckets there are: two to this power. Who has blocks decides, and more are made as more blocks come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout(u32);

impl Layout {
    const BITS_MIN: u32 = 12;
    const BITS_MAX: u32 = 30;
    /// Entries of a bucket that are aimed at when the number of blocks is known.
    const ENTRIES: u64 = 48;
    /// How much finer the next layout is: seldom, since everything is registered anew then.
    const STEP: u32 = 3;

    /// For so many entries.
    pub(super) fn for_entries(entries: u64) -> Self {
        let buckets = (entries / Self::ENTRIES).max(1).next_power_of_two();
        Self(buckets.trailing_zeros().clamp(Self::BITS_MIN, Self::BITS_MAX))
    }

    /// As written down; `None` if that is no layout.
    pub(super) fn parse(text: &[u8]) -> Option<Self> {
        let bits = std::str::from_utf8(text).ok()?.parse().ok()?;
        (Self::BITS_MIN..=Self::BITS_MAX).contains(&bits).then_some(Self(bits))
    }

    pub(super) fn text(self) -> String {
        self.0.to_string()
    }

    /// The next finer one, if there is one.
    pub(super) fn finer(self) -> Option<Self> {
        (self.0 + Self::STEP <= Self::BITS_MAX).then_some(Self(self.0 + Self::STEP))
    }

    /// Number of the bucket of a block.
    fn bucket(self, hash: u64) -> u64 {
        hash >> (u64::BITS - self.0)
    }

    /// Key of the bucket of a block.
    pub(super) fn bucket_key(self, hash: u64) -> String {
        format!("pega1:{}:{:x}", self.0, self.bucket(hash))
    }

    /// Of a hash, what bucket and tag say of it.
    pub(super) fn visible(self, hash: u64) -> u64 {
        hash & (!0 << (u64::BITS - self.0) | ((1 << TAG_BITS) - 1))
    }

    /// What a member of the bucket of `hash` says of the hash of its block, and whose it is; `None` if it is no member.
    pub(super) fn read_member(self, hash: u64, member: &[u8]) -> Option<(u64, u32)> {
        let member: &[u8; MEMBER_BYTES] = member.try_into().ok()?;
        let mut tag = [0; 8];
        tag[8 - TAG_BYTES..].copy_from_slice(&member[..TAG_BYTES]);
        let (high_mask, tag) = (!0 << (u64::BITS - self.0), u64::from_be_bytes(tag));
        // The bits that bucket and tag both hold must be the same, or no owner wrote this.
        let both = high_mask & ((1 << TAG_BITS) - 1);
        ((tag ^ hash) & both == 0).then_some((hash & high_mask | tag, owner_of(hash & high_mask | tag, member)?))
    }
}

/// Hash of what all blocks of a namespace have in common.
pub fn namespace_seed(fingerprint: &[u8; 32], group: u32) -> u64 {
    let mut bytes = [0; 36];
    bytes[..32].copy_from_slice(fingerprint);
    bytes[32..].copy_from_slice(&group.to_le_bytes());
    xxh3_64(&bytes)
}

/// What a block is called here. Never 0. Two blocks of the same hash cost a question to a peer that has not what is
/// asked for; peers compare whole names.
pub fn block_hash(seed: u64, key: &[u8]) -> u64 {
    xxh3_64_with_seed(key, seed).max(1)
}

/// What an owner writes into the bucket of a block.
pub(super) fn member(hash: u64, owner: u32) -> [u8; MEMBER_BYTES] {
    let mut bytes = [0; MEMBER_BYTES];
    bytes[..TAG_BYTES].copy_from_slice(&hash.to_be_bytes()[8 - TAG_BYTES..]);
    bytes[TAG_BYTES..].copy_from_slice(&(owner ^ veil_of(hash)).to_be_bytes());
    bytes
}

/// Owner that a member of the block of `hash` names.
pub(super) fn owner_of(hash: u64, member: &[u8]) -> Option<u32> {
    let bytes = member.get(TAG_BYTES..MEMBER_BYTES).filter(|_| member.len() == MEMBER_BYTES)?;
    Some(u32::from_be_bytes(bytes.try_into().ok()?) ^ veil_of(hash))
}

/// Each block has its owners in another order: who asks gets the first few, and if a thousand hosts have a block, it
/// must not always be the same ones that serve it. A function of the tag alone.
fn veil_of(hash: u64) -> u32 {
    ((hash & ((1 << TAG_BITS) - 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32
}

/// Bounds of all members of a block, as ZRANGEBYLEX takes them.
pub(super) fn member_range(hash: u64) -> [[u8; 1 + MEMBER_BYTES]; 2] {
    [0, u8::MAX].map(|owner| {
        let mut bound = [owner; 1 + MEMBER_BYTES];
        bound[0] = b'[';
        bound[1..=TAG_BYTES].copy_from_slice(&member(hash, 0)[..TAG_BYTES]);
        bound
    })
}

/// Number of a pool. It is not handed out but follows from the pool, so that it is the same after any restart and loss;
/// who finds it taken by another pool makes another attempt.
pub(super) fn owner_number(pool_id: u64, attempt: u64) -> u32 {
    xxh3_64_with_seed(&pool_id.to_le_bytes(), attempt) as u32
}

/// Who an owner is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnerRecord {
    pub(super) pool_id: u64,
    pub(super) address: String,
}

impl OwnerRecord {
    pub(super) fn key(number: u32) -> String {
        format!("pega1:o:{}", number_text(number))
    }

    pub(super) fn text(&self) -> String {
        format!("{:016x} {}", self.pool_id, self.address)
    }

    /// As written down; `None` if nobody writes that.
    pub(super) fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok().filter(|text| text.len() <= DIRECTORY_RECORD_BYTES_MAX)?;
        let (pool_id, address) = text.split_once(' ')?;
        let pool_id = u64::from_str_radix(pool_id, 16).ok()?;
        is_address(address).then(|| Self { pool_id, address: address.to_owned() })
    }
}

/// Whether it looks like HOST:PORT.
pub(super) fn is_address(address: &str) -> bool {
    let whole = address.len() <= DIRECTORY_RECORD_BYTES_MAX / 2 && address.bytes().all(|byte| byte.is_ascii_graphic());
    let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    whole && port.is_some_and(|(_, port)| port.parse::<u16>().is_ok_and(|port| port != 0))
}

/// Set of the numbers of all owners, dead ones among them for a while.
pub(super) const OWNERS: &str = "pega1:owners";

/// How a number is written there.
pub(super) fn number_text(number: u32) -> String {
    format!("{number:08x}")
}

/// The number that a member of the set is.
pub(super) fn number_in(value: &redis::Value) -> Option<u32> {
    match value {
        redis::Value::BulkString(text) => u32::from_str_radix(std::str::from_utf8(text).ok()?, 16).ok(),
        _ => None,
    }
}

/// The numbers in an answer.
pub(super) fn numbers_in(value: &redis::Value) -> Vec<u32> {
    match value {
        redis::Value::Array(members) => members.iter().filter_map(number_in).collect(),
        _ => Vec::new(),
    }
}

/// Key under which the layout is written down.
pub(super) const LAYOUT: &str = "pega1:layout";

/// Key of which a node of the store must still have what was written there: the first of this name that is on the node.
pub(super) fn mark_key(is_there: impl Fn(&str) -> bool) -> Option<String> {
    (0..1u32 << 20).map(|number| format!("pega1:mark:{number}")).find(|key| is_there(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_and_tags_give_back_what_is_visible_of_a_hash() {
        for layout in [Layout::for_entries(0), Layout::for_entries(1 << 22), Layout::for_entries(u64::MAX)] {
            for hash in [1, u64::MAX, 0x0123_4567_89AB_CDEF, 0xFEDC_BA98_7654_3210, 1 << 40] {
                let member = member(hash, 77);
                assert_eq!(layout.read_member(hash, &member), Some((layout.visible(hash), 77)));
                let [low, high] = member_range(hash);
                assert!(low[1..] <= member[..] && member[..] <= high[1..]);
                assert_ne!(layout.visible(hash ^ 1), layout.visible(hash));
            }
        }
    }

    #[test]
    fn members_that_nobody_writes_are_none() {
        let layout = Layout::for_entries(u64::MAX);
        for bytes in [&b""[..], b"short", b"this one is too long"] {
            assert_eq!(layout.read_member(5, bytes), None);
            assert_eq!(owner_of(5, bytes), None);
        }
        assert_eq!(layout.read_member(u64::MAX, &member(0, 1)), None, "a tag of another bucket");
    }

    #[test]
    fn layouts_grow_with_the_entries_within_bounds() {
        assert_eq!(Layout::for_entries(0).text(), "12");
        assert_eq!(Layout::for_entries(1_000_000).text(), "15");
        assert_eq!(Layout::for_entries(u64::MAX).text(), "30");
        assert_eq!(Layout::for_entries(0).finer(), Layout::parse(b"15"));
        assert_eq!(Layout::for_entries(u64::MAX).finer(), None);
        for text in [&b"11"[..], b"31", b"", b"-1", b"\xff", b"12 "] {
            assert_eq!(Layout::parse(text), None);
        }
    }

    #[test]
    fn records_survive_being_written_and_garbage_is_none() {
        let record = OwnerRecord { pool_id: 0xFEED, address: "10.0.0.7:7400".into() };
        assert_eq!(OwnerRecord::parse(record.text().as_bytes()), Some(record));
        let long = format!("1 {}:1", "h".repeat(2000));
        for text in ["", "1", "x 10.0.0.7:1", "1 10.0.0.7", "1 10.0.0.7:0", "1 :7", "1 a b:7", "1 a\n:7", &long] {
            assert_eq!(OwnerRecord::parse(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn blocks_of_other_groups_have_other_hashes() {
        let hash = |fingerprint, group, key: &[u8]| block_hash(namespace_seed(&[fingerprint; 32], group), key);
        let hashes = [hash(1, 0, b"k"), hash(1, 1, b"k"), hash(2, 0, b"k"), hash(1, 0, b"k\0")];
        for (position, hash) in hashes.iter().enumerate() {
            assert_eq!(hashes.iter().position(|other| other == hash), Some(position));
        }
    }

    #[test]
    fn every_node_of_a_store_has_a_key_for_its_mark() {
        assert_eq!(mark_key(|_| true).as_deref(), Some("pega1:mark:0"));
        assert!(mark_key(|key| super::super::slots::slot_of(key.as_bytes()) < 16).is_some());
        assert_eq!(mark_key(|_| false), None);
    }
}
