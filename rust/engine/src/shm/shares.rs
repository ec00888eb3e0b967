//! Shares: what an instance may keep of the pool, however busy the others are.
//!
//! A block is on the account of the instance that used it last; its stamp says so, so accounts are counted from the
//! stamps and can be wrong for nobody's death. The pool's slots are divided among the living instances by weight. Who
//! uses more than its share loses its oldest blocks first; who uses less loses none to others. What nobody uses is
//! anybody's, and so are the blocks of the dead.

use crate::error::{Error, Result};
use crate::limits::{PROCESSES_MAX, WEIGHT_MILLI_DEFAULT, WEIGHT_MILLI_MAX};
use crate::shm::control::Control;
use crate::shm::core::Core;
use crate::shm::extent::{Extent, ExtentState};
use crate::shm::namespace::is_kept;
use crate::shm::process::{Member, ProcessState, load};
use crate::shm::recency::owner_of;
use crate::sync::{Relaxed, SeqCst};

/// The account of one instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Thousandths of its weight; 0 if it has no share.
    pub weight_milli: u64,
    /// Bytes that others do not take from it.
    pub bytes: u64,
    /// Bytes of the blocks on its account.
    pub used_bytes: u64,
}

impl Share {
    /// Bytes that others may take.
    pub(crate) fn excess_bytes(&self) -> u64 {
        self.used_bytes.saturating_sub(self.bytes)
    }
}

/// All accounts of a pool at one time.
#[derive(Clone)]
pub(crate) struct Shares {
    rows: Vec<Share>,
}

impl Shares {
    /// Count what is in `extents`; `lives` says whether the process of a row is alive.
    pub(crate) fn count(control: &Control, extents: &[Extent], lives: impl Fn(u32) -> bool) -> Self {
        let mut rows = vec![Share::default(); PROCESSES_MAX];
        let mut pool_bytes = 0;
        for extent in extents.iter().filter(|extent| counts(control, extent)) {
            pool_bytes += extent.bytes;
            let slot_bytes = extent.slot_bytes();
            for slot in extent.slots() {
                if let Some(row) = owner_of(control.stamp(slot).load(Relaxed)) {
                    rows[row as usize].used_bytes += slot_bytes;
                }
            }
        }
        for (row, share) in rows.iter_mut().enumerate() {
            share.weight_milli = weight_of(control, row as u32).filter(|_| lives(row as u32)).unwrap_or(0);
        }
        let all: u64 = rows.iter().map(|share| share.weight_milli).sum();
        for share in rows.iter_mut().filter(|share| share.weight_milli > 0) {
            share.bytes = (u128::from(pool_bytes) * u128::from(share.weight_milli) / u128::from(all)) as u64;
        }
        Self { rows }
    }

    #[cfg(test)]
    pub(crate) fn of_rows(rows: Vec<Share>) -> Self {
        Self { rows }
    }

    /// The account of a row.
    pub(crate) fn of(&self, row: u32) -> Share {
        self.rows.get(row as usize).copied().unwrap_or_default()
    }

    /// A block went from one account to another.
    pub(crate) fn transfer(&mut self, from: Option<u32>, to: u32, bytes: u64) {
        if let Some(from) = from.and_then(|row| self.rows.get_mut(row as usize)) {
            from.used_bytes = from.used_bytes.saturating_sub(bytes);
        }
        if let Some(to) = self.rows.get_mut(to as usize) {
            to.used_bytes += bytes;
        }
    }

    /// Whether a row is an instance's; blocks on other rows are anybody's.
    pub(crate) fn is_instance(&self, row: u32) -> bool {
        self.of(row).weight_milli > 0
    }
}

/// Kept namespaces are outside of the division: nobody may take their blocks. An extent that changes hands stays in it.
fn counts(control: &Control, extent: &Extent) -> bool {
    let may_hold = matches!(extent.state, ExtentState::Ready | ExtentState::Retiring);
    may_hold && !is_kept(control, extent.namespace)
}

/// Weight of a row that is in use by an instance: a process that uses namespaces and copies for nobody else. What no
/// writer writes is taken as the nearest that one does.
fn weight_of(control: &Control, row: u32) -> Option<u64> {
    let process = control.processes().get(row as usize)?;
    let weight = Some(process.weight_milli.load(SeqCst).min(WEIGHT_MILLI_MAX)).filter(|weight| *weight > 0)?;
    let (epoch, state) = load(process);
    let leader = process.leader.load(SeqCst);
    let follows = leader != 0 && leader != (Member { row, epoch }).encode();
    (state == ProcessState::Alive && !follows).then_some(weight)
}

/// A weight in thousandths.
pub(crate) fn weight_milli(weight: f64) -> Result<u64> {
    let milli = (weight * 1000.0).round();
    if !(1.0..=WEIGHT_MILLI_MAX as f64).contains(&milli) {
        return Err(Error::invalid(format!(
            "a weight is a number from 0.001 to {}, not {weight}",
            WEIGHT_MILLI_MAX / WEIGHT_MILLI_DEFAULT
        )));
    }
    Ok(milli as u64)
}

impl Core {
    /// Count all accounts. Reads the stamps of the whole pool.
    pub(crate) fn shares(&self) -> Shares {
        self.shares_in(&self.all_extents())
    }

    pub(crate) fn shares_in(&self, extents: &[Extent]) -> Shares {
        let lives = |row| row == self.me.row || self.lock_file.held_by_other(row);
        Shares::count(&self.control, extents, lives)
    }

    /// Choose this instance's weight, in thousandths.
    pub(crate) fn set_weight(&self, milli: u64) {
        self.weight_milli.store(milli, Relaxed);
        let word = &self.control.processes()[self.me.row as usize].weight_milli;
        if word.load(SeqCst) != 0 {
            word.store(milli, SeqCst);
        }
    }

    /// This process uses a namespace whose blocks may go: from now on it has a share.
    pub(crate) fn claim_share(&self) {
        let weight = self.weight_milli.load(Relaxed);
        self.control.processes()[self.me.row as usize].weight_milli.store(weight, SeqCst);
        crate::crash_point::pass("namespace.weighed");
    }
}
