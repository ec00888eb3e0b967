//! Counters of this process's use of one pool.

use crate::sync::{LocalU64, Relaxed};

/// One counter or high-water mark.
#[derive(Default)]
pub(crate) struct Counter(LocalU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Relaxed);
    }

    /// Returns whether it was lower.
    pub(crate) fn raise(&self, value: u64) -> bool {
        self.0.fetch_max(value, Relaxed) < value
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// All counters; the names are stable.
        #[derive(Default)]
        pub(crate) struct Stats {
            $($(#[doc = $doc])* pub(crate) $name: Counter,)*
        }

        impl Stats {
            /// Names and values.
            pub(crate) fn snapshot(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.get()),)*]
            }
        }
    };
}

counters! {
    /// Calls of `lookup`, `contains` and `lease`.
    lookups,
    /// Keys found by them.
    lookup_blocks_hit,
    /// Keys on which a reader gave up because writers kept changing the chain.
    lookups_uncertain,
    /// Blocks this process made visible.
    blocks_published,
    /// Blocks dropped because somebody else had published the key.
    blocks_duplicate,
    /// Blocks dropped because the block before them is not in the pool.
    blocks_orphaned,
    /// Blocks dropped because a part is missing or a lock could not be had in time.
    blocks_unpublished,
    /// Blocks evicted by this process.
    blocks_evicted,
    /// Blocks left out of a reservation because nothing was free.
    blocks_refused,
    /// Slots freed from dead processes.
    slots_reaped,
    /// Slots put into quarantine.
    slots_quarantined,
    /// Lock waits that ran out.
    lock_timeouts,
    /// Longest wait for a lock.
    lock_wait_us_max,
    /// Locks taken over from dead processes.
    locks_taken_over,
    /// Process rows cleaned up.
    processes_reaped,
    /// Segments created by this process.
    segments_created,
    /// Blocks moved to another slot, so that their extent could be taken back.
    blocks_moved,
    /// Extents taken back from a namespace.
    extents_retired,
    /// Failed growths.
    grow_failures,
    /// Index rebuilds by this process.
    index_rebuilds,
}
