//! Operations that end: short ones go on where they stopped, those without an answer are given up.

use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

use super::buffer::{Buffer, Buffers};
use super::io::{Completion, Direction, Io, Operation};
use crate::limits::SSD_RETRIES_MAX;

/// Where bytes are, or are to go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) file: u32,
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
}

/// An operation that has ended. `buffer` is missing if the kernel still has it.
pub(crate) struct Ended<P> {
    token: u64,
    pub(crate) purpose: P,
    pub(crate) extent: Extent,
    pub(crate) buffer: Option<Buffer>,
    pub(crate) result: io::Result<()>,
}

struct Flight<P> {
    /// `None`: given up, and its buffer is awaited only to be used again.
    purpose: Option<P>,
    extent: Extent,
    started: Instant,
    retries: u32,
}

/// Reads and writes under way, each with what it is for.
pub(crate) struct Queue<P> {
    io: Box<dyn Io>,
    buffers: Buffers,
    block_bytes: usize,
    hang_max: Duration,
    next: u64,
    flights: HashMap<u64, Flight<P>>,
    done: Vec<Completion>,
    stash: Vec<Ended<P>>,
}

impl<P: Copy> Queue<P> {
    /// `block_bytes`: the largest of all files; short operations go on at its multiples.
    pub(crate) fn new(io: Box<dyn Io>, buffers: Buffers, block_bytes: usize, hang_max: Duration) -> Self {
        let (flights, done, stash) = (HashMap::new(), Vec::new(), Vec::new());
        Self { io, buffers, block_bytes, hang_max, next: 0, flights, done, stash }
    }

    /// Short operations go on at multiples of `block_bytes`.
    pub(crate) fn set_block(&mut self, block_bytes: usize) {
        self.block_bytes = block_bytes;
    }

    pub(crate) fn buffers(&mut self) -> &mut Buffers {
        &mut self.buffers
    }

    /// Operations that have not ended; one that was given up has, though its answer may still come.
    pub(crate) fn in_flight(&self) -> usize {
        self.flights.values().filter(|flight| flight.purpose.is_some()).count()
    }

    /// Move the first `extent.bytes` of `buffer`.
    pub(crate) fn start(&mut self, purpose: P, direction: Direction, extent: Extent, buffer: Buffer) {
        let token = self.next;
        self.next += 1;
        self.flights.insert(token, Flight { purpose: Some(purpose), extent, started: Instant::now(), retries: 0 });
        let Extent { file, offset, bytes } = extent;
        self.io.submit(Operation { token, file, direction, offset, buffer, range: 0..bytes });
    }

    /// What has ended; waits up to `wait` for the first.
    pub(crate) fn poll(&mut self, wait: Duration) -> Vec<Ended<P>> {
        let mut ended = std::mem::take(&mut self.stash);
        let wait = if ended.is_empty() && !self.flights.is_empty() { wait } else { Duration::ZERO };
        let mut done = std::mem::take(&mut self.done);
        self.io.poll(wait, &mut done);
        for completion in done.drain(..) {
            ended.extend(self.settle(completion));
        }
        self.done = done;
        self.give_up_overdue(&mut ended);
        ended
    }

    /// Go on with, or end, what was answered.
    fn settle(&mut self, completion: Completion) -> Option<Ended<P>> {
        let Completion { mut operation, result } = completion;
        let flight = self.flights.get_mut(&operation.token)?;
        let left = operation.range.len();
        let again = match result {
            Ok(moved) if moved >= left => None,
            Ok(moved) => {
                let whole = moved - moved % self.block_bytes;
                operation.range.start += whole;
                operation.offset += whole as u64;
                let nothing = match operation.direction {
                    Direction::Read => io::ErrorKind::UnexpectedEof,
                    Direction::Write | Direction::Sync => io::ErrorKind::WriteZero,
                };
                Some((whole > 0, io::Error::from(nothing)))
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Some((false, error)),
            Err(error) => return self.end(operation, Err(error)),
        };
        match again {
            None => self.end(operation, Ok(())),
            Some((progress, error)) => {
                flight.retries = if progress { 0 } else { flight.retries + 1 };
                if flight.retries > SSD_RETRIES_MAX {
                    return self.end(operation, Err(error));
                }
                self.io.submit(operation);
                None
            }
        }
    }

    fn end(&mut self, operation: Operation, result: io::Result<()>) -> Option<Ended<P>> {
        let flight = self.flights.remove(&operation.token)?;
        match flight.purpose {
            Some(purpose) => Some(Ended {
                token: operation.token,
                purpose,
                extent: flight.extent,
                buffer: Some(operation.buffer),
                result,
            }),
            None => {
                self.buffers.give(operation.buffer);
                None
            }
        }
    }

    fn give_up_overdue(&mut self, ended: &mut Vec<Ended<P>>) {
        let now = Instant::now();
        for (&token, flight) in &mut self.flights {
            if now.duration_since(flight.started) > self.hang_max
                && let Some(purpose) = flight.purpose.take()
            {
                let result = Err(io::ErrorKind::TimedOut.into());
                ended.push(Ended { token, purpose, extent: flight.extent, buffer: None, result });
            }
        }
    }

    /// One operation of `purpose`, waited for; what else ends meanwhile comes with the next [`Self::poll`].
    pub(crate) fn run(
        &mut self,
        purpose: P,
        direction: Direction,
        extent: Extent,
        buffer: Buffer,
    ) -> (io::Result<()>, Option<Buffer>) {
        let mut ended = self.run_all(purpose, direction, vec![(extent, buffer)]);
        ended.pop().unwrap_or_else(|| (Err(io::ErrorKind::TimedOut.into()), None))
    }

    /// As [`Self::run`], for several at a time; the results are in the order of the operations.
    pub(crate) fn run_all(
        &mut self,
        purpose: P,
        direction: Direction,
        operations: Vec<(Extent, Buffer)>,
    ) -> Vec<(io::Result<()>, Option<Buffer>)> {
        let first = self.next;
        for (extent, buffer) in operations {
            self.start(purpose, direction, extent, buffer);
        }
        let mut mine: Vec<_> = (first..self.next).map(|_| None).collect();
        let mut others = std::mem::take(&mut self.stash);
        while mine.iter().any(Option::is_none) {
            for ended in self.poll(Duration::from_millis(100)) {
                match ended.token.checked_sub(first).and_then(|at| mine.get_mut(at as usize)) {
                    Some(place) => *place = Some((ended.result, ended.buffer)),
                    None => others.push(ended),
                }
            }
        }
        self.stash = others;
        mine.into_iter().flatten().collect()
    }

    /// See [`Io::resize`].
    pub(crate) fn resize(&mut self, file: u32, bytes: u64) -> io::Result<()> {
        self.io.resize(file, bytes, self.hang_max)
    }
}
