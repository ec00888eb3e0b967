//! I/O by threads that call pread and pwrite: for kernels and containers without io_uring.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::file::claim_space_within;
use super::io::{Completion, Direction, Io, Operation};
use crate::error::{Error, ErrorKind, Result};

#[derive(Default)]
struct Work {
    waiting: VecDeque<Operation>,
    closed: bool,
}

struct Shared {
    work: Mutex<Work>,
    arrived: Condvar,
    files: Vec<File>,
}

/// A pool of threads, one per operation that may be on its way.
pub(crate) struct ThreadIo {
    shared: Arc<Shared>,
    answers: Receiver<Completion>,
    /// The process that made it: a forked child has none of its threads, and perhaps a lock that one of them held.
    owner: u32,
}

impl ThreadIo {
    /// `depth` threads over `files`.
    pub(crate) fn new(files: Vec<File>, depth: u16) -> Result<Self> {
        let shared = Arc::new(Shared { work: Mutex::default(), arrived: Condvar::new(), files });
        let (sender, answers) = channel();
        let io = Self { shared: shared.clone(), answers, owner: std::process::id() };
        for number in 0..depth.max(1) {
            let (shared, sender) = (shared.clone(), sender.clone());
            std::thread::Builder::new()
                .name(format!("pega-ssd-{number}"))
                .spawn(move || run(&shared, &sender))
                .map_err(|error| {
                    Error::new(ErrorKind::Device, format!("cannot start a thread for the SSD: {error}"))
                })?;
        }
        Ok(io)
    }
}

fn run(shared: &Shared, sender: &Sender<Completion>) {
    loop {
        let mut work = shared.work.lock().unwrap_or_else(PoisonError::into_inner);
        let mut operation = loop {
            if let Some(operation) = work.waiting.pop_front() {
                break operation;
            }
            if work.closed {
                return;
            }
            work = shared.arrived.wait(work).unwrap_or_else(PoisonError::into_inner);
        };
        drop(work);
        let result = transfer(&shared.files, &mut operation);
        // Nobody listens any more once the pool was dropped; the buffer is dropped with the message then.
        let _unheard = sender.send(Completion { operation, result });
    }
}

fn transfer(files: &[File], operation: &mut Operation) -> io::Result<usize> {
    let file = files.get(operation.file as usize).ok_or(io::ErrorKind::NotFound)?;
    let bytes = &mut operation.buffer[operation.range.clone()];
    match operation.direction {
        Direction::Read => file.read_at(bytes, operation.offset),
        Direction::Write => file.write_at(bytes, operation.offset),
        Direction::Sync => file.sync_data().map(|()| 0),
    }
}

impl Io for ThreadIo {
    fn submit(&mut self, operation: Operation) {
        self.shared.work.lock().unwrap_or_else(PoisonError::into_inner).waiting.push_back(operation);
        self.shared.arrived.notify_one();
    }

    fn poll(&mut self, wait: Duration, done: &mut Vec<Completion>) {
        let before = done.len();
        done.extend(self.answers.try_iter());
        if done.len() == before && !wait.is_zero() {
            done.extend(self.answers.recv_timeout(wait));
            done.extend(self.answers.try_iter());
        }
    }

    fn resize(&mut self, file: u32, bytes: u64, limit: Duration) -> io::Result<()> {
        claim_space_within(&self.shared.files[file as usize], bytes, limit)
    }
}

impl Drop for ThreadIo {
    /// Threads end by themselves once their disk answers. None is waited for: a disk may hang for ever.
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            return;
        }
        let mut work = self.shared.work.lock().unwrap_or_else(PoisonError::into_inner);
        work.closed = true;
        work.waiting.clear();
        self.shared.arrived.notify_all();
    }
}
