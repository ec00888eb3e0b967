//! What the tier needs of an operating system: reads and writes that are started and answered later.

use std::io;
use std::ops::Range;
use std::time::Duration;

use super::buffer::Buffer;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the file into the buffer.
    Read,
    /// From the buffer into the file.
    Write,
    /// Make all answered writes of the file last. Moves nothing; the buffer says that an operation is on its way.
    Sync,
}

/// One read, write or sync. Offset and length are multiples of the file's block.
pub struct Operation {
    /// Comes back with the answer.
    pub token: u64,
    /// Number of the file.
    pub file: u32,
    /// Which way.
    pub direction: Direction,
    /// In the file, in bytes.
    pub offset: u64,
    /// Belongs to the I/O layer until it is answered.
    pub buffer: Buffer,
    /// Bytes of the buffer that are meant.
    pub range: Range<usize>,
}

/// The answer to one operation.
pub struct Completion {
    /// The operation with its buffer.
    pub operation: Operation,
    /// Bytes moved, which may be fewer than asked for, or why none were.
    pub result: io::Result<usize>,
}

/// Reads and writes of several files.
///
/// Implementations promise: every operation is answered at most once; a buffer is given back with its answer and is
/// neither read nor written afterwards; if an answer never comes, the buffer is never given back, not even by a drop.
/// The caller keeps the number of unanswered operations at or below the depth that it asked for.
pub trait Io: Send {
    /// Start `operation`; at the latest with the next [`Self::poll`].
    fn submit(&mut self, operation: Operation);

    /// Append what was answered; waits up to `wait` for the first answer.
    fn poll(&mut self, wait: Duration, done: &mut Vec<Completion>);

    /// Make `file` as long as `bytes` and claim its space; what is longer is cut. Blocks, no longer than `limit`.
    fn resize(&mut self, file: u32, bytes: u64, limit: Duration) -> io::Result<()>;
}
