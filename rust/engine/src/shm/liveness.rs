//! Who is alive: each process holds an OFD lock on the byte of its row, and the kernel drops it on any death.
//!
//! No process ids (they mean nothing across containers) and no heartbeats (a slow process is not a dead one). OFD
//! locks belong to the open file description, so closing another descriptor of the file does not lose them, and they
//! work across PID namespaces. A forked child shares the description: `fork.rs` closes its copy.

use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

use crate::error::{Error, Result};
use crate::shm::fork::ForkGuard;

/// The lock bytes lie far behind the end of the file, where nothing else is ever locked.
const LOCK_BASE: i64 = 1 << 40;

/// The one descriptor of the control file that carries this process's lock.
pub(crate) struct LockFile {
    file: ManuallyDrop<File>,
    guard: ForkGuard,
}

impl LockFile {
    pub(crate) fn new(file: File) -> Result<Self> {
        let guard = ForkGuard::new(file.as_raw_fd())
            .ok_or_else(|| Error::busy("this process has too many pools open: close some"))?;
        Ok(Self { file: ManuallyDrop::new(file), guard })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn forked(&self) -> bool {
        self.guard.forked()
    }

    /// Take the lock of `row` if nobody has it.
    pub(crate) fn try_lock(&self, row: u32) -> Result<bool> {
        match fcntl(self.file.as_fd(), FcntlArg::F_OFD_SETLK(&record(row, libc::F_WRLCK))) {
            Ok(_) => Ok(true),
            Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
            Err(error) => Err(Error::refused(format!(
                "this file system has no OFD locks ({}): choose another shm_dir, such as /dev/shm",
                error.desc()
            ))),
        }
    }

    /// Give the lock of `row` back.
    pub(crate) fn unlock(&self, row: u32) {
        if let Err(error) = fcntl(self.file.as_fd(), FcntlArg::F_OFD_SETLK(&record(row, libc::F_UNLCK))) {
            log::warn!("pegaflow: cannot unlock process row {row}: {}", error.desc());
        }
    }

    /// Whether another process holds the lock of `row`. In doubt it does: nobody is declared dead by an error.
    pub(crate) fn held_by_other(&self, row: u32) -> bool {
        held_by_other(&self.file, row)
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        if !self.guard.forked() {
            self.guard.release();
            // SAFETY: dropped once, here; in a forked child the descriptor is already closed and must not be again.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

/// Whether a process other than the owner of `file` holds the lock of `row`.
pub(crate) fn held_by_other(file: &File, row: u32) -> bool {
    let mut probe = record(row, libc::F_WRLCK);
    match fcntl(file.as_fd(), FcntlArg::F_OFD_GETLK(&mut probe)) {
        Ok(_) => i32::from(probe.l_type) != libc::F_UNLCK,
        Err(_) => true,
    }
}

fn record(row: u32, kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: LOCK_BASE + i64::from(row),
        l_len: 1,
        l_pid: 0,
    }
}
