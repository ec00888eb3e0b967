//! How a peer is doing.

use std::time::Instant;

use super::peer::{Link, Peer};
use crate::limits::BANDWIDTH_ASSUMED;
use crate::server::Counter;
use crate::sync::{Relaxed, lock};
use crate::transport::TransportKind;

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// What this process asked of a peer and what became of it; the names are stable.
        #[derive(Default)]
        pub(crate) struct PeerCounters {
            $($(#[doc = $doc])* pub(crate) $name: Counter,)*
        }

        impl PeerCounters {
            fn snapshot(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.get()),)*]
            }
        }
    };
}

counters! {
    /// Times that it was looked for.
    connects,
    /// Times that it failed in any way.
    failures,
    /// Questions that it was asked.
    finds,
    /// Of these, those that it answered in time.
    finds_answered,
    /// Pieces of fetches that it was asked for.
    chunks,
    /// Blocks that were leased from it.
    blocks_leased,
    /// Blocks that came whole, with the right checksums, and were leased until then.
    blocks_fetched,
    /// Bytes of these.
    bytes_fetched,
    /// Blocks that did not come.
    blocks_missing,
    /// Blocks whose bytes were wrong.
    blocks_corrupt,
    /// Leases that had ended before all had come.
    leases_lost,
    /// Slots that a device may still write.
    slots_quarantined,
    /// Blocks for which there was no slot in time.
    slots_refused,
}

/// How a peer is doing.
#[derive(Clone, Debug)]
pub struct PeerFacts {
    /// As given.
    pub address: String,
    /// `up`, `backing off`, `itself` or `unknown`.
    pub state: &'static str,
    /// What was wrong last.
    pub problem: Option<String>,
    /// How bytes come, once any have.
    pub transport: Option<TransportKind>,
    /// Duration of a recent call.
    pub rtt_us: Option<u64>,
    /// Recent bandwidth.
    pub bytes_per_second: Option<f64>,
    /// Bytes that it was asked for and that are not there yet.
    pub queued_bytes: u64,
    /// Counters by name.
    pub numbers: Vec<(&'static str, u64)>,
}

impl Peer {
    pub(crate) fn facts(&self) -> PeerFacts {
        let state = lock(&self.state);
        let name = match &state.link {
            Link::Unknown => "unknown",
            Link::Up(_) => "up",
            Link::BackingOff => "backing off",
            Link::Itself => "itself",
        };
        PeerFacts {
            address: self.address.clone(),
            state: name,
            problem: state.problem.clone(),
            transport: state.transport,
            rtt_us: state.rtt.map(|rtt| rtt.as_micros() as u64),
            bytes_per_second: state.bytes_per_second,
            queued_bytes: self.queued_bytes.load(Relaxed),
            numbers: self.counters.snapshot(),
        }
    }

    /// How long so many more bytes would take; `None` if it is not there.
    pub(crate) fn read_seconds(&self, bytes: u64) -> Option<f64> {
        let state = lock(&self.state);
        let Link::Up(_) = &state.link else { return None };
        let bandwidth = state.bytes_per_second.unwrap_or(BANDWIDTH_ASSUMED);
        let queued = self.queued_bytes.load(Relaxed);
        Some(state.rtt.map_or(0.0, |rtt| rtt.as_secs_f64()) + queued.saturating_add(bytes) as f64 / bandwidth)
    }

    /// So many bytes came since `started`.
    pub(crate) fn note_bandwidth(&self, bytes: u64, started: Instant) {
        let seconds = started.elapsed().as_secs_f64().max(1e-6);
        let mut state = lock(&self.state);
        let now = bytes as f64 / seconds;
        let recent = state.bytes_per_second.map_or(now, |before| before * 0.75 + now * 0.25);
        state.bytes_per_second = Some(recent);
    }
}
