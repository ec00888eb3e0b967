//! Connections to the control plane, so many at a time.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::{Sleep, sleep};
use tokio_stream::Stream;

use super::certificates::Certificates;
use super::connection::Connection;
use crate::limits::{CONNECTIONS_MAX, SERVE_INTERVAL};

/// Takes connections from a listener.
pub(crate) struct Incoming {
    listener: TcpListener,
    /// `None`: without TLS.
    certificates: Option<Certificates>,
    permits: Arc<Semaphore>,
    /// Until when none is taken after an error: too many open files do not become fewer by asking again at once.
    rest: Option<Pin<Box<Sleep>>>,
}

impl Incoming {
    pub(crate) fn new(listener: TcpListener, certificates: Option<Certificates>) -> Self {
        Self { listener, certificates, permits: Arc::new(Semaphore::new(CONNECTIONS_MAX)), rest: None }
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
                let tls = self.certificates.as_mut().map(Certificates::now);
                return Poll::Ready(Some(Ok(Connection::new(stream, tls, permit))));
            }
        }
    }
}
