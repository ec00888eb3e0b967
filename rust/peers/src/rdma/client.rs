//! The client's side: opens channels of queue pairs to peers.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use pegaflow_engine::{Error, ErrorKind, Pool, Result};

use super::channel::{Lane, RdmaChannel};
use super::device::{self, Device, Nic};
use super::queue_pair::QueuePair;
use super::remote::RemoteSegments;
use super::segments::{Access, Segments};
use crate::limits::RDMA_SESSION_PAIRS_MAX;
use crate::proto::{self, ConnectRequest, HelloReply};
use crate::transport::{Channel, ControlCalls, Transport, TransportKind};

/// Reads by RDMA into slots of a pool.
pub struct RdmaTransport {
    devices: Vec<Arc<Device>>,
    pool: Arc<Pool>,
    segments: Arc<Segments>,
    pairs_per_peer: usize,
}

impl RdmaTransport {
    /// For slots of `pool`, with `pairs_per_peer` queue pairs to each peer, spread over `nics`. `None` if none of
    /// the devices can be used.
    pub fn open(pool: Arc<Pool>, nics: &[Nic], pairs_per_peer: usize) -> Option<Self> {
        let devices = device::open_all(nics);
        if devices.is_empty() {
            return None;
        }
        let segments = Arc::new(Segments::new(Arc::clone(&pool), devices.clone(), Access::LocalWrite));
        Some(Self { devices, pool, segments, pairs_per_peer: pairs_per_peer.clamp(1, RDMA_SESSION_PAIRS_MAX) })
    }
}

/// Which of our ports and which of the server's each queue pair connects: ours in turns, and to each one over there
/// of the same kind, in the same order, since hosts are usually cabled alike. `routed`: for each of ours, whether it
/// is addressed by GID alone. None where nothing reaches anything.
fn ways(routed: &[bool], theirs: &[proto::Nic], pairs: usize) -> Vec<(usize, usize)> {
    let mut ways = Vec::new();
    for (at, routed) in routed.iter().enumerate() {
        let possible: Vec<usize> = (0..theirs.len()).filter(|&their| *routed == (theirs[their].lid == 0)).collect();
        if !possible.is_empty() {
            ways.push((at, possible[at % possible.len()]));
        }
    }
    let count = if ways.is_empty() { 0 } else { pairs.max(ways.len()).min(RDMA_SESSION_PAIRS_MAX) };
    (0..count).map(|at| ways[at % ways.len()]).collect()
}

impl Transport for RdmaTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }

    fn open(
        &self,
        _host: IpAddr,
        hello: &HelloReply,
        session: [u8; 16],
        calls: Arc<dyn ControlCalls>,
        deadline: Instant,
    ) -> Result<Box<dyn Channel>> {
        let routed: Vec<bool> = self.devices.iter().map(|device| device.routed).collect();
        let ways = ways(&routed, &hello.nics, self.pairs_per_peer);
        if ways.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, "the peer has no RDMA port that ours can reach"));
        }
        if Instant::now() >= deadline {
            return Err(Error::new(ErrorKind::Busy, "there was no time left to connect by RDMA"));
        }
        let mut pairs = Vec::new();
        let mut asked = Vec::new();
        for &(ours, theirs) in &ways {
            let device = &self.devices[ours];
            let pair = QueuePair::new(device, false)?;
            asked.push(pair.describe(theirs as u32, device.reads_asked_max));
            pairs.push(pair);
        }
        let request = ConnectRequest { session: session.to_vec(), term: hello.term, pairs: asked };
        let reply = calls.connect(request)?;
        if reply.pairs.len() != pairs.len() {
            let what = "the peer made another number of queue pairs than was asked for: upgrade or check that host";
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        let mut lanes = Vec::new();
        for ((mut pair, &(ours, theirs)), other) in pairs.into_iter().zip(&ways).zip(&reply.pairs) {
            pair.connect(other)?;
            lanes.push(Lane { pair, device: ours, their_nic: theirs });
        }
        let remote = RemoteSegments::new(calls, session, hello.term, hello.nics.len());
        let nodes = self.devices.iter().map(|device| device.nic.node).collect();
        let read_bytes_max = self.devices.iter().map(|device| device.read_bytes_max).min().unwrap_or(1 << 12);
        let space = self.pool.space();
        Ok(Box::new(RdmaChannel::new(lanes, nodes, remote, space, Arc::clone(&self.segments), read_bytes_max)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nics(lids: &[u32]) -> Vec<proto::Nic> {
        lids.iter().map(|&lid| proto::Nic { lid, ..proto::Nic::default() }).collect()
    }

    #[test]
    fn every_port_of_ours_is_used_and_reaches_its_own_kind() {
        assert_eq!(ways(&[true, true], &nics(&[0, 0]), 2), [(0, 0), (1, 1)]);
        assert_eq!(ways(&[true, true], &nics(&[0]), 1), [(0, 0), (1, 0)]);
        assert_eq!(ways(&[true], &nics(&[0, 0]), 3), [(0, 0), (0, 0), (0, 0)]);
        assert_eq!(ways(&[false, true], &nics(&[0, 7]), 2), [(0, 1), (1, 0)]);
        assert!(ways(&[false], &nics(&[0, 0]), 2).is_empty());
        assert!(ways(&[true], &[], 2).is_empty());
    }
}
