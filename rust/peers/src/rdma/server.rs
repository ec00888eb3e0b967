//! The server's side: segments for peers to read, and the other ends of their queue pairs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use pegaflow_engine::{Error, ErrorKind, Pool, Result};

use super::device::{self, Device, Nic};
use super::queue_pair::QueuePair;
use super::segments::{Access, Registered, Segments};
use crate::limits::{CONNECT_TIME_MAX, RDMA_PAIRS_MAX, RDMA_REGIONS_MAX, RDMA_SESSION_PAIRS_MAX};
use crate::proto;
use crate::sync::lock;
use crate::transport::RegionSource;

type Sessions = BTreeMap<[u8; 16], VecDeque<QueuePair>>;

/// Lets peers read from a pool by the RDMA devices of this host.
pub struct RdmaServer {
    devices: Vec<Arc<Device>>,
    segments: Segments,
    sessions: Mutex<Sessions>,
}

impl RdmaServer {
    /// `None` if none of the devices can be used.
    pub fn open(pool: Arc<Pool>, nics: &[Nic]) -> Option<Self> {
        let devices = device::open_all(nics);
        if devices.is_empty() {
            return None;
        }
        let segments = Segments::new(pool, devices.clone(), Access::RemoteRead);
        Some(Self { devices, segments, sessions: Mutex::default() })
    }

    /// Queue pairs that there are now.
    pub fn pairs(&self) -> usize {
        lock(&self.sessions).values().map(VecDeque::len).sum()
    }
}

/// The other end of a client's queue pair.
fn answer(device: &Arc<Device>, peer: &proto::QueuePair, until: Instant) -> Result<QueuePair> {
    if Instant::now() >= until {
        return Err(Error::new(ErrorKind::Busy, "there was no time left to connect by RDMA"));
    }
    if !device.is_up() {
        return Err(Error::new(ErrorKind::Device, format!("the link of {} is down", device.nic.device)));
    }
    let mut pair = QueuePair::new(device, true)?;
    pair.answer(peer)?;
    Ok(pair)
}

impl RegionSource for RdmaServer {
    fn nics(&self) -> Vec<proto::Nic> {
        self.devices.iter().map(|device| device.describe()).collect()
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
        if asked.len() > RDMA_SESSION_PAIRS_MAX {
            let what = format!("{} queue pairs are too many: at most {RDMA_SESSION_PAIRS_MAX}", asked.len());
            return Err(Error::new(ErrorKind::InvalidArgument, what));
        }
        let (mut pairs, mut replies, mut problem, mut failed) = (Vec::new(), Vec::new(), None, BTreeSet::new());
        let until = Instant::now() + CONNECT_TIME_MAX / 2;
        for peer in asked {
            let device = self.devices.get(peer.nic as usize).ok_or_else(|| {
                Error::new(ErrorKind::InvalidArgument, format!("this server has no RDMA port number {}", peer.nic))
            })?;
            let way = (peer.nic, peer.lid, &peer.gid);
            if failed.contains(&way) {
                replies.push(proto::QueuePair::default());
                continue;
            }
            match answer(device, peer, until) {
                Ok(pair) => {
                    let reads_max = peer.reads_max.clamp(1, device.reads_answered_max.into()) as u8;
                    replies.push(pair.describe(peer.nic, reads_max));
                    pairs.push(pair);
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
        let mut sessions = lock(&self.sessions);
        let all: usize = sessions.values().map(VecDeque::len).sum();
        let held = sessions.get(&session).map_or(0, VecDeque::len);
        let surplus = (held + pairs.len()).saturating_sub(RDMA_SESSION_PAIRS_MAX);
        if all + pairs.len() > RDMA_PAIRS_MAX + surplus {
            return Err(Error::new(ErrorKind::Full, format!("this server has {all} queue pairs already")));
        }
        let own = sessions.entry(session).or_default();
        own.extend(pairs);
        let gone: Vec<QueuePair> = own.drain(..surplus).collect();
        // Destroying them takes a while.
        drop(sessions);
        drop(gone);
        Ok(proto::ConnectReply { pairs: replies })
    }

    /// Its queue pairs are destroyed, and what it still reads fails.
    fn session_gone(&self, session: [u8; 16]) {
        let gone = lock(&self.sessions).remove(&session);
        drop(gone);
    }
}
