//! The client's side: opens channels of queue pairs to peers.

use std::collections::BTreeSet;
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
    /// For slots of `pool`, with `pairs_per_peer` queue pairs to each peer on each of `nics`; fewer where there are too
    /// many for one session. `None` if none of the devices can be used.
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
/// is addressed by GID alone; `None`: it is not to be used. On each port `pairs`, or as many as a session may have of
/// each. None where nothing reaches anything.
fn ways(routed: &[Option<bool>], theirs: &[proto::Nic], pairs: usize) -> Vec<(usize, usize)> {
    let mut ways = Vec::new();
    for (at, routed) in routed.iter().enumerate() {
        let fits = |their: &usize| *routed == Some(theirs[*their].lid == 0);
        let possible: Vec<usize> = (0..theirs.len()).filter(fits).collect();
        if !possible.is_empty() {
            ways.push((at, possible[at % possible.len()]));
        }
    }
    ways.truncate(RDMA_SESSION_PAIRS_MAX);
    let each = if ways.is_empty() { 0 } else { pairs.clamp(1, RDMA_SESSION_PAIRS_MAX / ways.len()) };
    ways.repeat(each)
}

/// Queue pairs that a peer has made for ours: it is told when this goes.
pub(super) struct TheirEnds {
    calls: Arc<dyn ControlCalls>,
    all: ConnectRequest,
}

impl Drop for TheirEnds {
    fn drop(&mut self) {
        if !self.all.gone.is_empty() {
            self.calls.give_up(std::mem::take(&mut self.all));
        }
    }
}

/// Connect a queue pair on each way on which that works. Where one does not no other is tried, since each may take
/// long. Where it works on none, why not on the last.
fn connect(
    devices: &[Arc<Device>],
    ways: &[(usize, usize)],
    mut request: ConnectRequest,
    calls: &Arc<dyn ControlCalls>,
    deadline: Instant,
) -> Result<(Vec<Lane>, TheirEnds)> {
    let mut problem = Error::new(ErrorKind::NotFound, "the peer has no RDMA port that ours can reach");
    let (mut pairs, mut lanes, mut failed) = (Vec::new(), Vec::new(), BTreeSet::new());
    for way in ways {
        if failed.contains(way) {
            continue;
        }
        in_time(deadline)?;
        let device = &devices[way.0];
        match QueuePair::reading(device) {
            Ok(pair) => {
                request.pairs.push(pair.describe(way.1 as u32, device.reads_asked_max));
                pairs.push((pair, *way));
            }
            Err(error) => {
                failed.insert(*way);
                problem = error;
            }
        }
    }
    if pairs.is_empty() {
        return Err(problem);
    }
    let (session, term) = (request.session.clone(), request.term);
    let reply = calls.connect(request)?;
    let name = |pair: &proto::QueuePair| proto::PairName { nic: pair.nic, number: pair.number };
    let gone = reply.pairs.iter().filter(|pair| pair.number != 0).map(name).take(RDMA_SESSION_PAIRS_MAX).collect();
    let their_ends =
        TheirEnds { calls: Arc::clone(calls), all: ConnectRequest { session, term, pairs: Vec::new(), gone } };
    if reply.pairs.len() != pairs.len() {
        let what = "the peer made another number of queue pairs than was asked for: upgrade or check that host";
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    for ((mut pair, way), other) in pairs.into_iter().zip(&reply.pairs) {
        if other.number == 0 {
            problem = Error::new(ErrorKind::Device, format!("the peer cannot use its RDMA port number {}", way.1));
            continue;
        }
        if failed.contains(&way) {
            continue;
        }
        match in_time(deadline).and_then(|()| pair.connect(other)) {
            Ok(()) => lanes.push(Lane::new(pair, way)),
            Err(error) => {
                failed.insert(way);
                problem = error;
            }
        }
    }
    if lanes.is_empty() { Err(problem) } else { Ok((lanes, their_ends)) }
}

fn in_time(deadline: Instant) -> Result<()> {
    let busy = || Error::new(ErrorKind::Busy, "there was no time left to connect by RDMA");
    if Instant::now() < deadline { Ok(()) } else { Err(busy()) }
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
        let routed = self.devices.iter().map(|device| device.is_up().then_some(device.routed));
        let routed: Vec<Option<bool>> = routed.collect();
        let ways = ways(&routed, &hello.nics, self.pairs_per_peer);
        if ways.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, "the peer has no RDMA port that ours can reach"));
        }
        let request = ConnectRequest { session: session.to_vec(), term: hello.term, ..ConnectRequest::default() };
        let (lanes, their_ends) = connect(&self.devices, &ways, request, &calls, deadline)?;
        let is_whole = lanes.len() == ways.len() && !routed.contains(&None);
        let remote = RemoteSegments::new(calls, session, hello.term, hello.nics.len());
        let nodes = self.devices.iter().map(|device| device.nic.node).collect();
        let read_bytes_max = self.devices.iter().map(|device| device.read_bytes_max).min().unwrap_or(1 << 12);
        let space = self.pool.space();
        let segments = Arc::clone(&self.segments);
        Ok(Box::new(RdmaChannel::new((lanes, their_ends), is_whole, nodes, remote, space, segments, read_bytes_max)))
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
        let (gid, lid) = (Some(true), Some(false));
        assert_eq!(ways(&[gid, gid], &nics(&[0, 0]), 1), [(0, 0), (1, 1)]);
        assert_eq!(ways(&[gid, gid], &nics(&[0]), 1), [(0, 0), (1, 0)]);
        assert_eq!(ways(&[gid], &nics(&[0, 0]), 3), [(0, 0), (0, 0), (0, 0)]);
        assert_eq!(ways(&[lid, gid], &nics(&[0, 7]), 1), [(0, 1), (1, 0)]);
        assert_eq!(ways(&[None, gid], &nics(&[0, 0]), 2), [(1, 1), (1, 1)], "each keeps its cable");
        assert!(ways(&[lid], &nics(&[0, 0]), 2).is_empty());
        assert!(ways(&[gid], &[], 2).is_empty());
        assert!(ways(&[None], &nics(&[0]), 2).is_empty());
    }

    #[test]
    fn each_port_has_as_many_queue_pairs_as_are_wanted_up_to_those_of_a_session() {
        let theirs = nics(&[0; 4]);
        for ports in 1..=2 * RDMA_SESSION_PAIRS_MAX {
            for pairs in 1..=RDMA_SESSION_PAIRS_MAX {
                let ways = ways(&vec![Some(true); ports], &theirs, pairs);
                let used = ports.min(RDMA_SESSION_PAIRS_MAX);
                let on_each = pairs.min(RDMA_SESSION_PAIRS_MAX / used);
                assert!(ways.len() <= RDMA_SESSION_PAIRS_MAX);
                for port in 0..used {
                    assert_eq!(ways.iter().filter(|way| way.0 == port).count(), on_each, "{ports} ports, {pairs}");
                }
            }
        }
    }
}
