//! The kernel's lock table, in place of `liveness.rs`: one word per process row, 0 or the description that holds it.

use std::fs::File;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::limits::PROCESSES_MAX;
use crate::sync::{AtomicU64, SeqCst};

/// Lock bytes of one control file.
pub(crate) struct Locks([AtomicU64; PROCESSES_MAX]);

impl Locks {
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// A process is dead: the kernel drops what its description `number` held.
    pub(crate) fn drop_all_of(&self, number: u64) {
        for word in &self.0 {
            let _held_by_another = word.compare_exchange(number, 0, SeqCst, SeqCst);
        }
    }
}

/// One open file description.
pub(crate) struct LockFile {
    locks: Arc<Locks>,
    number: u64,
    file: File,
}

impl LockFile {
    /// Of a pool with files, which no model has.
    pub(crate) fn new(file: File) -> Result<Self> {
        Ok(Self { locks: Arc::new(Locks::new()), number: 0, file })
    }

    pub(crate) fn of(locks: &Arc<Locks>, number: u64) -> Result<Self> {
        let file = File::open("/dev/null").map_err(|error| Error::refused(error.to_string()))?;
        Ok(Self { locks: Arc::clone(locks), number, file })
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// What is claimed through it, in anonymous memory, needs no claim.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn forked(&self) -> bool {
        false
    }

    pub(crate) fn try_lock(&self, row: u32) -> Result<bool> {
        let outcome = self.locks.0[row as usize].compare_exchange(0, self.number, SeqCst, SeqCst);
        Ok(outcome.is_ok() || outcome == Err(self.number))
    }

    pub(crate) fn unlock(&self, row: u32) {
        let _not_ours = self.locks.0[row as usize].compare_exchange(self.number, 0, SeqCst, SeqCst);
    }

    pub(crate) fn held_by_other(&self, row: u32) -> bool {
        // A system call goes to the kernel's table, never to a stale copy of it.
        let holder = self.locks.0[row as usize].fetch_or(0, SeqCst);
        holder != 0 && holder != self.number
    }
}
