//! Messages of the protocol from and to what the engine has, checked.

use pegaflow_engine::{Key, limits::PARTS_MAX};
use prost::Message;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::proto::{LeaseReply, NamespaceName, Question, RegionsReply};

/// Fingerprint, group and part sizes, if they can be those of a namespace.
pub(crate) fn name_of(name: Option<&NamespaceName>) -> Option<([u8; 32], u32, &[u64])> {
    let name = name.filter(|name| !name.part_bytes.is_empty() && name.part_bytes.len() <= PARTS_MAX)?;
    Some((name.fingerprint.as_slice().try_into().ok()?, name.group, &name.part_bytes))
}

/// How many keys a question has; `None` if they are not whole.
pub(crate) fn key_count(question: &Question) -> Option<usize> {
    let each = question.key_bytes as usize;
    if question.keys.is_empty() {
        return Some(0);
    }
    (each != 0 && question.keys.len().is_multiple_of(each)).then(|| question.keys.len() / each)
}

/// The keys of a question; `None` if they are none.
pub(crate) fn keys_of(question: &Question) -> Option<Vec<Key>> {
    key_count(question)?;
    question.keys.chunks(question.key_bytes.max(1) as usize).map(|bytes| Key::new(bytes).ok()).collect()
}

/// Keys one after the other, as far as they are as long as the first.
pub(crate) fn pack(keys: &[Key]) -> (u32, Vec<u8>) {
    let mut packed = Vec::with_capacity(keys.len() * 32);
    let mut each = 0;
    for key in keys {
        let bytes = key.to_bytes();
        if each != 0 && bytes.len() != each {
            break;
        }
        each = bytes.len();
        packed.extend_from_slice(&bytes);
    }
    (each as u32, packed)
}

/// A reply that says where bytes are. One that came of a request which a bad network has changed would name other
/// blocks than were asked for, and nothing else would tell: what is read there is whole.
pub trait Sealed: Message + Sized {
    /// The field of its digest.
    fn digest(&mut self) -> &mut u64;

    /// The server's half: with the digest of the request as it was understood, and of all that the reply says.
    fn sealed(mut self, request: &impl Message) -> Self {
        *self.digest() = digest_of(request, &self);
        self
    }

    /// The client's half: the reply, if it is one to this request and came as it was sent.
    fn opened(mut self, request: &impl Message) -> Option<Self> {
        let said = std::mem::take(self.digest());
        (digest_of(request, &self) == said).then_some(self)
    }
}

impl Sealed for LeaseReply {
    fn digest(&mut self) -> &mut u64 {
        &mut self.digest
    }
}

impl Sealed for RegionsReply {
    fn digest(&mut self) -> &mut u64 {
        &mut self.digest
    }
}

/// Fields that this version does not know are not in it: prost does not keep them.
fn digest_of(request: &impl Message, reply: &impl Message) -> u64 {
    xxh3_64_with_seed(&reply.encode_to_vec(), xxh3_64(&request.encode_to_vec()))
}

/// Sixteen bytes that name a session or open a lease.
pub(crate) fn sixteen(bytes: &[u8]) -> Option<[u8; 16]> {
    bytes.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{LeaseRequest, LeasedBlock, Place};

    #[test]
    fn keys_survive_packing() {
        let keys: Vec<Key> = (0..5u8).map(|number| Key::new(&[number; 20]).unwrap()).collect();
        let (key_bytes, packed) = pack(&keys);
        let question = Question { key_bytes, keys: packed, ..Question::default() };
        assert_eq!(keys_of(&question), Some(keys.clone()));
        assert_eq!(key_count(&question), Some(5));
        let mixed = [keys[0], Key::new(&[1; 8]).unwrap()];
        assert_eq!(pack(&mixed).1.len(), 20, "only what is as long as the first");
        assert_eq!(keys_of(&Question::default()), Some(Vec::new()));
    }

    #[test]
    fn a_reply_to_a_request_that_was_changed_or_that_was_changed_itself_is_not_opened() {
        let question = Question { key_bytes: 4, keys: (0..40).collect(), chained: true, ..Question::default() };
        let request = LeaseRequest { question: Some(question), wait_ms: 7, ..LeaseRequest::default() };
        let blocks = vec![LeasedBlock {
            key: 3,
            checksum: Some(5),
            parts: vec![Place { segment: 1, offset: 64 }],
            ..LeasedBlock::default()
        }];
        let reply = LeaseReply { lease: 9, secret: vec![1; 16], time_ms: 5000, blocks, digest: 0 };
        assert_eq!(reply.clone().sealed(&request).opened(&request), Some(reply.clone()));
        let spoiled = |bytes: Vec<u8>| {
            (0..bytes.len() * 8).map(move |bit| {
                let mut bytes = bytes.clone();
                bytes[bit / 8] ^= 1 << (bit % 8);
                bytes
            })
        };
        let mut understood = 0;
        for other in spoiled(request.encode_to_vec()).filter_map(|bytes| LeaseRequest::decode(&*bytes).ok()) {
            understood += 1;
            let opened = reply.clone().sealed(&other).opened(&request);
            assert_eq!(opened.is_some(), other == request, "{other:?}");
        }
        for other in
            spoiled(reply.clone().sealed(&request).encode_to_vec()).filter_map(|bytes| LeaseReply::decode(&*bytes).ok())
        {
            understood += 1;
            let same = other.clone().opened(&request).is_some_and(|opened| opened == reply);
            assert_eq!(other.clone().opened(&request).is_some(), same, "{other:?}");
        }
        assert!(understood > 400, "{understood}");
    }

    #[test]
    fn what_is_no_key_is_not_taken_for_one() {
        for (key_bytes, length) in [(0, 5), (3, 4), (33, 33), (u32::MAX, 8)] {
            let question = Question { key_bytes, keys: vec![1; length], ..Question::default() };
            assert_eq!(keys_of(&question), None, "{length} bytes of keys of {key_bytes}");
        }
    }
}
