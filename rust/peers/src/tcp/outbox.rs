//! What a server sends: small things together, large things as they lie.

use std::io::Result;

use super::socket::Socket;

/// Up to here a copy costs less than a system call.
const SMALL_BYTES_MAX: usize = 8 << 10;
const PENDING_BYTES_MAX: usize = 64 << 10;

/// Collects small pieces until a large one, or the end of an answer, takes them along.
pub(super) struct Outbox<'a> {
    socket: &'a Socket,
    pending: Vec<u8>,
}

impl<'a> Outbox<'a> {
    pub(super) fn new(socket: &'a Socket) -> Self {
        Self { socket, pending: Vec::with_capacity(PENDING_BYTES_MAX) }
    }

    /// Send `bytes` after all that came before.
    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.len() <= SMALL_BYTES_MAX && self.pending.len() + bytes.len() <= PENDING_BYTES_MAX {
            self.pending.extend_from_slice(bytes);
            return Ok(());
        }
        let sent = self.socket.write_both(&self.pending, bytes);
        self.pending.clear();
        sent
    }

    /// Send what is left.
    pub(super) fn flush(&mut self) -> Result<()> {
        let sent = self.socket.write_both(&self.pending, &[]);
        self.pending.clear();
        sent
    }
}
