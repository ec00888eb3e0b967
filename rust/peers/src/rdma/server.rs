//! The server's side: segments for peers to read, and the other ends of their queue pairs.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pegaflow_engine::{Error, ErrorKind, Pool, Result};

use super::device::{self, Device, Nic};
use super::queue_pair::QueuePair;
use super::segments::{Access, Segments};
use crate::limits::{RDMA_PAIRS_MAX, RDMA_REGIONS_MAX, RDMA_SESSION_PAIRS_MAX};
use crate::proto;

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

    fn lock(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ports, for the greeting.
    pub fn nics(&self) -> Vec<proto::Nic> {
        self.devices.iter().map(|device| device.describe()).collect()
    }

    /// Keys of the segments that a peer wants, registered now if need be. Those that are not there are left out.
    pub fn regions(&self, wanted: &[u32]) -> Result<Vec<proto::Region>> {
        self.segments.follow()?;
        let mut regions = Vec::new();
        for &segment in wanted.iter().take(RDMA_REGIONS_MAX) {
            if let Some(known) = self.segments.registered(segment)? {
                let rkeys = known.registrations.iter().map(|one| one.remote_key()).collect();
                let (address, bytes) = (known.address as u64, known.bytes as u64);
                regions.push(proto::Region { segment, address, bytes, rkeys });
            }
        }
        Ok(regions)
    }

    /// Make the other ends of a session's queue pairs. If a session asks for too many, its oldest ones go.
    pub fn connect(&self, session: [u8; 16], asked: &[proto::QueuePair]) -> Result<Vec<proto::QueuePair>> {
        let mut pairs = Vec::new();
        let mut replies = Vec::new();
        if asked.len() > RDMA_SESSION_PAIRS_MAX {
            let what = format!("{} queue pairs are too many: at most {RDMA_SESSION_PAIRS_MAX}", asked.len());
            return Err(Error::new(ErrorKind::InvalidArgument, what));
        }
        for peer in asked {
            let device = self.devices.get(peer.nic as usize).ok_or_else(|| {
                Error::new(ErrorKind::InvalidArgument, format!("this server has no RDMA port number {}", peer.nic))
            })?;
            let mut pair = QueuePair::new(device, true)?;
            pair.answer(peer)?;
            let reads_max = peer.reads_max.clamp(1, device.reads_answered_max.into()) as u8;
            replies.push(pair.describe(peer.nic, reads_max));
            pairs.push(pair);
        }
        let mut gone = Vec::new();
        let mut sessions = self.lock();
        let all: usize = sessions.values().map(VecDeque::len).sum();
        if all + pairs.len() > RDMA_PAIRS_MAX {
            return Err(Error::new(ErrorKind::Full, format!("this server has {all} queue pairs already")));
        }
        let own = sessions.entry(session).or_default();
        own.extend(pairs);
        while own.len() > RDMA_SESSION_PAIRS_MAX {
            gone.extend(own.pop_front());
        }
        // Destroying them takes a while.
        drop(sessions);
        drop(gone);
        Ok(replies)
    }

    /// Forget a session: its queue pairs are destroyed, and what it still reads fails.
    pub fn end_session(&self, session: &[u8; 16]) {
        let gone = self.lock().remove(session);
        drop(gone);
    }

    /// Queue pairs that there are now.
    pub fn pairs(&self) -> usize {
        self.lock().values().map(VecDeque::len).sum()
    }
}
