//! The server's side: segments for peers to read, and the other ends of their queue pairs.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use pegaflow_engine::{Error, ErrorKind, Pool, Result};

use super::answering::{Answering, PairName};
use super::device::{self, Device, Nic};
use super::queue_pair::{Completions, QueuePair};
use super::segments::{Access, Registered, Segments};
use crate::limits::{CONNECT_TIME_MAX, RDMA_REGIONS_MAX, RDMA_SESSION_PAIRS_MAX};
use crate::proto;
use crate::sync::lock;
use crate::transport::RegionSource;

/// A port, and the queue of all that answer there.
struct Port {
    device: Arc<Device>,
    completions: Arc<Completions>,
}

/// Lets peers read from a pool by the RDMA devices of this host.
pub struct RdmaServer {
    ports: Vec<Port>,
    segments: Segments,
    answering: Mutex<Answering<QueuePair>>,
}

impl RdmaServer {
    /// `None` if none of the devices can be used.
    pub fn open(pool: Arc<Pool>, nics: &[Nic]) -> Option<Self> {
        let mut ports = Vec::new();
        for device in device::open_all(nics) {
            match Completions::of_answers(&device) {
                Ok(completions) => ports.push(Port { device, completions: Arc::new(completions) }),
                Err(error) => log::warn!("pegaflow: nobody can read by RDMA from {}: {error}", device.nic.device),
            }
        }
        if ports.is_empty() {
            return None;
        }
        let devices = ports.iter().map(|port| Arc::clone(&port.device)).collect();
        let segments = Segments::new(pool, devices, Access::RemoteRead);
        Some(Self { ports, segments, answering: Mutex::default() })
    }

    /// Queue pairs that there are now.
    pub fn pairs(&self) -> usize {
        lock(&self.answering).count()
    }
}

/// The other end of a client's queue pair.
fn answer(port: &Port, peer: &proto::QueuePair, until: Instant) -> Result<QueuePair> {
    if Instant::now() >= until {
        return Err(Error::new(ErrorKind::Busy, "there was no time left to connect by RDMA"));
    }
    if !port.device.is_up() {
        return Err(Error::new(ErrorKind::Device, format!("the link of {} is down", port.device.nic.device)));
    }
    let mut pair = QueuePair::answering(&port.completions)?;
    pair.answer(peer)?;
    Ok(pair)
}

impl RegionSource for RdmaServer {
    fn nics(&self) -> Vec<proto::Nic> {
        self.ports.iter().map(|port| port.device.describe()).collect()
    }

    fn regions(&self, version: u64, wanted: &[u32]) -> Result<proto::RegionsReply> {
        self.segments.follow()?;
        for &segment in wanted.iter().take(RDMA_REGIONS_MAX) {
            self.segments.registered(segment)?;
        }
        let (version, known) = self.segments.since(version, wanted);
        let describe = |(segment, known): (u32, Registered)| proto::Region {
            segment,
            address: known.address as u64,
            bytes: known.bytes as u64,
            rkeys: known.registrations.iter().map(|one| one.remote_key()).collect(),
        };
        Ok(proto::RegionsReply { version, regions: known.into_iter().map(describe).collect(), digest: 0 })
    }

    /// If a session asks for too many queue pairs, its oldest ones go. Of a port whose link is down none are made, nor
    /// any more on a way on which one could not be: each would take long, and the client waits for the answer.
    fn connect(&self, session: [u8; 16], request: &proto::ConnectRequest) -> Result<proto::ConnectReply> {
        let asked = &request.pairs;
        let most = asked.len().max(request.gone.len());
        if most > RDMA_SESSION_PAIRS_MAX {
            let what = format!("{most} queue pairs are too many: at most {RDMA_SESSION_PAIRS_MAX}");
            return Err(Error::new(ErrorKind::InvalidArgument, what));
        }
        let names: Vec<PairName> = request.gone.iter().map(|name| (name.nic, name.number)).collect();
        let gone = lock(&self.answering).give_up(session, &names);
        drop(gone);
        let (mut pairs, mut replies, mut problem, mut failed) = (Vec::new(), Vec::new(), None, BTreeSet::new());
        let until = Instant::now() + CONNECT_TIME_MAX / 2;
        for peer in asked {
            let port = self.ports.get(peer.nic as usize).ok_or_else(|| {
                Error::new(ErrorKind::InvalidArgument, format!("this server has no RDMA port number {}", peer.nic))
            })?;
            let way = (peer.nic, peer.lid, &peer.gid);
            if failed.contains(&way) {
                replies.push(proto::QueuePair::default());
                continue;
            }
            match answer(port, peer, until) {
                Ok(pair) => {
                    let reads_max = peer.reads_max.clamp(1, port.device.reads_answered_max.into()) as u8;
                    let reply = pair.describe(peer.nic, reads_max);
                    pairs.push(((peer.nic, reply.number), pair));
                    replies.push(reply);
                }
                // The link of this one may be down, and others of the client's may reach us.
                Err(error) => {
                    failed.insert(way);
                    replies.push(proto::QueuePair::default());
                    problem = Some(error);
                }
            }
        }
        if let Some(problem) = problem.filter(|_| pairs.is_empty()) {
            return Err(problem);
        }
        let gone = lock(&self.answering).keep(session, &mut pairs)?;
        drop(gone);
        Ok(proto::ConnectReply { pairs: replies })
    }

    /// Its queue pairs are destroyed, and what it still reads fails.
    fn session_gone(&self, session: [u8; 16]) {
        let gone = lock(&self.answering).end(session);
        drop(gone);
    }
}
