//! Counting what goes away or goes wrong for want of room or time: of this process, and in the pool's statistics.

use std::time::Duration;

use crate::shm::core::Core;
use crate::shm::evict::name_of;
use crate::shm::namespace::Namespace;
#[cfg(not(loom))]
use crate::traffic::Counter;

impl Core {
    /// Namespace of the block in `slot`, as its header says.
    pub(crate) fn namespace_in(&self, slot: u32) -> Option<Namespace> {
        self.control.slot(slot).and_then(name_of).map(|(identity, _)| Namespace(identity.id))
    }

    /// A block was evicted.
    pub(crate) fn count_evicted(&self, of: Option<Namespace>) {
        self.stats.blocks_evicted.add(1);
        self.note(of, Counter::Evicted, 1);
    }

    /// So many blocks got no slot.
    pub(crate) fn count_refused(&self, of: Namespace, blocks: u64) {
        self.stats.blocks_refused.add(blocks);
        self.note(Some(of), Counter::Refused, blocks);
    }

    /// An extent could not be made.
    pub(crate) fn count_grow_failure(&self, of: Namespace) {
        self.stats.grow_failures.add(1);
        self.note(Some(of), Counter::GrowFailures, 1);
    }

    /// The index was made anew.
    pub(crate) fn count_rebuild(&self) {
        self.stats.index_rebuilds.add(1);
        self.tell_pressure();
    }

    /// A thread has waited for a lock, in vain if the wait `ran_out`.
    pub(crate) fn count_lock_wait(&self, waited: Duration, ran_out: bool) {
        self.stats.lock_timeouts.add(u64::from(ran_out));
        let longest = self.stats.lock_wait_us_max.raise(waited.as_micros() as u64);
        if longest || ran_out {
            self.tell_pressure();
        }
    }
}

/// Models have no statistics.
#[cfg(loom)]
enum Counter {
    Evicted,
    Refused,
    GrowFailures,
}

#[cfg(loom)]
impl Core {
    fn note(&self, _ns: Option<Namespace>, _counter: Counter, _count: u64) {}

    fn tell_pressure(&self) {}
}
