//! Slots for a new value: free ones, else a new extent, else what eviction may take, else slots of another class.

use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::shm::free::TakenSlot;
use crate::shm::grow::Grown;
use crate::sync::{Acquire, Relaxed};

use super::classes::{CLASSES, HEAD};
use super::patience::Patience;
use super::put::Reservation;
use super::store::Inner;

/// Rounds of making room for one slot; others may be faster in taking what was made.
const ROUNDS_MAX: usize = 1 << 14;

/// Waits for another process's growth between two looks whether it is dead; about 10 ms.
const TRIES_PER_REAP: u32 = 64;

/// The search for the slots of one value.
#[derive(Default)]
struct Search {
    patience: Patience,
    /// Why the pool could not grow, if it is not simply full.
    no_growth: Option<Error>,
}

impl Inner {
    /// Reserve a head, and members for what does not fit there. All or nothing.
    pub(super) fn reserve(&self, hash: &Key, total_bytes: usize) -> Result<Reservation<'_>> {
        self.check_fits(total_bytes)?;
        let mut search = Search::default();
        loop {
            if let Some(reservation) = self.try_reserve(hash, total_bytes, &mut search)? {
                return Ok(reservation);
            }
            // With eviction only what is in use just now can be in the way: values being written or read.
            if !self.evict || search.patience.wait_long().is_err() {
                return Err(self.full(total_bytes, search));
            }
        }
    }

    /// `None` if there are not enough slots; then those that there were are given back.
    fn try_reserve(&self, hash: &Key, total_bytes: usize, search: &mut Search) -> Result<Option<Reservation<'_>>> {
        let core = self.core();
        let Some(taken) = self.take(HEAD, search)? else { return Ok(None) };
        let head = core.name_slot(taken, &core.identity(self.classes.namespace(HEAD))?, hash);
        let reservation = Reservation { core, head, published: false };
        let mut last = head;
        let mut left = total_bytes.saturating_sub(self.classes.bytes(HEAD));
        while left > 0 {
            let Some((class, taken)) = self.take_member(self.classes.best(left), search)? else { return Ok(None) };
            let member = core.name_slot(taken, &core.identity(self.classes.namespace(class))?, hash);
            core.make_member(member, head, last.slot());
            last = member;
            left = left.saturating_sub(self.classes.bytes(class));
        }
        Ok(Some(reservation))
    }

    /// A slot of the class, or one of another class that happens to be free.
    fn take_member(&self, class: usize, search: &mut Search) -> Result<Option<(usize, TakenSlot)>> {
        if let Some(taken) = self.take(class, search)? {
            return Ok(Some((class, taken)));
        }
        let others = (0..class).rev().chain(class + 1..CLASSES);
        Ok(others.filter_map(|other| Some((other, self.take_free(other)?))).next())
    }

    fn take(&self, class: usize, search: &mut Search) -> Result<Option<TakenSlot>> {
        for _ in 0..ROUNDS_MAX {
            if let Some(taken) = self.take_free(class) {
                return Ok(Some(taken));
            }
            if self.grow(class, search)? {
                continue;
            }
            let (room, taken) = if self.evict {
                self.evict_for(class)
            } else {
                (self.core().retire_empty(self.classes.namespace(class)) > 0, None)
            };
            if taken.is_some() || !room {
                return Ok(taken);
            }
        }
        Ok(None)
    }

    fn take_free(&self, class: usize) -> Option<TakenSlot> {
        let ns = self.classes.namespace(class);
        self.core().take_free(ns, &self.core().extents(ns))
    }

    /// Add an extent to the class, or wait a little while another process does. `false`: there will be none.
    fn grow(&self, class: usize, search: &mut Search) -> Result<bool> {
        let core = self.core();
        let ns = self.classes.namespace(class);
        let version = core.control.header().extents_version.load(Acquire);
        if self.at_capacity[class].load(Relaxed) == version {
            return Ok(false);
        }
        let in_the_way = match core.grow(ns) {
            Ok(Grown::Yes) => return Ok(true),
            Ok(Grown::AtCapacity) => {
                self.at_capacity[class].store(version, Relaxed);
                return Ok(false);
            }
            Err(error) if error.kind() == ErrorKind::ShmFull => {
                if self.evict {
                    // Not before an extent was given back, or the next scan for candidates.
                    self.at_capacity[class].store(version, Relaxed);
                }
                search.no_growth = Some(error);
                return Ok(false);
            }
            Ok(Grown::InProgress) => None,
            Err(error) if error.kind() == ErrorKind::Busy => Some(error),
            Err(error) => return Err(error),
        };
        if search.patience.tries().is_multiple_of(TRIES_PER_REAP) {
            // Whoever is in the way may be dead.
            core.reap();
        }
        if let Err(error) = search.patience.wait() {
            // It may be stopped: do with what there is.
            search.no_growth = Some(in_the_way.unwrap_or(error));
            return Ok(false);
        }
        Ok(true)
    }

    /// What no pool of this size can ever hold is refused before anything is evicted for it.
    fn check_fits(&self, total_bytes: usize) -> Result<()> {
        let (pool, segment) = (self.pool.pool_bytes(), self.pool.segment_bytes());
        // One segment is for heads.
        let most = if pool > segment { pool - segment } else { segment };
        if total_bytes as u64 > most {
            return Err(Error::new(
                ErrorKind::Full,
                format!(
                    "a value of {total_bytes} bytes, its key included, is larger than a pool of {pool} bytes can hold: \
                     choose a larger pool_size"
                ),
            ));
        }
        Ok(())
    }

    fn full(&self, total_bytes: usize, search: Search) -> Error {
        search.no_growth.unwrap_or_else(|| {
            let advice = if self.evict { "what is left is in use" } else { "evict=True drops the oldest values" };
            Error::new(
                ErrorKind::Full,
                format!(
                    "the pool of {} bytes has no room for a value of {total_bytes} bytes: remove values or choose a \
                     larger pool_size ({advice})",
                    self.pool.pool_bytes()
                ),
            )
        })
    }
}
