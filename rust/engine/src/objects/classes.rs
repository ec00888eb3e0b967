//! Size classes: small, medium and large slots, each a namespace of blocks of one part.
//!
//! Every value begins in a small slot, its head; what does not fit there follows in members of any class. So only the
//! small class is in the index, a key is there at most once whatever the size of its value, and replacing a value is
//! one publish.

use crate::error::Result;
use crate::shm::namespace::{KEPT, Namespace};
use crate::shm::pool::Pool;

/// Number of classes.
pub(super) const CLASSES: usize = 3;

/// The class of heads.
pub(super) const HEAD: usize = 0;

/// Bytes of a slot of each class, where the pool's segments are at least as large.
const SLOT_BYTES: [u64; CLASSES] = [512, 16 << 10, 1 << 20];

/// The classes of one pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Classes {
    namespaces: [Namespace; CLASSES],
    bytes: [usize; CLASSES],
}

impl Classes {
    /// Find or create the namespaces. The sizes follow from the pool's geometry, so all processes choose the same.
    pub(super) fn open(pool: &Pool) -> Result<Self> {
        let mut fingerprint = [0u8; 32];
        fingerprint[..8].copy_from_slice(&KEPT.to_le_bytes());
        fingerprint[8..16].copy_from_slice(b"objects1");
        let bytes = SLOT_BYTES.map(|bytes| bytes.min(pool.segment_bytes() / 4096 * 4096));
        let mut namespaces = [Namespace(0); CLASSES];
        for (class, namespace) in namespaces.iter_mut().enumerate() {
            let label = format!("values, slots of {} bytes", bytes[class]);
            *namespace = pool.namespace(&fingerprint, class as u32, &bytes[class..=class], &label)?;
        }
        Ok(Self { namespaces, bytes: bytes.map(|bytes| bytes as usize) })
    }

    pub(super) fn namespace(&self, class: usize) -> Namespace {
        self.namespaces[class]
    }

    /// Bytes of a slot.
    pub(super) fn bytes(&self, class: usize) -> usize {
        self.bytes[class]
    }

    /// Class of the next member when `left` bytes follow: the largest whose slot they fill at least by half, so that no
    /// value wastes more than it needs.
    pub(super) fn best(&self, left: usize) -> usize {
        (1..CLASSES).rev().find(|class| left > self.bytes[*class] / 2).unwrap_or(HEAD)
    }

    /// Whether a value of `total_bytes` has slots of `class`, if it got the best ones.
    pub(super) fn uses(&self, total_bytes: usize, class: usize) -> bool {
        let mut left = total_bytes.saturating_sub(self.bytes[HEAD]);
        for larger in (class + 1..CLASSES).rev() {
            left = match left % self.bytes[larger] {
                rest if rest > self.bytes[larger] / 2 => 0,
                rest => rest,
            };
        }
        class == HEAD || left > self.bytes[class] / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Classes =
        Classes { namespaces: [Namespace(0), Namespace(1), Namespace(2)], bytes: [512, 16384, 1 << 20] };

    fn plan(total_bytes: usize) -> [usize; CLASSES] {
        let mut slots = [1, 0, 0];
        let mut left = total_bytes.saturating_sub(ALL.bytes(HEAD));
        while left > 0 {
            let class = ALL.best(left);
            slots[class] += 1;
            left = left.saturating_sub(ALL.bytes(class));
        }
        slots
    }

    #[test]
    fn no_value_wastes_more_than_half() {
        for total in [1, 512, 513, 8704, 8705, 20_000, 600_000, 1 << 20, 5_000_000] {
            let room: usize = plan(total).iter().zip(ALL.bytes).map(|(slots, bytes)| slots * bytes).sum();
            assert!(room >= total && room <= 2 * total + 512, "{total} bytes in {room}");
        }
        assert_eq!(plan((1 << 30) + 512), [1, 0, 1024]);
        assert_eq!(plan(512 + 8192), [17, 0, 0]);
    }

    #[test]
    fn used_classes_are_those_of_the_plan() {
        for total in [1, 512, 8704, 8705, 20_000, 524_800, 524_801, 600_000, (1 << 20) + 9000, 5_000_000] {
            for class in 0..CLASSES {
                assert_eq!(ALL.uses(total, class), plan(total)[class] > 0, "{total} bytes, class {class}");
            }
        }
    }
}
