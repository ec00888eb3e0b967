//! What a server has done.

use crate::sync::{AtomicU64, Relaxed};

/// One counter.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// All counters; the names are stable.
        #[derive(Default)]
        pub(crate) struct Counters {
            $($(#[doc = $doc])* pub(crate) $name: Counter,)*
        }

        impl Counters {
            /// Names and values.
            pub(crate) fn snapshot(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.get()),)*]
            }
        }
    };
}

counters! {
    /// Calls that were worked on.
    calls,
    /// Calls for which there was no room.
    calls_refused,
    /// Calls that were no proper ones.
    calls_malformed,
    /// Calls without the token.
    calls_unknown,
    /// Calls of the kind that looks for blocks.
    finds,
    /// Keys that they asked for.
    find_keys,
    /// Of these, those that are in memory or on SSD.
    find_keys_hit,
    /// Leases given.
    leases_given,
    /// Blocks in them.
    blocks_leased,
    /// Blocks that were brought from SSD for a lease.
    blocks_from_ssd,
    /// Leases that ended before they were given back.
    leases_expired,
    /// Leases for which there was no room.
    leases_refused,
    /// Clients that came.
    sessions_begun,
    /// Clients that were gone.
    sessions_ended,
}
