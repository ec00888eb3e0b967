//! What a client receives: small things by way of a buffer, large things straight to where they belong.

use std::io::{ErrorKind, IoSliceMut, Result};
use std::time::Instant;

use super::socket::Socket;

/// Enough for what stands between two parts, and little to copy when a large part follows.
const BUFFER_BYTES: usize = 16 << 10;

/// A stream and what was read ahead of it.
pub(super) struct Inbox {
    socket: Socket,
    buffer: Box<[u8]>,
    start: usize,
    stop: usize,
}

impl Inbox {
    pub(super) fn new(socket: Socket) -> Self {
        Self { socket, buffer: vec![0; BUFFER_BYTES].into_boxed_slice(), start: 0, stop: 0 }
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Whether there is nothing to read, not even the end of the stream.
    pub(super) fn is_silent(&self) -> bool {
        self.start == self.stop && self.socket.is_silent()
    }

    /// Wait until there is something to read.
    pub(super) fn wait(&mut self, deadline: Instant) -> Result<()> {
        if self.start == self.stop {
            let count = self.socket.read(&mut [IoSliceMut::new(&mut self.buffer)], deadline)?;
            if count == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            (self.start, self.stop) = (0, count);
        }
        Ok(())
    }

    /// Fill `target`.
    pub(super) fn read_exact(&mut self, target: &mut [u8], deadline: Instant) -> Result<()> {
        let mut filled = 0;
        while filled < target.len() {
            filled += self.read_some(&mut target[filled..], true, deadline)?;
        }
        Ok(())
    }

    /// Read at least one byte to the beginning of `target`. With `ahead`, what follows may be taken into the buffer
    /// in the same go.
    pub(super) fn read_some(&mut self, target: &mut [u8], ahead: bool, deadline: Instant) -> Result<usize> {
        let kept = self.stop - self.start;
        if kept > 0 {
            let count = kept.min(target.len());
            target[..count].copy_from_slice(&self.buffer[self.start..self.start + count]);
            self.start += count;
            return Ok(count);
        }
        let room = target.len();
        let spare: &mut [u8] = if ahead { &mut self.buffer } else { &mut [] };
        let count = self.socket.read(&mut [IoSliceMut::new(target), IoSliceMut::new(spare)], deadline)?;
        if count == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        (self.start, self.stop) = (0, count.saturating_sub(room));
        Ok(count.min(room))
    }
}
