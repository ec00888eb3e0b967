//! Connections to the control plane: so many of known clients, and of strangers those that came last.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use nix::sys::resource::{Resource, getrlimit};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::sync::oneshot::{self, Sender};
use tokio::time::{Sleep, sleep};
use tokio_stream::Stream;

use super::certificates::Certificates;
use super::connection::Connection;
use super::mark::Mark;
use crate::limits::{CONNECTION_FILES, CONNECTIONS_MAX, SERVE_INTERVAL, STRANGERS_SHARE};

/// Connections of known clients that there is room for in this process.
pub(crate) fn connections_max() -> usize {
    share_of(getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(now, _)| now))
}

fn share_of(files: u64) -> usize {
    usize::try_from(files / CONNECTION_FILES).unwrap_or(usize::MAX).clamp(STRANGERS_SHARE, CONNECTIONS_MAX)
}

/// Takes connections from a listener.
pub(crate) struct Incoming {
    listener: TcpListener,
    /// `None`: without TLS.
    certificates: Option<Certificates>,
    /// For connections over which somebody who is known has called.
    room: Arc<Semaphore>,
    /// Places of the others, the oldest first: whoever may connect at all could have all places else.
    strangers: VecDeque<Sender<()>>,
    strangers_max: usize,
    /// Until when none is taken after an error: too many open files do not become fewer by asking again at once.
    rest: Option<Pin<Box<Sleep>>>,
}

impl Incoming {
    pub(crate) fn new(listener: TcpListener, certificates: Option<Certificates>, connections_max: usize) -> Self {
        let room = Arc::new(Semaphore::new(connections_max));
        let strangers_max = (connections_max / STRANGERS_SHARE).max(1);
        Self { listener, certificates, room, strangers: VecDeque::new(), strangers_max, rest: None }
    }

    /// A place for one more, who is a stranger at first.
    fn place(&mut self) -> oneshot::Receiver<()> {
        self.strangers.retain(|place| !place.is_closed());
        while self.strangers.len() >= self.strangers_max {
            self.strangers.pop_front();
        }
        let (place, taken) = oneshot::channel();
        self.strangers.push_back(place);
        taken
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
            if stream.set_nodelay(true).is_ok() {
                let (mark, place) = (Mark::new(&self.room), self.place());
                let tls = self.certificates.as_mut().map(Certificates::now);
                return Poll::Ready(Some(Ok(Connection::new(stream, tls, mark, place))));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use tokio::io::AsyncReadExt;
    use tokio_stream::StreamExt;
    use tonic::transport::server::Connected;

    use super::*;

    #[test]
    fn connections_take_a_share_of_the_files_that_may_be_open() {
        let shares = [0, 1024, 20_000, u64::MAX].map(share_of);
        assert_eq!(shares, [STRANGERS_SHARE, 256, CONNECTIONS_MAX, CONNECTIONS_MAX]);
    }

    fn within(work: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work);
    }

    async fn listening(connections_max: usize) -> (Incoming, std::net::SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (Incoming::new(listener, None, connections_max), address)
    }

    async fn come(incoming: &mut Incoming, address: std::net::SocketAddr) -> (TcpStream, Connection) {
        let client = TcpStream::connect(address).unwrap();
        (client, incoming.next().await.unwrap().unwrap())
    }

    /// Why a connection from which nothing comes ends.
    async fn end(connection: &mut Connection) -> io::ErrorKind {
        connection.read_u8().await.unwrap_err().kind()
    }

    #[test]
    fn the_oldest_stranger_makes_room_for_the_next_and_a_known_client_for_none() {
        within(async {
            let (mut incoming, address) = listening(2 * STRANGERS_SHARE).await;
            let (_known, known) = come(&mut incoming, address).await;
            assert!(known.connect_info().admit());
            let mut strangers = Vec::new();
            for _ in 0..5 {
                strangers.push(come(&mut incoming, address).await);
            }
            for (_, old) in &mut strangers[..3] {
                assert_eq!(end(old).await, io::ErrorKind::ConnectionAborted);
            }
            // The last ones, which may still show the token.
            let (_client, last) = strangers.pop().unwrap();
            assert!(last.connect_info().admit());
            for mut connection in [known, last] {
                let read = tokio::time::timeout(std::time::Duration::from_millis(1), connection.read_u8()).await;
                assert!(read.is_err(), "it is waited for what comes");
            }
        });
    }

    #[test]
    fn known_clients_have_so_many_connections_and_no_more() {
        within(async {
            let (mut incoming, address) = listening(2).await;
            let mut all = Vec::new();
            for is_there_room in [true, true, false, false] {
                let (client, connection) = come(&mut incoming, address).await;
                assert_eq!(connection.connect_info().admit(), is_there_room);
                assert_eq!(connection.connect_info().admit(), is_there_room, "asked again");
                all.push((client, connection));
            }
            all.remove(0);
            let (_, connection) = all.last().unwrap();
            assert!(connection.connect_info().admit(), "one has gone");
        });
    }
}
