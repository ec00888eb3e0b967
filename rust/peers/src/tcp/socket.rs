//! One connected stream: its options, and waits that end.

use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Read, Result, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};

use crate::limits::{STREAM_PROBE_INTERVAL, STREAM_PROBES_MAX, STREAM_STALL_MAX};

/// Time limits of the kernel are set anew only when they are off by more than this, to spare system calls.
const WAIT_STEP: Duration = Duration::from_millis(20);

/// A stream that one thread reads and writes, and that any thread may shut down.
pub(super) struct Socket {
    stream: Arc<TcpStream>,
    read_limit: Duration,
}

impl Socket {
    /// Set the options. Buffers keep the sizes that the kernel finds: a size that is set by hand ends its tuning.
    pub(super) fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        let socket = SockRef::from(&stream);
        let probes = TcpKeepalive::new()
            .with_time(STREAM_PROBE_INTERVAL)
            .with_interval(STREAM_PROBE_INTERVAL)
            .with_retries(STREAM_PROBES_MAX);
        socket.set_tcp_keepalive(&probes)?;
        socket.set_tcp_user_timeout(Some(STREAM_STALL_MAX))?;
        stream.set_write_timeout(Some(STREAM_STALL_MAX))?;
        stream.set_read_timeout(Some(STREAM_STALL_MAX))?;
        Ok(Self { stream: Arc::new(stream), read_limit: STREAM_STALL_MAX })
    }

    /// For shutting it down from elsewhere.
    pub(super) fn handle(&self) -> Arc<TcpStream> {
        Arc::clone(&self.stream)
    }

    /// Read something into the buffers: at least one byte, unless the stream has ended. Of kind *timed out* once
    /// `deadline` has passed or nothing has come for [`STREAM_STALL_MAX`].
    pub(super) fn read(&mut self, buffers: &mut [IoSliceMut<'_>], deadline: Instant) -> Result<usize> {
        let started = Instant::now();
        let end = deadline.min(started + STREAM_STALL_MAX);
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            self.limit_reads(left)?;
            match (&*self.stream).read_vectored(buffers) {
                Err(error) if is_wait(&error) => {}
                other => return other,
            }
        }
    }

    fn limit_reads(&mut self, left: Duration) -> Result<()> {
        if self.read_limit > left + WAIT_STEP || self.read_limit < left / 2 {
            self.read_limit = left.max(Duration::from_millis(1));
            self.stream.set_read_timeout(Some(self.read_limit))?;
        }
        Ok(())
    }

    /// Write all of the two buffers.
    pub(super) fn write_both(&self, first: &[u8], second: &[u8]) -> Result<()> {
        let mut slices = [IoSlice::new(first), IoSlice::new(second)];
        let mut rest = &mut slices[..];
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            match (&*self.stream).write_vectored(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => IoSlice::advance_slices(&mut rest, count),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_wait(&error) => return Err(ErrorKind::TimedOut.into()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether nothing has come since the last answer: neither bytes nor the end of the stream.
    pub(super) fn is_silent(&self) -> bool {
        let asked = self.stream.set_nonblocking(true).and_then(|()| self.stream.peek(&mut [0]));
        let back = self.stream.set_nonblocking(false);
        back.is_ok() && asked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        end(&self.stream);
    }
}

/// Shut a stream down: whoever reads or writes it stops.
pub(super) fn end(stream: &TcpStream) {
    let _may_be_gone = stream.shutdown(Shutdown::Both);
}

fn is_wait(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}
