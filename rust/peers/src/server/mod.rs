//! The server of a pool: a thread that tries to get the address, and serves for as long as it has it.

mod certificates;
mod connection;
mod counters;
mod door;
mod incoming;
mod leases;
mod lending;
mod mark;
mod seat;
mod service;
mod sessions;

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use pegaflow_engine::{Error, ErrorKind, Pool, Result};
use tokio::runtime::Runtime;
use tonic::service::interceptor::InterceptedService;

use self::certificates::Certificates;
pub(crate) use self::counters::Counter;
use self::counters::Counters;
use self::door::Door;
use self::incoming::{Incoming, connections_max};
use self::leases::Leases;
use self::seat::{Listener, NoSeat, Seat};
use self::service::{Service, Term};
use self::sessions::Sessions;
use crate::credentials::{Credentials, TlsFiles};
use crate::limits::{
    CALL_TIME_MAX, CALLS_MAX, CONNECTION_CALLS_MAX, EXPIRY_INTERVAL, EXTRA_CALLS_MAX, LEASE_TIME, LEASED_SHARE,
    MESSAGE_BYTES_MAX, PING_INTERVAL, SERVE_INTERVAL, STOP_WAIT_MAX, WAITING_THREADS_MAX,
};
use crate::proto::peer_server::PeerServer as PeerService;
use crate::random;
use crate::sync::lock;
use crate::transport::{DataServer, DataStarter, LeasedParts, RegionSource};

/// What a server has beside the pool.
#[derive(Clone)]
pub struct ServerOptions {
    /// `IP:port`; the data plane by TCP has the port behind it.
    pub listen: String,
    /// What peers have to show.
    pub credentials: Credentials,
    /// The data plane by TCP; `None`: there is none.
    pub data: Option<Arc<DataStarter>>,
    /// RDMA; `None`: there is none.
    pub regions: Option<Arc<dyn RegionSource>>,
}

/// How a server is doing.
#[derive(Clone, Debug, Default)]
pub struct ServerFacts {
    /// Where it serves; `None`: it does not, or not now.
    pub address: Option<SocketAddr>,
    /// Why not, if that is not just because another process of the pool does.
    pub problem: Option<String>,
    /// Clients.
    pub sessions: usize,
    /// Leases.
    pub leases: usize,
    /// Bytes of leased blocks.
    pub leased_bytes: u64,
    /// Counters by name.
    pub numbers: Vec<(&'static str, u64)>,
}

/// What this process serves now.
struct Serving {
    address: SocketAddr,
    term: Arc<Term>,
    data: Option<Box<dyn DataServer>>,
}

#[derive(Default)]
struct Status {
    stop: bool,
    problem: Option<String>,
    /// The address is taken by somebody; said once.
    taken: bool,
}

struct Shared {
    pool: Arc<Pool>,
    options: ServerOptions,
    address: SocketAddr,
    counters: Arc<Counters>,
    status: Mutex<Status>,
    bell: Condvar,
    serving: Mutex<Option<Serving>>,
}

impl Shared {
    fn stops(&self) -> bool {
        lock(&self.status).stop
    }

    /// Wait for so long, or until the server is stopped.
    fn pause(&self, time: Duration) {
        let waits = |status: &mut Status| !status.stop;
        drop(self.bell.wait_timeout_while(lock(&self.status), time, waits).unwrap_or_else(PoisonError::into_inner));
    }

    fn complain(&self, problem: &str) {
        let mut status = lock(&self.status);
        if status.problem.as_deref() != Some(problem) {
            log::warn!("pegaflow: this process does not serve its pool to peers for now: {problem}");
            status.problem = Some(problem.to_owned());
        }
    }
}

/// Answers for a pool when nobody else does. Dropped, it stops within a bounded time.
pub struct PeerServer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl PeerServer {
    /// Begin to try.
    pub fn start(pool: Arc<Pool>, options: ServerOptions) -> Result<Self> {
        let address = seat::parse(&options.listen)?;
        options.credentials.tls_files().map(TlsFiles::read).transpose()?;
        pool.member()?;
        let shared = Arc::new(Shared {
            pool,
            options,
            address,
            counters: Arc::default(),
            status: Mutex::default(),
            bell: Condvar::new(),
            serving: Mutex::default(),
        });
        let owned = Arc::clone(&shared);
        let started = std::thread::Builder::new().name("pega-peer-seat".into()).spawn(move || run(&owned));
        let thread = started.map_err(|error| {
            Error::new(ErrorKind::Busy, format!("cannot start the thread that serves peers ({error}): check ulimit -u"))
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// How it is doing.
    pub fn facts(&self) -> ServerFacts {
        let mut facts = ServerFacts { numbers: self.shared.counters.snapshot(), ..ServerFacts::default() };
        facts.problem = lock(&self.shared.status).problem.clone();
        if let Some(serving) = &*lock(&self.shared.serving) {
            facts.address = Some(serving.address);
            facts.sessions = serving.term.sessions.count();
            facts.leases = serving.term.leases.count();
            facts.leased_bytes = serving.term.leases.bytes();
            facts.numbers.extend(serving.data.iter().flat_map(|data| data.counters()));
        }
        facts
    }
}

impl Drop for PeerServer {
    fn drop(&mut self) {
        let forked = self.shared.pool.member().is_err_and(|error| error.kind() == ErrorKind::Forked);
        let Some(thread) = self.thread.take() else { return };
        if forked {
            // The threads, and what they hold, are the parent's.
            std::mem::forget((thread, Arc::clone(&self.shared)));
            return;
        }
        lock(&self.shared.status).stop = true;
        self.shared.bell.notify_all();
        if thread.join().is_err() {
            log::error!("pegaflow: the thread that serves peers had panicked");
        }
    }
}

fn run(shared: &Arc<Shared>) {
    while !shared.stops() {
        match take_seat(shared) {
            Ok(seat) => {
                if let Err(error) = serve(shared, seat) {
                    shared.complain(&error.to_string());
                }
            }
            Err(NoSeat::Taken) => {
                let mut status = lock(&shared.status);
                if !status.taken {
                    status.taken = true;
                    log::info!(
                        "pegaflow: {} is taken: this process will serve peers when it is free (if no process of pool \
                         {} has it, set another pegaflow.peer_listen)",
                        shared.address,
                        shared.pool.name()
                    );
                }
            }
            Err(NoSeat::Failed(error)) => shared.complain(&error.to_string()),
        }
        shared.pause(SERVE_INTERVAL);
    }
}

fn take_seat(shared: &Shared) -> std::result::Result<Seat, NoSeat> {
    shared.pool.member().map_err(NoSeat::Failed)?;
    Seat::take(shared.address, shared.options.data.is_some())
}

/// Serve until the process is told to stop, or is taken for dead.
fn serve(shared: &Shared, seat: Seat) -> Result<()> {
    let Seat { control, data } = seat;
    let Listener { guard, socket: control } = control;
    let failed = |error: std::io::Error| Error::new(ErrorKind::Busy, format!("cannot serve peers: {error}"));
    let address = control.local_addr().map_err(failed)?;
    let leases =
        Arc::new(Leases::new(shared.pool.pool_bytes() / LEASED_SHARE, LEASE_TIME, Arc::clone(&shared.counters)));
    let (data_guard, data, data_port) = match (&shared.options.data, data) {
        (Some(start), Some(Listener { guard, socket })) => {
            let port = socket.local_addr().map_err(failed)?.port();
            let parts: Arc<dyn LeasedParts> = Arc::clone(&leases) as _;
            (Some(guard), Some(start(socket, parts)?), port)
        }
        _ => (None, None, 0),
    };
    let term = Arc::new(Term {
        number: random::number()?,
        pool: Arc::clone(&shared.pool),
        credentials: shared.options.credentials.clone(),
        sessions: Sessions::default(),
        leases,
        counters: Arc::clone(&shared.counters),
        regions: shared.options.regions.clone(),
        data_port,
        permits: Term::permits(CALLS_MAX),
        extra_permits: Term::permits(EXTRA_CALLS_MAX),
    });
    let runtime = start_control(shared, control, &term)?;
    *lock(&shared.serving) = Some(Serving { address, term: Arc::clone(&term), data });
    {
        let mut status = lock(&shared.status);
        (status.problem, status.taken) = (None, false);
    }
    log::info!("pegaflow: this process serves pool {} to peers at {address}", shared.pool.name());
    while !shared.stops() && shared.pool.member().is_ok() {
        shared.pause(EXPIRY_INTERVAL);
        term.leases.expire();
        end_sessions(&term, term.sessions.take_gone());
    }
    // Before the sockets are closed: else a child would close what has their numbers by then.
    drop((guard, data_guard));
    runtime.shutdown_timeout(STOP_WAIT_MAX);
    end_sessions(&term, term.sessions.take_all());
    term.leases.end_all();
    let serving = lock(&shared.serving).take();
    drop(serving);
    Ok(())
}

fn end_sessions(term: &Term, gone: Vec<leases::SessionId>) {
    term.counters.sessions_ended.add(gone.len() as u64);
    for session in gone {
        term.leases.end_session(session);
        if let Some(regions) = &term.regions {
            regions.session_gone(session);
        }
    }
}

/// Start to answer calls.
fn start_control(shared: &Shared, socket: TcpListener, term: &Arc<Term>) -> Result<Runtime> {
    let failed = |error: std::io::Error| Error::new(ErrorKind::Busy, format!("cannot serve peers: {error}"));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(WAITING_THREADS_MAX)
        .thread_name("pega-peer")
        .enable_all()
        .build()
        .map_err(failed)?;
    let mut server = tonic::transport::Server::builder()
        .timeout(CALL_TIME_MAX)
        .max_concurrent_streams(CONNECTION_CALLS_MAX)
        .http2_keepalive_interval(Some(PING_INTERVAL))
        .http2_keepalive_timeout(Some(PING_INTERVAL));
    let certificates = shared.options.credentials.tls_files().map(Certificates::new).transpose()?;
    socket.set_nonblocking(true).map_err(failed)?;
    let incoming = {
        let _within = runtime.enter();
        Incoming::new(tokio::net::TcpListener::from_std(socket).map_err(failed)?, certificates, connections_max())
    };
    let service = PeerService::new(Service(Arc::clone(term)))
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let router = server.add_service(InterceptedService::new(service, Door(Arc::clone(term))));
    runtime.spawn(async move {
        if let Err(error) = router.serve_with_incoming(incoming).await {
            log::warn!("pegaflow: the server of peers has ended: {}", described(&error));
        }
    });
    Ok(runtime)
}

/// An error with what caused it.
pub(crate) fn described(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(deeper) = cause {
        text = format!("{text}: {deeper}");
        cause = deeper.source();
    }
    text
}
