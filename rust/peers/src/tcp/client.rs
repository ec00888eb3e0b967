//! The client's side: asks ahead, and reads answers straight into reserved slots.

use std::collections::VecDeque;
use std::io::ErrorKind as IoKind;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use pegaflow_engine::checksum::PartHasher;
use pegaflow_engine::slot_space::SlotSpace;
use pegaflow_engine::{Error, ErrorKind, Result};

use crate::limits::{
    CONNECT_TIME_MAX, STREAM_AHEAD_BYTES_MAX, STREAM_AHEAD_PARTS_MAX, STREAM_PIECE_BYTES, STREAM_REQUEST_BYTES,
    STREAM_REQUEST_PARTS_MAX,
};
use crate::proto::HelloReply;
use crate::slot::Target;
use crate::transport::{Channel, ControlCalls, PartRead, ReadOutcome, Transport, TransportKind};

use super::inbox::Inbox;
use super::socket::{self, Socket};
use super::wire::{self, ANSWER_HEAD_BYTES, ANSWER_TAIL_BYTES, AnswerHead};

/// Reads by TCP into slots of `space`.
pub struct TcpTransport {
    space: Arc<dyn SlotSpace>,
}

impl TcpTransport {
    /// For slots of `space`.
    pub fn new(space: Arc<dyn SlotSpace>) -> Self {
        Self { space }
    }
}

impl Transport for TcpTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn open(
        &self,
        host: IpAddr,
        hello: &HelloReply,
        _session: [u8; 16],
        _calls: Arc<dyn ControlCalls>,
        deadline: Instant,
    ) -> Result<Box<dyn Channel>> {
        let port = u16::try_from(hello.data_port).ok().filter(|port| *port != 0);
        let port = port.ok_or_else(|| Error::new(ErrorKind::NotFound, "the peer does not serve blocks by TCP"))?;
        let address = SocketAddr::new(host, port);
        let inbox = connect(address, deadline)?;
        Ok(Box::new(TcpChannel { address, inbox, space: Arc::clone(&self.space), broken: None }))
    }
}

fn connect(address: SocketAddr, deadline: Instant) -> Result<Inbox> {
    let left = deadline.saturating_duration_since(Instant::now()).min(CONNECT_TIME_MAX);
    let failed = |error: std::io::Error| {
        Error::new(ErrorKind::Closed, format!("cannot reach the data port {address} of a peer: {error}"))
    };
    if left.is_zero() {
        return Err(failed(IoKind::TimedOut.into()));
    }
    let stream = TcpStream::connect_timeout(&address, left).map_err(failed)?;
    let socket = Socket::new(stream).map_err(failed)?;
    socket.write_both(&wire::hello(), &[]).map_err(failed)?;
    Ok(Inbox::new(socket))
}

struct TcpChannel {
    address: SocketAddr,
    inbox: Inbox,
    space: Arc<dyn SlotSpace>,
    broken: Option<Error>,
}

impl Channel for TcpChannel {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn read(&mut self, parts: &[PartRead], deadline: Instant) -> ReadOutcome {
        let mut arrived = vec![None; parts.len()];
        if self.broken.is_none() {
            self.broken = self.read_into(parts, deadline, &mut arrived).err();
            if self.broken.is_some() {
                // The server need not send, nor hold, what nobody takes.
                socket::end(&self.inbox.socket().handle());
            }
        }
        // Only this thread writes to the slots, and it has stopped.
        ReadOutcome { arrived, quiet: true, broken: self.broken.clone() }
    }
}

impl TcpChannel {
    fn read_into(&mut self, parts: &[PartRead], deadline: Instant, arrived: &mut [Option<u64>]) -> Result<()> {
        // A server ends streams that have been idle, which is no fault of either side.
        if !self.inbox.is_silent() {
            self.inbox = connect(self.address, deadline)?;
        }
        if self.exchange(parts, deadline, arrived)? {
            return Ok(());
        }
        // It may have done so since we looked.
        self.inbox = connect(self.address, deadline)?;
        if self.exchange(parts, deadline, arrived)? {
            return Ok(());
        }
        let what = format!("the peer at {} has no room for another stream", self.address);
        Err(Error::new(ErrorKind::Full, what))
    }

    /// Ask for all, and take the answers. `false`: the server has ended the stream and answered nothing.
    fn exchange(&mut self, parts: &[PartRead], deadline: Instant, arrived: &mut [Option<u64>]) -> Result<bool> {
        let ready = |read: &PartRead| Target::new(&*self.space, read.target, read.part, read.bytes).is_some();
        let mut unasked: VecDeque<usize> = (0..parts.len()).filter(|&at| ready(&parts[at])).collect();
        let mut asked = Asked::default();
        let mut is_answered = false;
        loop {
            while let Some(bytes) = asked.next_request(&mut unasked, parts) {
                match self.inbox.socket().write_both(&bytes, &[]) {
                    Err(error) if !is_answered && is_end(&error) => return Ok(false),
                    written => written.map_err(|error| self.failed(&error))?,
                }
            }
            let Some(at) = asked.pop(parts) else { return Ok(true) };
            match self.inbox.wait(deadline) {
                Err(error) if !is_answered && is_end(&error) => return Ok(false),
                come => come.map_err(|error| self.failed(&error))?,
            }
            is_answered = true;
            arrived[at] = self.receive(&parts[at], deadline)?;
        }
    }

    /// The next answer, which has to be about `read`. `None`: the peer does not have it, or the slot is not ours now.
    fn receive(&mut self, read: &PartRead, deadline: Instant) -> Result<Option<u64>> {
        let address = self.address;
        let failed = |error: std::io::Error| failed(address, &error);
        let mut head = [0; ANSWER_HEAD_BYTES];
        self.inbox.read_exact(&mut head, deadline).map_err(failed)?;
        let head = AnswerHead::decode(&head);
        if (head.index, head.part) != (read.index, read.part) || (head.bytes != read.bytes && head.bytes != 0) {
            return Err(self.wrong("an answer to another question"));
        }
        if head.bytes == 0 {
            return Ok(None);
        }
        let Some(mut target) = Target::new(&*self.space, read.target, read.part, read.bytes) else {
            return Err(self.lost());
        };
        let mut hasher = PartHasher::new(read.part);
        let mut filled = 0;
        while filled < target.bytes() {
            let left = target.bytes() - filled;
            let Some(piece) = target.piece(filled, left.min(STREAM_PIECE_BYTES)) else { return Err(self.lost()) };
            let last = piece.len() == left;
            let count = self.inbox.read_some(piece, last, deadline).map_err(failed)?;
            hasher.update(&piece[..count]);
            filled += count;
        }
        let mut tail = [0; ANSWER_TAIL_BYTES];
        self.inbox.read_exact(&mut tail, deadline).map_err(failed)?;
        let checksum = hasher.finish();
        if checksum != u64::from_le_bytes(tail) {
            return Err(self.wrong("bytes that do not match their checksum"));
        }
        Ok(Some(checksum))
    }

    fn failed(&self, error: &std::io::Error) -> Error {
        failed(self.address, error)
    }

    fn wrong(&self, what: &str) -> Error {
        Error::new(ErrorKind::Corrupt, format!("the peer at {} sent {what}: upgrade or check that host", self.address))
    }

    fn lost(&self) -> Error {
        let what = format!("a slot was taken from a read from {}: the process was taken for dead", self.address);
        Error::new(ErrorKind::Closed, what)
    }
}

/// Whether the other side has ended the stream, rather than that nothing comes.
fn is_end(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        IoKind::UnexpectedEof | IoKind::ConnectionReset | IoKind::ConnectionAborted | IoKind::BrokenPipe
    )
}

fn failed(address: SocketAddr, error: &std::io::Error) -> Error {
    let what = match error.kind() {
        IoKind::TimedOut => "did not send in time".into(),
        IoKind::UnexpectedEof => "ended the stream".into(),
        _ => format!("is gone: {error}"),
    };
    Error::new(ErrorKind::Closed, format!("the peer at {address} {what}"))
}

/// What is on its way. Bounded, so that requests always fit into the buffers of the kernel, whose sender waits for us.
#[derive(Default)]
struct Asked {
    order: VecDeque<usize>,
    bytes: u64,
}

impl Asked {
    /// The next request, if more is to be asked for now.
    fn next_request(&mut self, unasked: &mut VecDeque<usize>, parts: &[PartRead]) -> Option<Vec<u8>> {
        let room = STREAM_AHEAD_PARTS_MAX.saturating_sub(self.order.len()).min(STREAM_REQUEST_PARTS_MAX);
        let ticket = parts[*unasked.front()?].ticket;
        if room == 0 || self.bytes >= STREAM_AHEAD_BYTES_MAX {
            return None;
        }
        let mut named = Vec::new();
        let mut bytes = 0;
        while named.len() < room && bytes < STREAM_REQUEST_BYTES {
            let Some(read) = unasked.front().map(|&at| &parts[at]).filter(|read| read.ticket == ticket) else { break };
            named.push((read.index, read.part));
            bytes += read.bytes;
            self.order.extend(unasked.pop_front());
        }
        self.bytes += bytes;
        Some(wire::request(&ticket, &named))
    }

    /// The part that the next answer is about.
    fn pop(&mut self, parts: &[PartRead]) -> Option<usize> {
        let at = self.order.pop_front()?;
        self.bytes -= parts[at].bytes;
        Some(at)
    }
}
