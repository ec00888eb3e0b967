//! The server's side: a thread that takes streams, and one for each of them that sends from leases.

use std::io::{ErrorKind, IoSliceMut, Result};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pegaflow_engine::checksum::PartHasher;
use socket2::SockRef;

use crate::limits::{CONNECT_TIME_MAX, STREAM_IDLE_MAX, STREAM_PIECE_BYTES, STREAM_STALL_MAX, STREAMS_MAX};
use crate::sync::lock;
use crate::transport::{DataServer, LeasedParts, Sending};

use super::outbox::Outbox;
use super::socket::{self, Socket};
use super::streams::Streams;
use super::wire::{self, ANSWER_TAIL_BYTES, AnswerHead, HELLO_BYTES, REQUEST_HEAD_BYTES, REQUEST_PART_BYTES};

/// What a server of streams has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpCounters {
    /// Streams that were taken.
    pub streams_taken: u64,
    /// Streams for which there was no room.
    pub streams_refused: u64,
    /// Streams that were ended because of what came over them.
    pub streams_garbled: u64,
    /// Parts that were sent whole.
    pub parts_sent: u64,
    /// Parts that were not to be had.
    pub parts_refused: u64,
    /// Bytes of the parts that were sent whole.
    pub bytes_sent: u64,
}

struct Shared {
    parts: Arc<dyn LeasedParts>,
    streams: Streams,
    counters: Mutex<TcpCounters>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Shared {
    fn count(&self, change: impl FnOnce(&mut TcpCounters)) {
        change(&mut lock(&self.counters));
    }

    fn threads(&self) -> Vec<JoinHandle<()>> {
        std::mem::take(&mut *lock(&self.threads))
    }

    /// Keep a thread to wait for in the end, and forget those that have ended.
    fn keep(&self, thread: JoinHandle<()>) {
        let mut threads = lock(&self.threads);
        threads.retain(|one| !one.is_finished());
        threads.push(thread);
    }
}

/// Serves streams on a listening socket until it is dropped.
pub struct TcpServer {
    shared: Arc<Shared>,
    listener: Arc<TcpListener>,
    address: SocketAddr,
    acceptor: Option<JoinHandle<()>>,
}

impl TcpServer {
    /// Send from `parts` to whoever comes to `listener` with a lease.
    pub fn start(listener: TcpListener, parts: Arc<dyn LeasedParts>) -> pegaflow_engine::Result<Self> {
        Self::listen(listener, parts).map_err(|error| {
            let what = format!("cannot serve blocks to peers by TCP ({error}): check ulimit -n and -u");
            pegaflow_engine::Error::new(pegaflow_engine::ErrorKind::Busy, what)
        })
    }

    fn listen(listener: TcpListener, parts: Arc<dyn LeasedParts>) -> Result<Self> {
        listener.set_nonblocking(false)?;
        let address = listener.local_addr()?;
        let listener = Arc::new(listener);
        let shared = Arc::new(Shared {
            parts,
            streams: Streams::new(STREAMS_MAX),
            counters: Mutex::default(),
            threads: Mutex::default(),
        });
        let acceptor = std::thread::Builder::new().name("pega-peer-data".into()).spawn({
            let (shared, listener) = (Arc::clone(&shared), Arc::clone(&listener));
            move || accept(&shared, &listener)
        })?;
        Ok(Self { shared, listener, address, acceptor: Some(acceptor) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Streams that are open now.
    pub fn streams(&self) -> usize {
        self.shared.streams.len()
    }

    /// What it has done so far.
    pub fn counters(&self) -> TcpCounters {
        *lock(&self.shared.counters)
    }
}

impl DataServer for TcpServer {
    fn counters(&self) -> Vec<(&'static str, u64)> {
        let counted = Self::counters(self);
        vec![
            ("streams", self.streams() as u64),
            ("streams_taken", counted.streams_taken),
            ("streams_refused", counted.streams_refused),
            ("streams_garbled", counted.streams_garbled),
            ("parts_sent", counted.parts_sent),
            ("parts_refused", counted.parts_refused),
            ("bytes_sent", counted.bytes_sent),
        ]
    }
}

impl Drop for TcpServer {
    /// Ends all streams and waits for their threads, which never wait for long.
    fn drop(&mut self) {
        let _wakes_the_thread = SockRef::from(&*self.listener).shutdown(Shutdown::Both);
        self.shared.streams.close();
        for thread in self.acceptor.take().into_iter().chain(self.shared.threads()) {
            let _a_panic_was_logged = thread.join();
        }
        // The acceptor may have started one more before it ended.
        for thread in self.shared.threads() {
            let _a_panic_was_logged = thread.join();
        }
    }
}

fn accept(shared: &Arc<Shared>, listener: &TcpListener) {
    loop {
        match listener.accept() {
            Ok((stream, _)) => take(shared, stream),
            // Shut down: there is nothing to accept on any more.
            Err(error) if error.kind() == ErrorKind::InvalidInput => return,
            Err(error) => {
                log::debug!("a stream of a peer could not be taken: {error}");
                // Such as too many open files: not to be asked again at once.
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

fn take(shared: &Arc<Shared>, stream: TcpStream) {
    let Ok(socket) = Socket::new(stream) else { return };
    let Some(id) = shared.streams.add(socket.handle()) else {
        shared.count(|counters| counters.streams_refused += 1);
        return;
    };
    shared.count(|counters| counters.streams_taken += 1);
    let started = std::thread::Builder::new().name("pega-peer-send".into()).spawn({
        let shared = Arc::clone(shared);
        move || {
            if let Err(error) = (StreamServer { shared: &shared, socket, id }).run() {
                log::debug!("a stream of a peer ended: {error}");
                if error.kind() == ErrorKind::InvalidData {
                    shared.count(|counters| counters.streams_garbled += 1);
                }
            }
            shared.streams.remove(id);
        }
    });
    match started {
        Ok(thread) => shared.keep(thread),
        Err(error) => {
            log::warn!("a stream of a peer was refused: no thread could be started: {error}");
            shared.streams.remove(id);
        }
    }
}

/// One stream, on its thread.
struct StreamServer<'a> {
    shared: &'a Shared,
    socket: Socket,
    id: u64,
}

impl StreamServer<'_> {
    fn run(mut self) -> Result<()> {
        let mut hello = [0; HELLO_BYTES];
        self.read(&mut hello, Instant::now() + CONNECT_TIME_MAX)?;
        if hello != wire::hello() {
            return Err(ErrorKind::InvalidData.into());
        }
        let mut head = [0; REQUEST_HEAD_BYTES];
        let mut body = Vec::new();
        while self.await_request(&mut head)? {
            let request = wire::RequestHead::decode(&head).ok_or(ErrorKind::InvalidData)?;
            body.resize(request.count * REQUEST_PART_BYTES, 0);
            self.read(&mut body, Instant::now() + STREAM_STALL_MAX)?;
            self.answer(&request, &body)?;
        }
        Ok(())
    }

    /// The head of the next request; `false` once the client has gone or asked for nothing for too long.
    fn await_request(&mut self, head: &mut [u8; REQUEST_HEAD_BYTES]) -> Result<bool> {
        if !self.shared.streams.set_idle(self.id, true) {
            return Ok(false);
        }
        let patience = Instant::now() + STREAM_IDLE_MAX;
        let came = loop {
            match self.socket.read(&mut [IoSliceMut::new(head)], patience) {
                Ok(count) => break count,
                Err(error) if error.kind() == ErrorKind::TimedOut && Instant::now() < patience => {}
                Err(error) if error.kind() == ErrorKind::TimedOut => break 0,
                Err(error) => return Err(error),
            }
        };
        if came == 0 || !self.shared.streams.set_idle(self.id, false) {
            return Ok(false);
        }
        self.read(&mut head[came..], Instant::now() + STREAM_STALL_MAX)?;
        Ok(true)
    }

    fn read(&mut self, mut target: &mut [u8], deadline: Instant) -> Result<()> {
        while !target.is_empty() {
            let count = self.socket.read(&mut [IoSliceMut::new(target)], deadline)?;
            if count == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            target = &mut target[count..];
        }
        Ok(())
    }

    /// Send all parts that a request names. While it sends, the lease is held; if it ends, so does the stream.
    fn answer(&self, request: &wire::RequestHead, body: &[u8]) -> Result<()> {
        let stream = self.socket.handle();
        let lease = self.shared.parts.begin(&request.ticket, Box::new(move || socket::end(&stream)));
        let mut outbox = Outbox::new(&self.socket);
        let (mut sent, mut refused, mut sent_bytes) = (0, 0, 0);
        let result = wire::parts(body).try_for_each(|(index, part)| {
            let bytes = lease.as_ref().and_then(|lease| lease.part(index, part)).unwrap_or_default();
            if bytes.is_empty() {
                refused += 1
            } else {
                sent += 1
            }
            send(&mut outbox, AnswerHead { index, part, bytes: bytes.len() as u64 }, bytes)?;
            sent_bytes += bytes.len() as u64;
            Ok(())
        });
        let result = result.and_then(|()| outbox.flush());
        drop::<Option<Box<dyn Sending>>>(lease);
        self.shared.count(|counters| {
            counters.parts_sent += if result.is_ok() { sent } else { 0 };
            counters.parts_refused += refused;
            counters.bytes_sent += sent_bytes;
        });
        result
    }
}

/// One part: hashed piece by piece just before each is copied to the kernel, while it is in the cache.
fn send(outbox: &mut Outbox<'_>, head: AnswerHead, bytes: &[u8]) -> Result<()> {
    outbox.put(&head.encode())?;
    if bytes.is_empty() {
        return Ok(());
    }
    let mut hasher = PartHasher::new(head.part);
    for piece in bytes.chunks(STREAM_PIECE_BYTES) {
        hasher.update(piece);
        outbox.put(piece)?;
    }
    let tail: [u8; ANSWER_TAIL_BYTES] = hasher.finish().to_le_bytes();
    outbox.put(&tail)
}
