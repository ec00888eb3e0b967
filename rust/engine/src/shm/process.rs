//! Rows of the process table: registering, joining a leader, and telling the living from the dead.

use crate::error::{Error, Result};
use crate::limits::PROCESSES_MAX;
use crate::shm::clock::unix_seconds;
use crate::shm::control::Control;
use crate::shm::core::Core;
use crate::shm::liveness::LockFile;
use crate::shm::namespace::Namespace;
use crate::shm::rows::{ProcessRow, store_label};
use crate::sync::{Acquire, Relaxed, SeqCst};

/// In a row's flags: devices may write the process's slots.
const FLAG_DEVICE_WRITES: u64 = 1;
/// Epochs fit what a lock word has for them.
const EPOCH_MAX: u64 = (1 << 48) - 1;

/// What a process row is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessState {
    /// Nobody's; the epoch of the last user stays.
    Free,
    /// In use, by a living process or one that died unnoticed.
    Alive,
    /// Its process is dead and what it left behind is being cleaned up.
    Reaping,
    /// Its process is alive, cleans up after itself, and takes locks for that.
    Leaving,
}

impl ProcessState {
    /// Whether the process lives if it holds its lock.
    pub(crate) fn may_live(self) -> bool {
        matches!(self, Self::Alive | Self::Leaving)
    }
}

/// A process in the process table: rows are reused, epochs are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Row of the process table.
    pub row: u32,
    /// Which use of that row.
    pub epoch: u64,
}

impl Member {
    /// One nonzero word, as lock words and leader fields hold it.
    pub(crate) fn encode(self) -> u64 {
        self.epoch << 16 | u64::from(self.row + 1)
    }

    /// Decode such a word; `None` for 0 and for rows that do not exist.
    pub(crate) fn decode(word: u64) -> Option<Self> {
        let row = (word as u16 as u32).checked_sub(1)?;
        ((row as usize) < PROCESSES_MAX).then_some(Self { row, epoch: word >> 16 })
    }
}

/// Epoch and state of a row.
pub(crate) fn load(row: &ProcessRow) -> (u64, ProcessState) {
    let word = row.state.load(SeqCst);
    let state = match word as u8 {
        1 => ProcessState::Alive,
        2 => ProcessState::Reaping,
        3 => ProcessState::Leaving,
        _ => ProcessState::Free,
    };
    (word >> 8, state)
}

pub(crate) fn store(row: &ProcessRow, epoch: u64, state: ProcessState) {
    row.state.store(epoch << 8 | state as u64, SeqCst);
}

/// A row in cleaning is free; `false` if it is not any more what it was: who cleaned was taken for dead meanwhile.
pub(crate) fn free_row(row: &ProcessRow, epoch: u64) -> bool {
    let word = |state: ProcessState| epoch << 8 | state as u64;
    let free = |from| row.state.compare_exchange(word(from), word(ProcessState::Free), SeqCst, Relaxed).is_ok();
    free(ProcessState::Reaping) || free(ProcessState::Leaving)
}

/// What registering gave: a row, and the dead member of whose things the row is still full, if there was no free one.
pub(crate) struct Registered {
    pub(crate) me: Member,
    pub(crate) inherited: Option<Member>,
}

/// Take a free row, else one of a dead process: the lock byte first, then the row, so that a row in use always has had
/// a lock.
pub(crate) fn register(control: &Control, lock: &LockFile, label: &str) -> Result<Registered> {
    for only_free in [true, false] {
        for (index, row) in control.processes().iter().enumerate() {
            let index = index as u32;
            let wanted = |state| (state == ProcessState::Free) == only_free;
            if !wanted(load(row).1) || !lock.try_lock(index)? {
                continue;
            }
            crate::crash_point::pass("process.locked");
            let (epoch, state) = load(row);
            if !wanted(state) || (state != ProcessState::Free && !may_inherit(control, lock, index, epoch)) {
                lock.unlock(index);
                continue;
            }
            let inherited = (state != ProcessState::Free).then_some(Member { row: index, epoch });
            return Ok(Registered { me: fill(row, index, epoch, label, inherited.is_some()), inherited });
        }
    }
    Err(Error::busy(format!(
        "all {PROCESSES_MAX} process rows of the pool are taken: stop some processes or use another pool_name"
    )))
}

/// Whether nobody copies for the dead member of this row. As for a reaper, it is marked first, so that of two, one who
/// joins it now and the caller, one sees the other.
fn may_inherit(control: &Control, lock: &LockFile, row: u32, epoch: u64) -> bool {
    store(&control.processes()[row as usize], epoch, ProcessState::Reaping);
    crate::crash_point::pass("process.reclaimed");
    !has_living_follower(control, lock, Member { row, epoch })
}

fn fill(row: &ProcessRow, index: u32, last_epoch: u64, label: &str, inherits: bool) -> Member {
    let epoch = (last_epoch + 1) & EPOCH_MAX;
    row.leader.store(0, SeqCst);
    if !inherits {
        // A dead one's devices may still write: that stays known until its slots are settled.
        row.flags.store(0, SeqCst);
    }
    row.namespaces.store(0, SeqCst);
    row.weight_milli.store(0, SeqCst);
    row.pid.store(u64::from(std::process::id()), SeqCst);
    row.started_unix_s.store(unix_seconds(), SeqCst);
    store_label(&row.label, label);
    crate::crash_point::pass("process.filled");
    store(row, epoch, ProcessState::Alive);
    crate::crash_point::pass("process.registered");
    Member { row: index, epoch }
}

fn namespace_bit(ns: Namespace) -> u64 {
    1 << (ns.id() % u64::BITS)
}

/// Whether a living process other than the caller still moves bytes for `leader`.
fn has_living_follower(control: &Control, lock: &LockFile, leader: Member) -> bool {
    control.processes().iter().enumerate().any(|(index, row)| {
        row.leader.load(SeqCst) == leader.encode() && load(row).1.may_live() && lock.held_by_other(index as u32)
    })
}

impl Core {
    /// Whether the process behind a lock word or leader field is surely dead.
    pub(crate) fn is_dead(&self, word: u64) -> bool {
        let Some(member) = Member::decode(word) else { return true };
        if member.row == self.me.row {
            return member.epoch != self.me.epoch;
        }
        let (epoch, state) = load(&self.control.processes()[member.row as usize]);
        epoch != member.epoch || !state.may_live() || !self.lock_file.held_by_other(member.row)
    }

    /// Declare that this process moves bytes for `leader`. The order (announce, then check) meets the reaper's (mark
    /// the leader dead, then look for its followers): one of the two sees the other.
    pub(crate) fn join(&self, leader: Member) -> Result<()> {
        let rows = self.control.processes();
        let row = rows
            .get(leader.row as usize)
            .ok_or_else(|| Error::invalid(format!("there is no process row {}", leader.row)))?;
        if leader == self.me {
            return Ok(());
        }
        rows[self.me.row as usize].leader.store(leader.encode(), SeqCst);
        crate::crash_point::pass("process.joined");
        if load(row) != (leader.epoch, ProcessState::Alive) {
            rows[self.me.row as usize].leader.store(0, SeqCst);
            return Err(Error::refused(format!(
                "the process that leads this one (row {}, epoch {}) has left the pool",
                leader.row, leader.epoch
            )));
        }
        Ok(())
    }

    /// Whether a living process still moves bytes for `leader`.
    pub(crate) fn has_living_follower(&self, leader: Member) -> bool {
        self.control.processes()[self.me.row as usize].leader.load(SeqCst) == leader.encode()
            || has_living_follower(&self.control, &self.lock_file, leader)
    }

    /// Say that this process uses a namespace.
    pub(crate) fn enter(&self, ns: Namespace) {
        self.control.processes()[self.me.row as usize].namespaces.fetch_or(namespace_bit(ns), SeqCst);
    }

    /// How many other living processes have opened a namespace for themselves, not for a leader. Where a pool has more
    /// than 64 namespaces some others may be counted too.
    pub(crate) fn others_in(&self, ns: Namespace) -> usize {
        let uses = |row: &ProcessRow| {
            row.leader.load(SeqCst) == 0
                && row.namespaces.load(SeqCst) & namespace_bit(ns) != 0
                && load(row).1.may_live()
        };
        let rows = self.control.processes().iter().zip(0u32..);
        rows.filter(|(row, index)| *index != self.me.row && uses(row) && self.lock_file.held_by_other(*index)).count()
    }

    /// Say that devices may write this process's slots, so that they wait in quarantine after its death.
    pub(crate) fn set_device_writes(&self) {
        self.control.processes()[self.me.row as usize].flags.fetch_or(FLAG_DEVICE_WRITES, SeqCst);
        crate::crash_point::pass("process.device_writes");
    }

    /// The devices of the dead member whose row this process has taken are known to its slots now.
    pub(crate) fn forget_device_writes(&self) {
        self.control.processes()[self.me.row as usize].flags.fetch_and(!FLAG_DEVICE_WRITES, SeqCst);
        crate::crash_point::pass("process.inherited");
    }

    pub(crate) fn device_writes(&self, row: u32) -> bool {
        self.control.processes()[row as usize].flags.load(Acquire) & FLAG_DEVICE_WRITES != 0
    }
}
