//! How fast blocks come from a peer; `benchmarks/peers.py` runs it beside iperf3 and ib_read_bw.
//!
//! `peer-speed serve ADDRESS BLOCKS BYTES [DEVICE GID]` stores blocks in a pool and serves them until its input ends;
//! `peer-speed read ADDRESS BLOCKS BYTES SECONDS [DEVICE GID PAIRS]` reads them again and again, and prints one line
//! of JSON. What the control plane would say goes by a plain stream, line by line.
#![allow(missing_docs)]

#[path = "../parts/mod.rs"]
mod parts;

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use parts::leases::Leases;
use parts::pools::Side;
use parts::talk::{Talk, serve_talk};
use pegaflow_peers::proto::{HelloReply, Place};
use pegaflow_peers::rdma::{Nic, RdmaServer, RdmaTransport};
use pegaflow_peers::tcp::{TcpServer, TcpTransport};
use pegaflow_peers::transport::{ControlCalls, PartRead, RegionSource, Ticket, Transport};

const SESSION: [u8; 16] = [9; 16];

fn nic(arguments: &[String]) -> Option<Nic> {
    let [device, gid_index, ..] = arguments else { return None };
    let gid_index = gid_index.parse().unwrap();
    Some(Nic { device: device.clone(), port: 1, gid_index, mtu_bytes: 4096, node: None })
}

fn cpu_seconds() -> f64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    seconds(usage.user_time()) + seconds(usage.system_time())
}

/// Where everything is: address of the talk, number and size of blocks.
struct Plan {
    address: SocketAddr,
    blocks: u64,
    bytes: u64,
}

impl Plan {
    fn new(arguments: &[String]) -> Self {
        let number = |at: usize| arguments[at].parse::<u64>().unwrap();
        Self { address: arguments[0].parse().unwrap(), blocks: number(1), bytes: number(2) }
    }

    fn side(&self) -> Side {
        Side::with_room("peer-speed", &[self.bytes], self.blocks * self.bytes * 2)
    }
}

fn serve(arguments: &[String]) {
    let plan = Plan::new(arguments);
    let side = plan.side();
    let leased = side.store(0..plan.blocks);
    let leases = Arc::new(Leases::new(side.space()));
    let ticket = leases.add(leased.clone());
    let listener = TcpListener::bind((plan.address.ip(), 0)).unwrap();
    let tcp = TcpServer::start(listener, Arc::clone(&leases) as _).unwrap();
    let rdma = nic(&arguments[3..]).map(|nic| RdmaServer::open(Arc::clone(&side.pool), &[nic]).expect("the device"));
    let places = leased.iter().map(|&block| {
        let (segment, offset) = side.place(block, 0);
        Place { segment, offset }
    });
    let hello = HelloReply {
        data_port: tcp.address().port().into(),
        nics: rdma.as_ref().map(RegionSource::nics).unwrap_or_default(),
        ..HelloReply::default()
    };
    let listener = TcpListener::bind(plan.address).unwrap();
    println!("ready {}", listener.local_addr().unwrap());
    serve_talk(listener.accept().unwrap().0, &hello, &ticket, &places.collect::<Vec<_>>(), rdma.as_ref());
}

fn read(arguments: &[String]) {
    let plan = Plan::new(arguments);
    let seconds: f64 = arguments[3].parse().unwrap();
    let side = plan.side();
    let slots = side.reserve(0..plan.blocks);
    // Pages that are there already, as in a pool that has been in use.
    slots.iter().for_each(|&slot| side.fill(slot, 1));
    let host: IpAddr = plan.address.ip();
    let (talk, hello, ticket, places) = Talk::begin(TcpStream::connect(plan.address).unwrap());
    let transport: Box<dyn Transport> = match nic(&arguments[4..]) {
        Some(nic) => {
            let pairs = arguments[6].parse().unwrap();
            Box::new(RdmaTransport::open(Arc::clone(&side.pool), &[nic], pairs).expect("the device"))
        }
        None => Box::new(TcpTransport::new(side.space())),
    };
    let soon = || Instant::now() + Duration::from_secs(120);
    // Kept to the end: with it the server goes.
    let talk: Arc<dyn ControlCalls> = Arc::new(talk);
    let mut channel =
        transport.open(host, &hello, SESSION, Arc::clone(&talk), soon()).unwrap_or_else(|error| panic!("{error}"));
    let ticket = Ticket { lease: ticket, secret: [ticket as u8 ^ 0x5A; 16] };
    let reads: Vec<PartRead> = (0..plan.blocks as usize)
        .map(|at| PartRead {
            ticket,
            index: at as u32,
            part: 0,
            segment: places[at].segment,
            offset: places[at].offset,
            bytes: plan.bytes,
            target: slots[at],
        })
        .collect();
    let mut round = |reads: &[PartRead]| {
        let outcome = channel.read(reads, soon());
        assert!(outcome.quiet && outcome.broken.is_none(), "{:?}", outcome.broken);
        assert!(outcome.arrived.iter().all(Option::is_some));
    };
    // The first time registers memory and finds the window of the stream.
    round(&reads);
    let (started, cpu, mut bytes) = (Instant::now(), cpu_seconds(), 0);
    while started.elapsed().as_secs_f64() < seconds {
        round(&reads);
        bytes += plan.blocks * plan.bytes;
    }
    let (elapsed, cpu) = (started.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    println!("{{\"bytes_per_s\": {}, \"cpu_s_per_gb\": {}}}", bytes as f64 / elapsed, cpu / (bytes as f64 / 1e9));
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments[0].as_str() {
        "serve" => serve(&arguments[1..]),
        _ => read(&arguments[1..]),
    }
}
