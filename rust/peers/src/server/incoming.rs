//! Connections to the control plane: so many at a time, and none that is silent.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};
use tokio_stream::Stream;
use tonic::transport::server::Connected;

use super::sessions::Mark;
use crate::limits::{CONNECTIONS_MAX, SERVE_INTERVAL, SESSION_SILENCE_MAX};

/// Takes connections from a listener.
pub(crate) struct Incoming {
    listener: TcpListener,
    permits: Arc<Semaphore>,
    /// Until when none is taken after an error: too many open files do not become fewer by asking again at once.
    rest: Option<Pin<Box<Sleep>>>,
}

impl Incoming {
    pub(crate) fn new(listener: TcpListener) -> Self {
        Self { listener, permits: Arc::new(Semaphore::new(CONNECTIONS_MAX)), rest: None }
    }
}

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if self.rest.as_mut().is_some_and(|rest| rest.as_mut().poll(context).is_pending()) {
                return Poll::Pending;
            }
            self.rest = None;
            let stream = match self.listener.poll_accept(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(_)) => {
                    self.rest = Some(Box::pin(sleep(SERVE_INTERVAL)));
                    continue;
                }
                Poll::Ready(Ok((stream, _))) => stream,
            };
            // One too many is closed at once: the client takes that for a failure, and leaves us alone for a while.
            let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() else { continue };
            if stream.set_nodelay(true).is_ok() {
                return Poll::Ready(Some(Ok(Connection::new(stream, permit))));
            }
        }
    }
}

/// One connection. It fails when nothing has come for [`SESSION_SILENCE_MAX`]: pings are answered by whoever lives.
pub(crate) struct Connection {
    stream: TcpStream,
    mark: Arc<Mark>,
    silence: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    fn new(stream: TcpStream, permit: OwnedSemaphorePermit) -> Self {
        Self { stream, mark: Arc::new(Mark), silence: Box::pin(sleep(SESSION_SILENCE_MAX)), _permit: permit }
    }
}

impl Connected for Connection {
    type ConnectInfo = Arc<Mark>;

    fn connect_info(&self) -> Self::ConnectInfo {
        Arc::clone(&self.mark)
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(context, buffer) {
            self.silence.as_mut().reset(Instant::now() + SESSION_SILENCE_MAX);
            return Poll::Ready(read);
        }
        match self.silence.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
