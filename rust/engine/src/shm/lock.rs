//! Locks between processes that survive the death of their holder.
//!
//! A lock is one word naming the member that holds it. A waiter tries for a bounded time; if the holder turns out to
//! be dead it takes the lock over with one compare-and-swap. Nothing needs repair then: every change made under a lock
//! is a single store (`index.rs`), or is claimed in a row that the reaper finds (`grow.rs`). No futex, no thread ids:
//! the word means the same in every container.

use std::cell::Cell;
use std::time::Duration;

use crate::limits::{LOCK_SLEEP, LOCK_SPINS, LOCK_TRIES_PER_PROBE, LOCK_WAIT_MAX, PROCESSES_MAX, SLOW_HOLDER_PAUSE};
use crate::shm::clock::boot_ms;
use crate::shm::core::Core;
use crate::shm::process::Member;
use crate::sync::{AcqRel, Acquire, AtomicU64, Instant, LocalU64, Relaxed, Release, sleep, yield_now};

thread_local! {
    /// How long this thread has waited for locks in its present operation.
    static WAITED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// An operation begins, and may wait anew.
pub(crate) fn begin_operation() {
    WAITED.set(Duration::ZERO);
}

fn has_waited(time: Duration) {
    // All threads of a model are one thread of the system.
    if cfg!(not(loom)) {
        WAITED.set(WAITED.get() + time);
    }
}

/// A held lock; dropping it releases.
pub(crate) struct LockGuard<'a> {
    word: &'a AtomicU64,
    mine: u64,
}

impl Drop for LockGuard<'_> {
    fn drop(&mut self) {
        // Only what is still ours: a process that was declared dead while stopped must not free another's lock.
        let _gone_if_reaped = self.word.compare_exchange(self.mine, 0, Release, Relaxed);
    }
}

/// Until when (boot clock, ms) nobody of this process waits for the process of each row again, since a wait for it ran
/// out: it is stopped, or at something long. So an operation on many keys waits once and not once per key.
pub(crate) struct SlowHolders {
    until_ms: [LocalU64; PROCESSES_MAX],
}

impl Default for SlowHolders {
    fn default() -> Self {
        Self { until_ms: [const { LocalU64::new(0) }; PROCESSES_MAX] }
    }
}

impl SlowHolders {
    fn of(&self, holder: u64) -> Option<&LocalU64> {
        Member::decode(holder).map(|member| &self.until_ms[member.row as usize])
    }

    fn remember(&self, holder: u64) {
        if let Some(until_ms) = self.of(holder) {
            until_ms.store(boot_ms() + SLOW_HOLDER_PAUSE.as_millis() as u64, Relaxed);
        }
    }

    fn contains(&self, holder: u64) -> bool {
        self.of(holder).is_some_and(|until_ms| until_ms.load(Relaxed) > boot_ms())
    }
}

impl Core {
    /// Whether waiting for the lock in `word` is known to be of no use now.
    pub(crate) fn is_held_for_long(&self, word: &AtomicU64) -> bool {
        self.slow_holders.contains(word.load(Relaxed))
    }

    /// Take the lock in `word`, or give up after a bounded wait. Not recursive.
    pub(crate) fn lock<'a>(&self, word: &'a AtomicU64) -> Option<LockGuard<'a>> {
        let mine = self.me.encode();
        for _ in 0..LOCK_SPINS {
            if word.compare_exchange_weak(0, mine, AcqRel, Relaxed).is_ok() {
                return Some(LockGuard { word, mine });
            }
            std::hint::spin_loop();
        }
        self.lock_slowly(word, mine)
    }

    /// Take the lock in `word` if nobody alive has it for longer than a moment.
    #[cfg(not(loom))]
    pub(crate) fn try_lock<'a>(&self, word: &'a AtomicU64) -> Option<LockGuard<'a>> {
        let mine = self.me.encode();
        for _ in 0..LOCK_SPINS {
            if word.compare_exchange_weak(0, mine, AcqRel, Relaxed).is_ok() {
                return Some(LockGuard { word, mine });
            }
            std::hint::spin_loop();
        }
        let holder = word.load(Acquire);
        let free = holder == 0 || self.is_dead(holder);
        let taken = free && word.compare_exchange(holder, mine, AcqRel, Relaxed).is_ok();
        // Made only of a lock that was taken: dropping it releases what any thread of this process has.
        taken.then(|| LockGuard { word, mine })
    }

    #[cold]
    fn lock_slowly<'a>(&self, word: &'a AtomicU64, mine: u64) -> Option<LockGuard<'a>> {
        let started = Instant::now();
        let wait_max = LOCK_WAIT_MAX.saturating_sub(WAITED.get());
        let (mut same_holder, mut same_since) = (0, started);
        let mut tries = 0u32;
        let guard = loop {
            let holder = word.load(Acquire);
            if holder == 0 {
                if word.compare_exchange(0, mine, AcqRel, Relaxed).is_ok() {
                    break Some(LockGuard { word, mine });
                }
                continue;
            }
            if holder != same_holder {
                (same_holder, same_since) = (holder, Instant::now());
            }
            tries += 1;
            let late = started.elapsed() >= wait_max || self.slow_holders.contains(holder);
            // One yield on a busy host can take as long, so never give up without having looked.
            if (late || tries % LOCK_TRIES_PER_PROBE == 1)
                && self.is_dead(holder)
                && word.compare_exchange(holder, mine, AcqRel, Relaxed).is_ok()
            {
                crate::crash_point::pass("takeover.locked");
                self.stats.locks_taken_over.add(1);
                break Some(LockGuard { word, mine });
            }
            if late {
                // Not one of many holders, nor one for whom there was hardly any time left.
                if same_since.elapsed() >= LOCK_WAIT_MAX / 2 && !self.slow_holders.contains(holder) {
                    self.slow_holders.remember(holder);
                }
                break None;
            }
            if tries < LOCK_TRIES_PER_PROBE { yield_now() } else { sleep(LOCK_SLEEP) }
        };
        let waited = started.elapsed();
        has_waited(waited);
        self.count_lock_wait(waited, guard.is_none());
        guard
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{OpenOptions, Pool};

    #[test]
    fn who_does_not_get_a_lock_leaves_it_to_a_thread_that_has_it() {
        let options = OpenOptions { pool_bytes: Some(1 << 20), private: true, ..OpenOptions::default() };
        let pool = Pool::open("p", &options).expect("a private pool");
        let core = pool.core();
        let word = AtomicU64::new(0);
        let held = core.lock(&word).expect("free");
        assert!(core.try_lock(&word).is_none());
        assert_eq!(word.load(Relaxed), core.me.encode());
        drop(held);
        assert!(core.try_lock(&word).is_some());
    }

    #[test]
    fn a_wait_that_earlier_ones_cut_short_does_not_make_its_holder_slow() {
        let options = OpenOptions { pool_bytes: Some(1 << 20), private: true, ..OpenOptions::default() };
        let pool = Pool::open("p", &options).expect("a private pool");
        let core = pool.core();
        let held = AtomicU64::new(core.me.encode());
        begin_operation();
        has_waited(LOCK_WAIT_MAX);
        assert!(core.lock(&held).is_none());
        assert!(!core.is_held_for_long(&held));
        begin_operation();
        assert!(core.lock(&held).is_none());
        assert!(core.is_held_for_long(&held));
    }
}
