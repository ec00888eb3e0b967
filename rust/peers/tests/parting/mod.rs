//! A transport that has the peer connect, brings nothing, and parts; and what the peer hears of that.

use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use pegaflow_engine::{Error, ErrorKind, Result};
use pegaflow_peers::proto::{ConnectReply, ConnectRequest, HelloReply, Nic, PairName, QueuePair, RegionsReply};
use pegaflow_peers::transport::{Channel, ControlCalls, PartRead, ReadOutcome, RegionSource, Transport, TransportKind};

pub(crate) const NAME: PairName = PairName { nic: 3, number: 4711 };

#[derive(Default)]
pub(crate) struct Heard {
    pub(crate) connects: AtomicUsize,
    pub(crate) given_up: Mutex<Vec<PairName>>,
}

impl RegionSource for Heard {
    fn nics(&self) -> Vec<Nic> {
        Vec::new()
    }

    fn regions(&self, _version: u64, _wanted: &[u32]) -> Result<RegionsReply> {
        Ok(RegionsReply::default())
    }

    fn connect(&self, _session: [u8; 16], request: &ConnectRequest) -> Result<ConnectReply> {
        self.connects.fetch_add(usize::from(!request.pairs.is_empty()), Relaxed);
        self.given_up.lock().unwrap().extend_from_slice(&request.gone);
        Ok(ConnectReply { pairs: request.pairs.clone() })
    }

    fn session_gone(&self, _session: [u8; 16]) {}
}

pub(crate) struct Parting;

impl Transport for Parting {
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }

    fn open(
        &self,
        _host: IpAddr,
        _hello: &HelloReply,
        _session: [u8; 16],
        calls: Arc<dyn ControlCalls>,
        _deadline: Instant,
    ) -> Result<Box<dyn Channel>> {
        calls.connect(ConnectRequest { pairs: vec![QueuePair::default()], ..ConnectRequest::default() })?;
        Ok(Box::new(Open(calls)))
    }
}

struct Open(Arc<dyn ControlCalls>);

impl Channel for Open {
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }

    fn read(&mut self, parts: &[PartRead], _deadline: Instant) -> ReadOutcome {
        let broken = Some(Error::new(ErrorKind::Closed, "it parts"));
        ReadOutcome { arrived: vec![None; parts.len()], quiet: true, broken }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.give_up(ConnectRequest { gone: vec![NAME], ..ConnectRequest::default() });
    }
}
