//! What is particular to RDMA. Where `PEGAFLOW_RDMA_DEVICES` names no devices, that there is none.
#![allow(missing_docs)]

mod parts;

use std::collections::BTreeSet;
use std::sync::Arc;

use parts::common::keys;
use parts::rig::{Rig, devices, soon, usual};
use pegaflow_engine::{BlockRef, Error, Result};
use pegaflow_peers::proto::{ConnectReply, ConnectRequest, RegionsReply, RegionsRequest};
use pegaflow_peers::rdma::{Nic, RdmaServer, RdmaTransport};
use pegaflow_peers::transport::{ControlCalls, PartRead, RegionSource};

/// A rig over the devices of this machine, if it has any.
fn rigs() -> Vec<Rig> {
    devices().chunks(2).map(|_| Rig::rdma(&[777, 700_001])).collect()
}

/// Calls that go to the server, whose keys then come back changed.
struct WrongKeys(Arc<dyn ControlCalls>);

impl ControlCalls for WrongKeys {
    fn connect(&self, request: ConnectRequest) -> Result<ConnectReply> {
        self.0.connect(request)
    }

    fn regions(&self, request: RegionsRequest) -> Result<RegionsReply> {
        let mut reply = self.0.regions(request)?;
        reply.regions.iter_mut().flat_map(|region| &mut region.rkeys).for_each(|key| *key ^= 0xFF00);
        Ok(reply)
    }
}

#[test]
fn a_device_that_is_not_there_gives_no_rdma_and_no_failure() {
    let side = parts::pools::Side::new("peers-rdma", usual());
    let nic = Nic { device: "nothing0".into(), port: 1, gid_index: 0, mtu_bytes: 4096, node: None };
    assert!(RdmaServer::open(Arc::clone(&side.pool), std::slice::from_ref(&nic)).is_none());
    assert!(RdmaTransport::open(Arc::clone(&side.pool), &[nic], 2).is_none());
    for rig in rigs() {
        memory_that_was_not_lent_cannot_be_read(&rig);
        a_session_that_ended_reads_no_more(&rig);
        segments_that_came_later_are_found(&rig);
        a_session_has_so_many_queue_pairs_and_no_more(&rig);
    }
}

fn memory_that_was_not_lent_cannot_be_read(rig: &Rig) {
    let (_, reads) = rig.blocks(2);
    let calls = Arc::new(WrongKeys(Arc::clone(&rig.calls)));
    let mut channel = rig.transport.open(parts::rig::HOST, &rig.hello, [1; 16], calls, soon()).unwrap();
    let outcome = channel.read(&reads, soon());
    assert!(outcome.quiet && outcome.broken.is_some());
    assert!(outcome.arrived.iter().all(Option::is_none));
    for read in &reads {
        assert!(rig.client.reserved_bytes(read.target, read.part).iter().all(|&byte| byte == 0xEE));
    }
    give_back(rig, &reads);
}

fn give_back(rig: &Rig, reads: &[PartRead]) {
    let slots: BTreeSet<BlockRef> = reads.iter().map(|read| read.target).collect();
    rig.client.pool.abort(&slots.into_iter().collect::<Vec<_>>()).unwrap();
}

fn a_session_that_ended_reads_no_more(rig: &Rig) {
    let leased = rig.server.pool.lease(rig.server.namespace, &keys(0..2), 0, 2).unwrap();
    let ticket = rig.leases.add(leased.clone());
    let slots = rig.client.reserve(100..102);
    let reads = rig.reads(ticket, &leased, &slots);
    let mut channel = rig.open();
    let outcome = channel.read(&reads, soon());
    assert_eq!(rig.check(0, &reads, &outcome), reads.len(), "{:?}", outcome.broken);
    rig.stop_server();
    assert_eq!(rig.rdma.as_ref().unwrap().pairs(), 2, "those of the other session");
    let outcome = channel.read(&reads, soon());
    assert!(outcome.quiet && outcome.broken.is_some());
    assert!(outcome.arrived.iter().all(Option::is_none));
    // The same session again, as after a failure: with queue pairs of its own.
    let outcome = rig.open().read(&reads, soon());
    assert_eq!(rig.check(0, &reads, &outcome), reads.len(), "{:?}", outcome.broken);
    give_back(rig, &reads);
}

fn segments_that_came_later_are_found(rig: &Rig) {
    let mut channel = rig.open();
    for first in [1000, 1010, 1020] {
        let leased = rig.server.store(first..first + 5);
        let ticket = rig.leases.add(leased.clone());
        let slots = rig.client.reserve(first..first + 5);
        let reads = rig.reads(ticket, &leased, &slots);
        let outcome = channel.read(&reads, soon());
        assert_eq!(rig.check(first, &reads, &outcome), reads.len(), "{:?}", outcome.broken);
        give_back(rig, &reads);
    }
}

fn a_session_has_so_many_queue_pairs_and_no_more(rig: &Rig) {
    let max = pegaflow_peers::limits::RDMA_SESSION_PAIRS_MAX;
    let channels: Vec<_> = (0..max).map(|_| rig.open()).collect();
    assert!(rig.rdma.as_ref().unwrap().pairs() <= max + 2);
    drop(channels);
    let pairs = vec![pegaflow_peers::proto::QueuePair::default(); max + 1];
    let too_many = ConnectRequest { pairs, ..ConnectRequest::default() };
    let refused: Error = rig.rdma.as_ref().unwrap().connect([2; 16], &too_many).unwrap_err();
    assert!(refused.to_string().contains("too many"));
}
