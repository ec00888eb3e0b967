//! A data plane without a network: parts are copied from leases within the process, and whatever can go wrong with a
//! transport does so on demand.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "each test binary uses some of it")]

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pegaflow_engine::checksum::part_checksum;
use pegaflow_engine::slot_space::SlotSpace;
use pegaflow_engine::{Error, ErrorKind, Result};
use pegaflow_peers::proto::HelloReply;
use pegaflow_peers::transport::{Channel, ControlCalls, LeasedParts, PartRead, ReadOutcome, Transport, TransportKind};

/// What goes wrong in reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    /// Of each read only the first part comes.
    FirstOnly,
    /// The channel breaks in the middle of the second part.
    Short,
    /// A byte is another one.
    WrongByte,
    /// Nobody knows what still writes.
    NotQuiet,
    /// The same, and something does, for as long as the process lives or until the ghosts are laid.
    Late,
    /// The channel breaks before anything has come.
    Breaks,
    /// A defect of the transport.
    Panics,
    /// Another defect: it speaks of fewer parts than it was asked for.
    LosesCount,
    /// It takes so long.
    Slow,
    /// It takes until the fault is another one (of servers that can wait for that).
    Held,
    /// Nothing comes until patience ends.
    Never,
    /// Nothing comes as long as the test does not say otherwise; then the channel breaks.
    Frozen,
    /// There is no way.
    NoWay,
}

/// How long a read waits for a peer that never answers, if its deadline is not before that.
pub const PATIENCE: Duration = Duration::from_millis(200);

/// Where the parts of a port come from and what goes wrong at the moment, for a read or (`false`) before any.
pub type Source = dyn Fn(u32, bool) -> (Option<Arc<dyn LeasedParts>>, Fault) + Send + Sync;

/// Devices that write into slots although nobody waits for them any more.
#[derive(Clone, Default)]
pub struct Ghosts(Arc<GhostState>);

#[derive(Default)]
struct GhostState {
    laid: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Haunted(*mut u8, usize);

// SAFETY: bytes of a pool that stay mapped as long as the ghost has its space; whoever reads them expects anything.
unsafe impl Send for Haunted {}

impl Haunted {
    fn scribble(&self, byte: u8) {
        // SAFETY: as a device would write: the address was that of a reserved slot, and stays mapped.
        unsafe { std::ptr::write_bytes(self.0, byte, self.1) };
    }
}

impl Ghosts {
    /// Write into these parts again and again from now on.
    fn haunt(&self, space: &Arc<dyn SlotSpace>, parts: &[PartRead]) {
        let target = |read: &PartRead| space.write_target(read.target, read.part);
        let all: Vec<Haunted> = parts.iter().filter_map(target).map(|slot| Haunted(slot.address, slot.bytes)).collect();
        let (state, space) = (Arc::clone(&self.0), Arc::clone(space));
        let thread = std::thread::spawn(move || {
            let mut byte = 0u8;
            while !state.laid.load(Ordering::Acquire) {
                byte = byte.wrapping_add(1);
                all.iter().for_each(|part| part.scribble(byte));
                std::thread::sleep(Duration::from_millis(5));
            }
            drop(space);
        });
        self.0.threads.lock().unwrap().push(thread);
    }

    /// They write no more.
    pub fn lay(&self) {
        self.0.laid.store(true, Ordering::Release);
        self.0.threads.lock().unwrap().drain(..).for_each(|thread| thread.join().unwrap());
        self.0.laid.store(false, Ordering::Release);
    }
}

/// The client's side.
pub struct FakeTransport {
    /// What it says it is.
    pub kind: TransportKind,
    pub space: Arc<dyn SlotSpace>,
    pub source: Arc<Source>,
    pub ghosts: Ghosts,
}

impl Transport for FakeTransport {
    fn kind(&self) -> TransportKind {
        self.kind
    }

    fn open(
        &self,
        _host: IpAddr,
        hello: &HelloReply,
        _session: [u8; 16],
        _calls: Arc<dyn ControlCalls>,
        _deadline: Instant,
    ) -> Result<Box<dyn Channel>> {
        let port = hello.data_port;
        if (self.source)(port, false).1 == Fault::NoWay {
            return Err(Error::new(ErrorKind::NotFound, "no way"));
        }
        let (space, source, ghosts) = (Arc::clone(&self.space), Arc::clone(&self.source), self.ghosts.clone());
        Ok(Box::new(FakeChannel { kind: self.kind, space, source, ghosts, port, broken: None }))
    }
}

struct FakeChannel {
    kind: TransportKind,
    space: Arc<dyn SlotSpace>,
    source: Arc<Source>,
    ghosts: Ghosts,
    port: u32,
    broken: Option<Error>,
}

impl FakeChannel {
    /// Copy the first `count` bytes of a part, or all of it; its checksum if it is all of it.
    fn copy(&self, from: &Arc<dyn LeasedParts>, read: &PartRead, wrong: bool, count: Option<usize>) -> Option<u64> {
        let sending = from.begin(&read.ticket, Box::new(|| {}))?;
        let mut bytes = sending.part(read.index, read.part)?.to_vec();
        let target = self.space.write_target(read.target, read.part)?;
        if bytes.len() as u64 != read.bytes || target.bytes != bytes.len() {
            return None;
        }
        if wrong {
            bytes[0] ^= 1;
        }
        let written = count.unwrap_or(bytes.len()).min(bytes.len());
        // SAFETY: reserved by this process, so nobody reads it; address and length come from the pool.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.address, written) };
        count.is_none().then(|| part_checksum(read.part, &bytes))
    }

    /// What has arrived, and whether it is quiet.
    fn read_with(&mut self, fault: Fault, from: &Arc<dyn LeasedParts>, parts: &[PartRead]) -> (Vec<Option<u64>>, bool) {
        let count = match fault {
            Fault::FirstOnly | Fault::Short => 1,
            Fault::Breaks | Fault::Never | Fault::Frozen | Fault::Late => 0,
            _ => parts.len(),
        };
        let few = parts.iter().take(count);
        let mut arrived: Vec<Option<u64>> =
            few.map(|read| self.copy(from, read, fault == Fault::WrongByte, None)).collect();
        if fault == Fault::LosesCount {
            arrived.pop();
            return (arrived, true);
        }
        arrived.resize(parts.len(), None);
        if fault == Fault::Short
            && let Some(read) = parts.get(1)
        {
            self.copy(from, read, false, Some(read.bytes as usize / 2));
        }
        if fault == Fault::Late {
            self.ghosts.haunt(&self.space, parts);
        }
        (arrived, !matches!(fault, Fault::NotQuiet | Fault::Late))
    }
}

impl Channel for FakeChannel {
    fn kind(&self) -> TransportKind {
        self.kind
    }

    fn read(&mut self, parts: &[PartRead], deadline: Instant) -> ReadOutcome {
        let (from, fault) = (self.source)(self.port, true);
        let broken = |text: &str| Some(Error::new(ErrorKind::Device, text));
        if from.is_none() && self.broken.is_none() {
            self.broken = broken("nobody is there");
        }
        let Some(from) = from.filter(|_| self.broken.is_none()) else {
            return ReadOutcome { arrived: vec![None; parts.len()], quiet: true, broken: self.broken.clone() };
        };
        assert!(fault != Fault::Panics, "as wanted");
        match fault {
            Fault::Slow => std::thread::sleep(Duration::from_millis(300)),
            Fault::Never | Fault::Late => {
                std::thread::sleep(PATIENCE.min(deadline.saturating_duration_since(Instant::now())));
            }
            Fault::Frozen => {
                while (self.source)(self.port, false).1 == Fault::Frozen && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            _ => {}
        }
        let (arrived, quiet) = self.read_with(fault, &from, parts);
        self.broken = match fault {
            Fault::Breaks | Fault::Short => broken("the wire is cut"),
            Fault::Never | Fault::Frozen => broken("nothing came in time"),
            Fault::NotQuiet | Fault::Late => broken("the device does not answer"),
            _ => None,
        };
        ReadOutcome { arrived, quiet, broken: self.broken.clone() }
    }
}
