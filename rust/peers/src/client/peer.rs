//! One peer: whether it is there, what it greeted with, and what it is asked for.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pegaflow_engine::{Error, ErrorKind, Result};
use tokio::sync::Notify;

use super::Inner;
use super::calls::{Calls, Failure, FailureKind};
use super::facts::PeerCounters;
use super::lane::Lane;
use super::link;
use crate::limits::TURNED_AWAY_MAX;
use crate::proto::HelloReply;
use crate::sync::{Acquire, AtomicBool, AtomicU64, Release, lock};
use crate::transport::TransportKind;

/// A peer that has greeted.
pub(crate) struct Up {
    /// Which greeting it was, in this process.
    pub(crate) number: u64,
    pub(crate) ip: IpAddr,
    pub(crate) hello: HelloReply,
    pub(crate) calls: Calls,
}

/// Whether a peer is there.
pub(crate) enum Link {
    /// It was not found yet.
    Unknown,
    /// It is there.
    Up(Arc<Up>),
    /// It failed, and is left alone for a while.
    BackingOff,
    /// It is this pool.
    Itself,
}

/// What is known of a peer.
pub(crate) struct PeerState {
    pub(crate) link: Link,
    pub(crate) problem: Option<String>,
    pub(crate) transport: Option<TransportKind>,
    pub(crate) rtt: Option<Duration>,
    pub(crate) bytes_per_second: Option<f64>,
    /// It did what it was asked for since it greeted.
    pub(crate) is_good: bool,
    /// How often it had no room for a channel, since one has brought anything.
    pub(crate) turned_away: u32,
}

/// One peer.
pub(crate) struct Peer {
    pub(crate) address: String,
    pub(crate) state: Mutex<PeerState>,
    pub(crate) counters: PeerCounters,
    /// Bytes that it was asked for and that are not there yet.
    pub(crate) queued_bytes: AtomicU64,
    pub(crate) lane: Lane,
    /// Something has changed for the task that keeps the link.
    pub(crate) changed: Notify,
    stopped: AtomicBool,
}

impl Peer {
    /// Begin to look for it.
    pub(crate) fn begin(inner: &Arc<Inner>, address: &str) -> Arc<Self> {
        let state = PeerState {
            link: Link::Unknown,
            problem: None,
            transport: None,
            rtt: None,
            bytes_per_second: None,
            is_good: false,
            turned_away: 0,
        };
        let peer = Arc::new(Self {
            address: address.to_owned(),
            state: Mutex::new(state),
            counters: PeerCounters::default(),
            queued_bytes: AtomicU64::new(0),
            lane: Lane::default(),
            changed: Notify::new(),
            stopped: AtomicBool::new(false),
        });
        inner.handle.spawn(link::keep(Arc::clone(inner), Arc::clone(&peer)));
        peer
    }

    /// What it greeted with, if it is there.
    pub(crate) fn up(&self) -> Option<Arc<Up>> {
        match &lock(&self.state).link {
            Link::Up(up) => Some(Arc::clone(up)),
            _ => None,
        }
    }

    /// It is there, and has neither failed nor started anew since the greeting `up`.
    pub(crate) fn is_still(&self, up: &Up) -> bool {
        matches!(&lock(&self.state).link, Link::Up(now) if now.number == up.number)
    }

    /// It has failed, in what was begun with the greeting `up`: it is left alone for a while.
    pub(crate) fn fail(&self, up: &Up, problem: &str) {
        let mut state = lock(&self.state);
        if !matches!(&state.link, Link::Up(now) if now.number == up.number) {
            return;
        }
        state.link = Link::BackingOff;
        state.problem = Some(problem.to_owned());
        drop(state);
        self.counters.failures.add(1);
        log::info!("pegaflow: peer {} has failed and is left alone for a while: {problem}", self.address);
        self.changed.notify_one();
    }

    /// It does not know us any more: greet again, at once.
    pub(crate) fn renew(&self, up: &Up) {
        let mut state = lock(&self.state);
        if matches!(&state.link, Link::Up(now) if now.number == up.number) {
            state.link = Link::Unknown;
            self.changed.notify_one();
        }
    }

    /// A call to it, begun with the greeting `up`, has failed.
    pub(crate) fn note(&self, up: &Up, failure: &Failure) {
        match failure.kind {
            FailureKind::Broken => self.fail(up, &failure.error.to_string()),
            FailureKind::Forgotten => self.renew(up),
            FailureKind::Busy => log::debug!("peer {} has too much to do: {}", self.address, failure.error),
        }
    }

    /// It has no room for a channel. That is no failure, unless there never is any: then what listens there is no
    /// server of blocks.
    pub(crate) fn note_turned_away(&self, up: &Up, problem: &str) {
        let mut state = lock(&self.state);
        state.turned_away += 1;
        if state.turned_away >= TURNED_AWAY_MAX {
            state.turned_away = 0;
            drop(state);
            self.fail(up, problem);
        }
    }

    /// It did what it was asked for.
    pub(crate) fn praise(&self) {
        let mut state = lock(&self.state);
        (state.is_good, state.turned_away) = (true, 0);
    }

    /// Ask nothing more of it.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Release);
        self.changed.notify_one();
        self.lane.stop();
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Acquire)
    }

    /// Wait until nothing is under way; `false` if that takes longer than until then.
    pub(crate) fn wait_for_lane(&self, until: Instant) -> bool {
        self.lane.join(until)
    }
}

/// Host and port of an address.
pub(crate) fn split(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let port: u16 = port.parse().ok().filter(|port| *port != 0)?;
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host = bracketed.unwrap_or(host);
    let possible = !host.is_empty() && (bracketed.is_some() || !host.contains(':'));
    possible.then_some((host, port))
}

/// Whether it can be one of a peer.
pub(crate) fn check(address: &str) -> Result<()> {
    let text = || format!("'{address}' is no address of a peer: give host:port or [IPv6]:port");
    split(address).map(drop).ok_or_else(|| Error::new(ErrorKind::InvalidArgument, text()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_split_at_the_port() {
        assert_eq!(split("kv-7.example:7400"), Some(("kv-7.example", 7400)));
        assert_eq!(split("[fd00::7]:7400"), Some(("fd00::7", 7400)));
        for wrong in ["host", "host:", ":7400", "host:0", "host:65536", "fd00::7:7400", ""] {
            assert!(check(wrong).is_err(), "{wrong}");
        }
    }
}
