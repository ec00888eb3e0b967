//! One connection to the control plane, with or without TLS.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::oneshot::Receiver;
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::{Accept, TlsAcceptor};
use tonic::transport::server::Connected;

use super::mark::Mark;
use crate::limits::{ADMISSION_TIME_MAX, SESSION_SILENCE_MAX};

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

enum Socket {
    /// Both sides are still showing each other their certificates: part of the first read or write.
    Greeting(Box<Accept<TcpStream>>),
    Ready(Box<dyn Stream>),
    /// The other side has shown nothing that is believed.
    Failed,
}

impl Socket {
    fn poll_stream(&mut self, context: &mut Context<'_>) -> Poll<io::Result<Pin<&mut dyn Stream>>> {
        if let Self::Greeting(accept) = self {
            let greeted = ready!(Pin::new(accept).poll(context));
            let failed = greeted.as_ref().err().map(io::Error::kind);
            *self = greeted.map_or(Self::Failed, |stream| Self::Ready(Box::new(stream)));
            if let Some(kind) = failed {
                return Poll::Ready(Err(kind.into()));
            }
        }
        match self {
            Self::Ready(stream) => Poll::Ready(Ok(Pin::new(stream))),
            Self::Greeting(_) | Self::Failed => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }
}

/// One connection. It fails when nothing has come for [`SESSION_SILENCE_MAX`]: pings are answered by whoever lives.
/// Until somebody who is known has called it lasts for [`ADMISSION_TIME_MAX`] at most, whatever comes.
pub(crate) struct Connection {
    socket: Socket,
    mark: Arc<Mark>,
    begun: Instant,
    heard: Instant,
    /// When is looked whether it is over.
    look: Pin<Box<Sleep>>,
    /// Ends when somebody else is to have the place of a stranger; `None` once this is none, or has gone.
    place: Option<Receiver<()>>,
}

impl Connection {
    pub(crate) fn new(stream: TcpStream, tls: Option<Arc<ServerConfig>>, mark: Mark, place: Receiver<()>) -> Self {
        let socket = match tls {
            Some(config) => Socket::Greeting(Box::new(TlsAcceptor::from(config).accept(stream))),
            None => Socket::Ready(Box::new(stream)),
        };
        let begun = Instant::now();
        let look = Box::pin(sleep_until(begun + ADMISSION_TIME_MAX));
        Self { socket, mark: Arc::new(mark), begun, heard: begun, look, place: Some(place) }
    }

    fn ends(&self) -> Instant {
        if self.mark.is_admitted() { self.heard + SESSION_SILENCE_MAX } else { self.begun + ADMISSION_TIME_MAX }
    }

    /// Whether a stranger has had his time, or his place is needed.
    fn poll_stranger(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if self.mark.is_admitted() {
            self.place = None;
        }
        let Some(place) = &mut self.place else { return Ok(()) };
        let is_needed = Pin::new(place).poll(context).is_ready();
        if !is_needed && Instant::now() < self.ends() {
            return Ok(());
        }
        (self.socket, self.place) = (Socket::Failed, None);
        Err(if is_needed { io::ErrorKind::ConnectionAborted } else { io::ErrorKind::TimedOut }.into())
    }

    /// Do something with the stream, unless the connection is over.
    fn poll<T>(
        &mut self,
        context: &mut Context<'_>,
        work: impl FnOnce(Pin<&mut dyn Stream>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        self.poll_stranger(context)?;
        let done = match self.socket.poll_stream(context) {
            Poll::Ready(Ok(stream)) => work(stream, context),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => Poll::Pending,
        };
        if done.is_ready() {
            return done;
        }
        while self.look.as_mut().poll(context).is_ready() {
            let ends = self.ends();
            if ends <= Instant::now() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            self.look.as_mut().reset(ends);
        }
        Poll::Pending
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
        let read = self.poll(context, |stream, context| stream.poll_read(context, buffer));
        if matches!(read, Poll::Ready(Ok(()))) {
            self.heard = Instant::now();
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll(context, |stream, context| stream.poll_write(context, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(context, |stream, context| stream.poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(context, |stream, context| stream.poll_shutdown(context))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll(context, |stream, context| stream.poll_write_vectored(context, pieces))
    }

    fn is_write_vectored(&self) -> bool {
        matches!(&self.socket, Socket::Ready(stream) if stream.is_write_vectored())
    }
}
