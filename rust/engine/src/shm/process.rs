//! Rows of the process table: registering, joining a leader, and telling the living from the dead.

use crate::error::{Error, Result};
use crate::limits::PROCESSES_MAX;
use crate::shm::clock::unix_seconds;
use crate::shm::control::Control;
use crate::shm::core::Core;
use crate::shm::liveness::LockFile;
use crate::shm::rows::{ProcessRow, store_label};
use crate::sync::{Acquire, SeqCst};

/// What a process row is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessState {
    /// Nobody's; the epoch of the last user stays.
    Free,
    /// In use, by a living process or one that died unnoticed.
    Alive,
    /// Its process is dead and what it left behind is being cleaned up.
    Reaping,
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
        _ => ProcessState::Free,
    };
    (word >> 8, state)
}

pub(crate) fn store(row: &ProcessRow, epoch: u64, state: ProcessState) {
    row.state.store(epoch << 8 | state as u64, SeqCst);
}

/// Take a free row: its lock byte first, then the row, so that a row in use always has had a lock.
pub(crate) fn register(control: &Control, lock: &LockFile, label: &str) -> Result<Member> {
    for (index, row) in control.processes().iter().enumerate() {
        let index = index as u32;
        if load(row).1 != ProcessState::Free || !lock.try_lock(index)? {
            continue;
        }
        crate::crash_point::pass("process.locked");
        let (epoch, state) = load(row);
        if state != ProcessState::Free {
            lock.unlock(index);
            continue;
        }
        let epoch = epoch + 1;
        row.leader.store(0, SeqCst);
        row.flags.store(0, SeqCst);
        row.pid.store(u64::from(std::process::id()), SeqCst);
        row.started_unix_s.store(unix_seconds(), SeqCst);
        store_label(&row.label, label);
        store(row, epoch, ProcessState::Alive);
        crate::crash_point::pass("process.registered");
        return Ok(Member { row: index, epoch });
    }
    Err(Error::busy(format!(
        "all {PROCESSES_MAX} process rows of the pool are taken: stop some processes or use another pool_name"
    )))
}

impl Core {
    /// Whether the process behind a lock word or leader field is surely dead.
    pub(crate) fn is_dead(&self, word: u64) -> bool {
        let Some(member) = Member::decode(word) else { return true };
        if member.row == self.me.row {
            return member.epoch != self.me.epoch;
        }
        let (epoch, state) = load(&self.control.processes()[member.row as usize]);
        epoch != member.epoch || state != ProcessState::Alive || !self.lock_file.held_by_other(member.row)
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
        self.control.processes().iter().enumerate().any(|(index, row)| {
            row.leader.load(SeqCst) == leader.encode() && {
                let (epoch, state) = load(row);
                let follower = Member { row: index as u32, epoch };
                state == ProcessState::Alive && !self.is_dead(follower.encode())
            }
        })
    }

    /// Say that devices may write this process's slots, so that they wait in quarantine after its death.
    pub(crate) fn set_device_writes(&self) {
        self.control.processes()[self.me.row as usize].flags.fetch_or(1, SeqCst);
    }

    pub(crate) fn device_writes(&self, row: u32) -> bool {
        self.control.processes()[row as usize].flags.load(Acquire) & 1 == 1
    }
}
