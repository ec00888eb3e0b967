//! Accounts as this process knows them. Counting reads the stamps of the whole pool, so it is done now and then, and in
//! between the last count is corrected by what this process takes.

use std::sync::PoisonError;
use std::time::Instant;

use crate::limits::{RECOUNT_COST_MAX, RECOUNT_PAUSE};
use crate::shm::core::Core;
use crate::shm::recency::owner_of;
use crate::shm::shares::Shares;
use crate::sync::{Acquire, SeqCst};

/// The last count.
pub(crate) struct Counted {
    /// Of what it depends on apart from stamps: version of the extents, and sum of the weights.
    basis: (u64, u64),
    /// Not used from then on.
    due: Instant,
    shares: Shares,
}

impl Core {
    /// Accounts of a little while ago.
    pub(crate) fn recent_shares(&self) -> Shares {
        self.with_recent_shares(|shares| shares.clone())
    }

    /// Whether a block that was chosen to go for the instance `account` still may: its owner has more than its share,
    /// or has none.
    pub(crate) fn may_take(&self, stamp: u64, account: u32) -> bool {
        owner_of(stamp).filter(|row| *row != account).is_none_or(|row| {
            self.with_recent_shares(|shares| !shares.is_instance(row) || shares.of(row).excess_bytes() > 0)
        })
    }

    /// This process has evicted a block of that stamp to store one of the instance `account`.
    pub(crate) fn note_taken(&self, stamp: u64, account: u32, bytes: u64) {
        let mut counted = self.counted_shares.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(counted) = counted.as_mut() {
            counted.shares.transfer(owner_of(stamp), account, bytes);
        }
    }

    fn with_recent_shares<T>(&self, look: impl FnOnce(&Shares) -> T) -> T {
        let mut counted = self.counted_shares.lock().unwrap_or_else(PoisonError::into_inner);
        let basis = self.basis_of_shares();
        // A model has no time, and counts anew.
        let known = counted.take().filter(|known| !cfg!(loom) && known.basis == basis && Instant::now() < known.due);
        let known = counted.insert(known.unwrap_or_else(|| {
            let started = Instant::now();
            let shares = self.shares();
            let pause = RECOUNT_PAUSE.max(started.elapsed() * RECOUNT_COST_MAX);
            Counted { basis, due: Instant::now() + pause, shares }
        }));
        look(&known.shares)
    }

    fn basis_of_shares(&self) -> (u64, u64) {
        let weights = self.control.processes().iter().map(|row| row.weight_milli.load(SeqCst));
        (self.control.header().extents_version.load(Acquire), weights.fold(0, u64::wrapping_add))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Key, OpenOptions, Pool};

    #[test]
    fn accounts_are_counted_anew_when_that_is_due_or_their_basis_is_another() {
        let options = OpenOptions { pool_bytes: Some(1 << 20), private: true, ..OpenOptions::default() };
        let pool = Pool::open("p", &options).expect("a private pool");
        let core = pool.core();
        let ns = pool.namespace(&[1; 32], 0, &[1024], "test").expect("a namespace");
        core.grow(ns).expect("room");
        let keys: Vec<Key> = (0..3u8).map(|number| Key::new(&[number; 16]).expect("a key")).collect();
        let blocks: Vec<_> = pool.reserve(ns, &keys, None, false).expect("room").iter().map(|(_, b)| *b).collect();
        pool.mark_written(0, &blocks, None).expect("reserved");
        assert_eq!(pool.publish(&blocks).expect("written"), 3);
        let due_in = |pause: Duration| {
            core.counted_shares.lock().expect("no panic").as_mut().expect("counted").due = Instant::now() + pause;
        };
        let used_blocks = || core.recent_shares().of(core.me.row).used_bytes / 1024;
        assert_eq!(used_blocks(), 3);
        due_in(Duration::from_secs(3600));
        core.disown(blocks[0].slot(), core.me.row);
        assert_eq!(used_blocks(), 3, "of a while ago");
        due_in(Duration::ZERO);
        assert_eq!(used_blocks(), 2);
        due_in(Duration::from_secs(3600));
        core.note_taken(core.control.stamp(blocks[0].slot()).load(SeqCst), core.me.row, 1024);
        assert_eq!(used_blocks(), 3, "taken from nobody since");
        core.set_weight(17);
        assert_eq!(used_blocks(), 2, "the pool is divided anew");
        due_in(Duration::from_secs(3600));
        core.disown(blocks[1].slot(), core.me.row);
        core.extents_changed();
        assert_eq!(used_blocks(), 1);
    }
}
