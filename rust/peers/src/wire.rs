//! Messages of the protocol from and to what the engine has, checked.

use pegaflow_engine::{Key, limits::PARTS_MAX};

use crate::proto::{NamespaceName, Question};

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

/// Sixteen bytes that name a session or open a lease.
pub(crate) fn sixteen(bytes: &[u8]) -> Option<[u8; 16]> {
    bytes.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn what_is_no_key_is_not_taken_for_one() {
        for (key_bytes, length) in [(0, 5), (3, 4), (33, 33), (u32::MAX, 8)] {
            let question = Question { key_bytes, keys: vec![1; length], ..Question::default() };
            assert_eq!(keys_of(&question), None, "{length} bytes of keys of {key_bytes}");
        }
    }
}
