//! Who stands between a client and a server of streams: counts what passes, and changes or ends it on demand.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use socket2::{Domain, SockRef, Socket, Type};

/// Where the client finds both ports of the server, as those of another host.
const HOST: &str = "127.0.0.7";
/// Little, so that bytes which have left the server have nearly arrived.
const BUFFER_BYTES: usize = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(2);

/// Which stream, and which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Lane {
    /// The port of the blocks rather than that of calls.
    pub(crate) data: bool,
    /// From the server.
    pub(crate) answers: bool,
}

/// Some bytes that are about to be handed on.
pub(crate) struct Piece<'a> {
    pub(crate) lane: Lane,
    /// How many have passed in this lane since the plan was made.
    pub(crate) before: u64,
    pub(crate) bytes: &'a mut Vec<u8>,
}

/// What to do with them. `false`: end the stream here.
type Plan = Box<dyn FnMut(&mut Piece<'_>) -> bool + Send>;

#[derive(Default)]
struct State {
    plan: Option<Plan>,
    passed: HashMap<Lane, u64>,
    streams: Vec<Arc<TcpStream>>,
    closing: bool,
}

#[derive(Default)]
struct Shared(Mutex<State>);

pub(crate) struct Middleman {
    pub(crate) address: String,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Middleman {
    /// Before the server at `address`, and the port behind it.
    pub(crate) fn before(address: &str) -> Self {
        let server: SocketAddr = address.parse().unwrap();
        let shared = Arc::<Shared>::default();
        let ports = [(server.port(), false), (server.port() + 1, true)];
        let threads = ports.map(|(port, data)| {
            let listener = TcpListener::bind((HOST, port)).unwrap();
            listener.set_nonblocking(true).unwrap();
            let (shared, server) = (Arc::clone(&shared), SocketAddr::new(server.ip(), port));
            std::thread::spawn(move || shared.accept(&listener, server, data))
        });
        Self { address: format!("{HOST}:{}", server.port()), shared, threads: threads.into() }
    }

    /// From now on.
    pub(crate) fn plan(&self, plan: impl FnMut(&mut Piece<'_>) -> bool + Send + 'static) {
        let mut state = self.shared.0.lock().unwrap();
        state.plan = Some(Box::new(plan));
        state.passed.clear();
    }

    /// Hand everything on.
    pub(crate) fn rest(&self) {
        self.shared.0.lock().unwrap().plan = None;
    }

    /// How many bytes have passed since the last plan was made.
    pub(crate) fn passed(&self, lane: Lane) -> u64 {
        self.shared.0.lock().unwrap().passed.get(&lane).copied().unwrap_or(0)
    }
}

impl Drop for Middleman {
    fn drop(&mut self) {
        let mut state = self.shared.0.lock().unwrap();
        state.closing = true;
        state.streams.drain(..).for_each(|stream| end(&stream));
        drop(state);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &TcpListener, server: SocketAddr, data: bool) {
        while !self.0.lock().unwrap().closing {
            match listener.accept() {
                Ok((client, _)) => drop(self.join(client, server, data)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(2)),
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Connect both sides; `None` if the server is not there, and then the client's stream ends.
    fn join(self: &Arc<Self>, client: TcpStream, server: SocketAddr, data: bool) -> Option<()> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_recv_buffer_size(BUFFER_BYTES).unwrap();
        socket.connect_timeout(&server.into(), PATIENCE).ok()?;
        client.set_nonblocking(false).unwrap();
        let (client, server) = (Arc::new(client), Arc::new(TcpStream::from(socket)));
        SockRef::from(&*client).set_tcp_nodelay(true).ok()?;
        server.set_nodelay(true).ok()?;
        let mut state = self.0.lock().unwrap();
        // Those that have ended need not be ended again.
        state.streams.retain(|stream| Arc::strong_count(stream) > 1);
        state.streams.extend([Arc::clone(&client), Arc::clone(&server)]);
        drop(state);
        for answers in [false, true] {
            let (from, to) = if answers { (&server, &client) } else { (&client, &server) };
            let (shared, from, to) = (Arc::clone(self), Arc::clone(from), Arc::clone(to));
            std::thread::spawn(move || shared.pump(&from, &to, Lane { data, answers }));
        }
        Some(())
    }

    /// Hand on what comes, until either side is gone.
    fn pump(&self, mut from: &TcpStream, mut to: &TcpStream, lane: Lane) {
        let mut buffer = vec![0; 16 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let mut bytes = buffer[..count].to_vec();
            let goes_on = self.look(lane, &mut bytes);
            if to.write_all(&bytes).is_err() || !goes_on {
                break;
            }
        }
        end(from);
        end(to);
    }

    fn look(&self, lane: Lane, bytes: &mut Vec<u8>) -> bool {
        let mut state = self.0.lock().unwrap();
        let passed = state.passed.entry(lane).or_default();
        let before = *passed;
        *passed += bytes.len() as u64;
        state.plan.as_mut().is_none_or(|plan| plan(&mut Piece { lane, before, bytes }))
    }
}

fn end(stream: &TcpStream) {
    let _may_be_gone = stream.shutdown(Shutdown::Both);
}
