//! I/O by io_uring, with buffers that the kernel knows from the start.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};

use super::buffer::Buffers;
use super::file::claim_space_within;
use super::io::{Completion, Direction, Io, Operation};
use crate::error::{Error, ErrorKind, Result};

/// How long a drop waits for what the kernel still has; after it the buffers are left to the kernel for good.
const DROP_WAIT_MAX: Duration = Duration::from_secs(1);

/// One ring for all files.
pub(crate) struct UringIo {
    ring: IoUring,
    files: Vec<File>,
    /// Whether the kernel has the buffers mapped already.
    registered: bool,
    next: u64,
    /// What the kernel has, by its own number, since tokens belong to the caller.
    on_their_way: HashMap<u64, Operation>,
    refused: Vec<Completion>,
    /// The process that made it. A forked child shares the ring and must not take the answers of its parent.
    owner: u32,
}

impl UringIo {
    /// A ring for `depth` operations on `files` with `buffers`, none of which has been taken yet.
    pub(crate) fn new(files: Vec<File>, depth: u16, buffers: &Buffers) -> Result<Self> {
        let unavailable = |why: String| Error::new(ErrorKind::Device, why);
        let ring = IoUring::new(u32::from(depth.max(1)))
            .map_err(|error| unavailable(format!("io_uring is not to be had here: {error}")))?;
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            return Err(unavailable("io_uring of this kernel is too old: 5.11 is needed".into()));
        }
        let registered = register(&ring, buffers);
        let (on_their_way, refused, owner) = (HashMap::new(), Vec::new(), std::process::id());
        Ok(Self { ring, files, registered, next: 0, on_their_way, refused, owner })
    }

    fn push(&mut self, number: u64, operation: Operation) -> std::result::Result<(), Operation> {
        let Some(file) = self.files.get(operation.file as usize) else { return Err(operation) };
        let target = types::Fd(file.as_raw_fd());
        let mut operation = operation;
        let bytes = operation.range.len() as u32;
        let index = operation.buffer.number();
        let address = operation.buffer[operation.range.clone()].as_mut_ptr();
        let entry = match (operation.direction, self.registered) {
            (Direction::Read, true) => {
                opcode::ReadFixed::new(target, address, bytes, index).offset(operation.offset).build()
            }
            (Direction::Write, true) => {
                opcode::WriteFixed::new(target, address, bytes, index).offset(operation.offset).build()
            }
            (Direction::Read, false) => opcode::Read::new(target, address, bytes).offset(operation.offset).build(),
            (Direction::Write, false) => opcode::Write::new(target, address, bytes).offset(operation.offset).build(),
            (Direction::Sync, _) => opcode::Fsync::new(target).flags(types::FsyncFlags::DATASYNC).build(),
        };
        // SAFETY: the file is open as long as the ring; the buffer is kept in `on_their_way` until the kernel has
        // answered, and is leaked with its arena if it never does.
        if unsafe { self.ring.submission().push(&entry.user_data(number)) }.is_err() {
            return Err(operation);
        }
        self.on_their_way.insert(number, operation);
        Ok(())
    }

    /// Hand over what was pushed and wait for one answer, at most `wait`.
    fn enter(&mut self, wait: Duration) -> io::Result<()> {
        let outcome = if wait.is_zero() || self.on_their_way.is_empty() {
            self.ring.submit()
        } else {
            let time = types::Timespec::from(wait);
            self.ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&time))
        };
        match outcome {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY) => Ok(()),
                _ => Err(error),
            },
        }
    }

    fn collect(&mut self, done: &mut Vec<Completion>) {
        for entry in self.ring.completion() {
            let Some(operation) = self.on_their_way.remove(&entry.user_data()) else { continue };
            let result = usize::try_from(entry.result()).map_err(|_| io::Error::from_raw_os_error(-entry.result()));
            done.push(Completion { operation, result });
        }
    }
}

/// Have the kernel map the buffers once and for all. It may refuse (RLIMIT_MEMLOCK): then it maps them every time.
fn register(ring: &IoUring, buffers: &Buffers) -> bool {
    let vectors: Vec<libc::iovec> = buffers
        .ranges()
        .into_iter()
        .map(|(address, bytes)| libc::iovec { iov_base: address.cast(), iov_len: bytes })
        .collect();
    // SAFETY: the ranges belong to the arena of the buffers. It may be freed only when no operation is on its way and
    // the ring is gone or unused: the kernel holds pages of its own reference, and nothing else uses the mapping.
    match unsafe { ring.submitter().register_buffers(&vectors) } {
        Ok(()) => true,
        Err(error) => {
            log::info!("pegaflow: the kernel does not register buffers ({error}): SSD reads cost a little more CPU");
            false
        }
    }
}

impl Io for UringIo {
    fn submit(&mut self, operation: Operation) {
        let number = self.next;
        self.next += 1;
        if let Err(operation) = self.push(number, operation) {
            self.refused.push(Completion { operation, result: Err(io::ErrorKind::ResourceBusy.into()) });
        }
    }

    fn poll(&mut self, wait: Duration, done: &mut Vec<Completion>) {
        let before = done.len();
        done.append(&mut self.refused);
        self.collect(done);
        let wait = if done.len() > before { Duration::ZERO } else { wait };
        if let Err(error) = self.enter(wait) {
            log::debug!("pegaflow: io_uring_enter failed: {error}");
            // What the kernel did not take stays pushed, and is overdue some time; no busy loop until then.
            std::thread::sleep(wait.min(Duration::from_millis(1)));
        }
        self.collect(done);
    }

    fn resize(&mut self, file: u32, bytes: u64, limit: Duration) -> io::Result<()> {
        claim_space_within(&self.files[file as usize], bytes, limit)
    }
}

impl Drop for UringIo {
    fn drop(&mut self) {
        let deadline = Instant::now() + DROP_WAIT_MAX;
        let mut done = Vec::new();
        let mine = self.owner == std::process::id();
        while mine && !self.on_their_way.is_empty() && Instant::now() < deadline {
            if self.enter(Duration::from_millis(10)).is_err() {
                break;
            }
            self.collect(&mut done);
        }
        for operation in std::mem::take(&mut self.on_their_way).into_values() {
            // The kernel may still write there.
            std::mem::forget(operation);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_forked_child_hands_nothing_to_the_kernel() {
        let folder = super::super::io_tests::Folder::new("forked");
        let path = folder.0.join("file");
        for (owner, written) in [(0, 0), (std::process::id(), 7)] {
            let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
            let mut buffers = Buffers::new(1, 4096);
            let Ok(mut io) = UringIo::new(vec![file.try_clone().unwrap()], 1, &buffers) else { return };
            io.resize(0, 4096, Duration::from_secs(10)).unwrap();
            let mut buffer = buffers.take().unwrap();
            buffer.fill(7);
            io.submit(Operation { token: 1, file: 0, direction: Direction::Write, offset: 0, buffer, range: 0..4096 });
            io.owner = owner;
            drop(io);
            let mut byte = [1];
            file.read_at(&mut byte, 100).unwrap();
            assert_eq!(byte[0], written);
        }
    }
}
