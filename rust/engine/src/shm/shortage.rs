//! Growing where the file system has no memory for another segment, though the pool is smaller than it may be: by what
//! other namespaces give.
//!
//! The memory of an extent that goes is free when all processes have unmapped it, which they do at their next look
//! around. Until it comes, no more is taken: one who stands still keeps it for as long as that lasts.

use std::sync::PoisonError;
use std::time::Instant;

use crate::error::ErrorKind;
use crate::limits::{MEMORY_LOOKS_MAX, MEMORY_WAIT_MAX, PARTS_MAX};
use crate::shm::core::Core;
use crate::shm::geometry::slot_stride;
use crate::shm::namespace::Namespace;
use crate::shm::rows::SlotHeader;
use crate::sync::AtomicU64;

/// Bytes of the tables for each slot.
const HEADER_BYTES: u64 = (size_of::<SlotHeader>() + size_of::<AtomicU64>()) as u64;

impl Core {
    /// Have another namespace give an extent: one in which nothing is, else one that `ns` may take.
    pub(crate) fn take_from_others(&self, ns: Namespace) -> bool {
        let starving = self.extents(ns).is_empty();
        self.retire_empty(ns) > 0 || self.take_extent(ns, starving)
    }

    /// There was no memory for an extent: take as much as one needs, if others have to give, and wait until it comes.
    pub(crate) fn grow_by_taking(&self, ns: Namespace) {
        if !self.is_in_need(ns) {
            return;
        }
        let Ok(info) = self.namespace_info(ns) else { return };
        let slots = self.slots_of_extent(&info);
        let bytes: u64 = info.part_bytes.iter().map(|bytes| slots * slot_stride(*bytes)).sum();
        // What went in vain so far may have left no memory for the headers.
        if self.awaited_bytes() >= bytes + slots * HEADER_BYTES {
            return;
        }
        let mut extents = 0;
        while extents < PARTS_MAX && (extents == 0 || self.awaited_bytes() < bytes) && self.take_from_others(ns) {
            extents += 1;
        }
        if extents == 0 {
            return;
        }
        for _ in 0..MEMORY_LOOKS_MAX {
            match self.grow_quietly(ns) {
                Err(ErrorKind::ShmFull) if self.rest() => {}
                Ok(_) => return self.await_no_memory(),
                Err(_) => return,
            }
        }
    }

    /// Bytes that the pool has lost since growth failed, and that may yet become free.
    fn awaited_bytes(&self) -> u64 {
        let used = self.bytes_used();
        let mut awaited = self.memory_awaited.lock().unwrap_or_else(PoisonError::into_inner);
        let known = awaited.filter(|(since, before)| since.elapsed() < MEMORY_WAIT_MAX && used < *before);
        let (_, before) = *awaited.insert(known.unwrap_or_else(|| (Instant::now(), used)));
        before - used
    }

    fn await_no_memory(&self) {
        *self.memory_awaited.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::{OpenOptions, Pool};

    #[test]
    fn memory_of_what_was_taken_is_awaited_until_the_pool_is_as_large_as_before() {
        let options = OpenOptions { pool_bytes: Some(1 << 20), private: true, ..OpenOptions::default() };
        let options = OpenOptions { segment_bytes: Some(64 << 10), ..options };
        let pool = Pool::open("p", &options).expect("a private pool");
        let core = pool.core();
        let ns = pool.namespace(&[1; 32], 0, &[1024], "test").expect("a namespace");
        (0..2).for_each(|_| assert_eq!(core.grow(ns).expect("room"), crate::shm::grow::Grown::Yes));
        assert_eq!(core.awaited_bytes(), 0);
        let extent = core.extents(ns)[0].clone();
        assert!(core.retire(&extent, false));
        assert_eq!((core.awaited_bytes(), core.awaited_bytes()), (extent.bytes, extent.bytes));
        core.grow(ns).expect("room");
        assert_eq!(core.awaited_bytes(), 0);
    }
}
