//! What is particular to RDMA. Where `PEGAFLOW_RDMA_DEVICES` names no devices, that there is none.
#![allow(missing_docs)]

mod parts;

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use parts::common::keys;
use parts::rig::{Rig, cables, devices, soon, stay_as_they_are, until, usual};
use pegaflow_engine::{BlockRef, Error, Result};
use pegaflow_peers::limits::RDMA_WORN_TIME_MAX;
use pegaflow_peers::proto::{ConnectReply, ConnectRequest, RegionsReply, RegionsRequest};
use pegaflow_peers::rdma::{Nic, RdmaServer, RdmaTransport};
use pegaflow_peers::transport::{Channel, ControlCalls, PartRead, RegionSource};

/// A rig over the devices of this machine, if it has any.
fn rigs() -> Vec<Rig> {
    devices().chunks(2).map(|_| Rig::rdma(&[777, 700_001])).collect()
}

/// Calls that go to the server, and what was asked for with the last of them.
struct Remembers(Arc<dyn ControlCalls>, Mutex<ConnectRequest>);

impl ControlCalls for Remembers {
    fn connect(&self, request: ConnectRequest) -> Result<ConnectReply> {
        self.1.lock().unwrap().clone_from(&request);
        self.0.connect(request)
    }

    fn give_up(&self, request: ConnectRequest) {
        self.0.give_up(request);
    }

    fn regions(&self, request: RegionsRequest) -> Result<RegionsReply> {
        self.0.regions(request)
    }
}

/// Calls that go to the server, whose keys then come back changed.
struct WrongKeys(Arc<dyn ControlCalls>);

impl ControlCalls for WrongKeys {
    fn connect(&self, request: ConnectRequest) -> Result<ConnectReply> {
        self.0.connect(request)
    }

    fn give_up(&self, request: ConnectRequest) {
        self.0.give_up(request);
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
        channels_that_are_opened_again_and_again_leave_no_queue_pairs(&rig);
        ends_that_answer_take_no_files(&rig);
    }
    let cables = cables();
    if !cables.is_empty() {
        let rig = Rig::rdma_over(&[700_001], &cables);
        every_port_brings_its_share(&rig, &cables);
        for end in 0..2 {
            what_a_port_no_longer_brings_comes_by_the_other(&rig, &cables, end);
        }
    }
}

/// Bytes that have come to a device's interface.
fn bytes_come(nic: &Nic) -> u64 {
    let of_gid = format!("/sys/class/infiniband/{}/ports/1/gid_attrs/ndevs/{}", nic.device, nic.gid_index);
    let interface = std::fs::read_to_string(of_gid).unwrap();
    let count = std::fs::read_to_string(format!("/sys/class/net/{}/statistics/rx_bytes", interface.trim())).unwrap();
    count.trim().parse().unwrap()
}

/// Plug the end of a cable in, or pull it out.
fn plug(end: usize, state: &str) {
    let program = std::env::var("PEGAFLOW_RDMA_SWITCH").unwrap();
    assert!(Command::new("bash").args([&program, &end.to_string(), state]).status().unwrap().success());
}

/// Read all, all of which has to come, while something else is done. Returns by how much each client's port had a part.
fn all_come(channel: &mut dyn Channel, rig: &Rig, reads: &[PartRead], cables: &[Nic]) -> Vec<u64> {
    let ours: Vec<&Nic> = cables.iter().step_by(2).collect();
    let before: Vec<u64> = ours.iter().map(|nic| bytes_come(nic)).collect();
    for read in reads {
        rig.client.fill(read.target, 0xEE);
    }
    let outcome = rig.asked_again(reads, channel.read(reads, soon()));
    assert!(outcome.quiet && outcome.broken.is_none(), "{:?}", outcome.broken);
    assert_eq!(rig.check(0, reads, &outcome), reads.len());
    ours.iter().zip(before).map(|(nic, before)| bytes_come(nic) - before).collect()
}

const SHARED: u64 = 40;
const SHARE_TIME_MAX: Duration = Duration::from_secs(30);

fn every_port_brings_its_share(rig: &Rig, cables: &[Nic]) {
    let (_, reads) = rig.blocks(SHARED);
    let all: u64 = reads.iter().map(|read| read.bytes).sum();
    let ports = cables.len() as u64 / 2;
    until_each_brings(all / ports * 3 / 4, rig, &reads, cables);
    give_back(rig, &reads);
}

/// Read all by new channels until every port brings more than `bytes`. A busy machine may answer too late for a device,
/// and a link that has come up is told a little later.
fn until_each_brings(bytes: u64, rig: &Rig, reads: &[PartRead], cables: &[Nic]) {
    let started = Instant::now();
    loop {
        let shares = all_come(&mut *rig.open(), rig, reads, cables);
        println!("bytes by each port: {shares:?}");
        if shares.iter().all(|share| *share > bytes) {
            return;
        }
        assert!(started.elapsed() < SHARE_TIME_MAX, "{shares:?}: not more than {bytes} each");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The cable at `end` (0: the client's, 1: the server's) is pulled out while one read comes after the other.
fn what_a_port_no_longer_brings_comes_by_the_other(rig: &Rig, cables: &[Nic], end: usize) {
    let reads = reads_again(rig);
    let all: u64 = reads.iter().map(|read| read.bytes).sum();
    let opened = Instant::now();
    let calls = Arc::new(Remembers(Arc::clone(&rig.calls), Mutex::default()));
    let asking = Arc::clone(&calls) as Arc<dyn ControlCalls>;
    let mut channel = rig.transport.open(parts::rig::HOST, &rig.hello, parts::rig::SESSION, asking, soon()).unwrap();
    let asked = calls.1.lock().unwrap().clone();
    assert_eq!(answered(rig, &asked, cables.len() / 2), [true, true]);
    let shares = std::thread::scope(|scope| {
        let pull = scope.spawn(|| plug(end, "down"));
        loop {
            let is_last = pull.is_finished();
            let shares = all_come(&mut *channel, rig, &reads, cables);
            if shares[0] < all / 4 || is_last {
                return shares;
            }
            if shares[1] < all / 4 {
                println!("the other port was given up before: {shares:?} of {all}");
                channel = rig.open();
            }
        }
    });
    println!("cable pulled out at end {end}, bytes by each port: {shares:?} of {all}");
    assert!(shares[0] < all / 2 && shares[1] > all / 2, "{shares:?} of {all}");
    // Also by a channel that was opened afterwards.
    for channel in [&mut channel, &mut rig.open()] {
        assert!(all_come(&mut **channel, rig, &reads, cables)[1] > all);
        assert!(!channel.is_worn() || opened.elapsed() >= RDMA_WORN_TIME_MAX, "it is kept for a while");
    }
    stay_as_they_are(&rig.client, &reads);
    until("the server knows that its link is down", || answered(rig, &asked, cables.len() / 2) == [false, true]);
    plug(end, "up");
    until_each_brings(all / 4, rig, &reads, cables);
    give_back(rig, &reads);
}

/// Whether the server makes the other ends of what a client has asked for, by port.
fn answered(rig: &Rig, asked: &ConnectRequest, ports: usize) -> Vec<bool> {
    let reply = rig.rdma.as_ref().unwrap().connect([3; 16], asked).unwrap();
    rig.rdma.as_ref().unwrap().session_gone([3; 16]);
    let of = |port: usize| asked.pairs.iter().zip(&reply.pairs).filter(move |(pair, _)| pair.nic as usize == port);
    (0..ports).map(|port| of(port).all(|(_, reply)| reply.number != 0)).collect()
}

/// The same blocks, into slots of their own.
fn reads_again(rig: &Rig) -> Vec<PartRead> {
    let leased = rig.server.pool.lease(rig.server.namespace, &keys(0..SHARED), 0, SHARED as usize).unwrap();
    let ticket = rig.leases.add(leased.clone());
    rig.reads(ticket, &leased, &rig.client.reserve(0..SHARED))
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
    assert_eq!(rig.rdma.as_ref().unwrap().pairs(), 0);
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

fn channels_that_are_opened_again_and_again_leave_no_queue_pairs(rig: &Rig) {
    let server = rig.rdma.as_ref().unwrap();
    rig.stop_server();
    assert_eq!(server.pairs(), 0);
    let mut channel = Some(rig.open());
    let generation = server.pairs();
    assert!(generation > 0);
    for round in 0..40 {
        // Closed before the next is opened, as after a pause, or behind it, as where some ports had failed.
        let old = channel.take().filter(|_| round % 2 == 0);
        channel = Some(rig.open());
        assert!(server.pairs() <= 2 * generation);
        drop(old);
        assert_eq!(server.pairs(), generation);
    }
    drop(channel);
    assert_eq!(server.pairs(), 0);
}

/// What the client has open is not counted: it is not there yet.
fn ends_that_answer_take_no_files(rig: &Rig) {
    let open_files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let calls = Arc::new(Remembers(Arc::clone(&rig.calls), Mutex::default()));
    let asking = Arc::clone(&calls) as Arc<dyn ControlCalls>;
    let channel = rig.transport.open(parts::rig::HOST, &rig.hello, parts::rig::SESSION, asking, soon()).unwrap();
    let (asked, server) = (calls.1.lock().unwrap().clone(), rig.rdma.as_ref().unwrap());
    let (files, pairs) = (open_files(), server.pairs());
    let made = (3..9).map(|session| server.connect([session; 16], &asked).unwrap().pairs.len()).sum::<usize>();
    assert_eq!(server.pairs(), pairs + made);
    assert_eq!(open_files(), files);
    (3..9).for_each(|session| server.session_gone([session; 16]));
    drop(channel);
}
