//! A peer is a process: killed in the middle of reads, it leaves no wrong byte, nothing that still writes, and no wait
//! without end.
#![allow(missing_docs)]

mod parts;

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parts::numbers::Numbers;
use parts::pools::Side;
use parts::rig::{HOST, check_arrived, devices, soon, stay_as_they_are};
use parts::talk::Talk;
use pegaflow_engine::BlockRef;
use pegaflow_peers::rdma::RdmaTransport;
use pegaflow_peers::tcp::TcpTransport;
use pegaflow_peers::transport::{Channel, PartRead, Ticket, Transport};

const BLOCKS: u64 = 8;
const BYTES: u64 = 500_003;
/// Kills over each transport, unless `PEGAFLOW_PEER_CASES` says how many.
const KILLS: usize = 12;

/// A process that serves blocks; killed when dropped.
struct Peer {
    process: Child,
    address: SocketAddr,
}

impl Peer {
    fn start(devices: &[String]) -> Self {
        let here = std::env::current_exe().unwrap();
        let program = here.parent().unwrap().parent().unwrap().join("examples/peer-speed");
        let sizes = [BLOCKS.to_string(), BYTES.to_string()];
        let mut process = Command::new(program)
            .args(["serve", "127.0.0.1:0"])
            .args(sizes)
            .args(devices)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("ready ").unwrap().parse().unwrap();
        Self { process, address }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _may_be_dead = self.process.kill();
        let _may_be_dead = self.process.wait();
        // Nobody else would: a pool outlives its processes.
        let id = self.process.id().to_string();
        for entry in std::fs::read_dir("/dev/shm").unwrap().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(&format!("pega-test-peer-speed-{id}-")) {
                let _best_effort = std::fs::remove_dir_all(entry.path());
            }
        }
    }
}

/// A channel, what to read over it, and the talk, at whose end the peer would go by itself.
fn connect(peer: &Peer, transport: &dyn Transport, slots: &[BlockRef]) -> (Box<dyn Channel>, Vec<PartRead>, Arc<Talk>) {
    let (talk, hello, lease, places) = Talk::begin(TcpStream::connect(peer.address).unwrap());
    let talk = Arc::new(talk);
    let opened = transport.open(HOST, &hello, [3; 16], Arc::clone(&talk) as _, soon());
    let channel = opened.unwrap_or_else(|error| panic!("{error}"));
    let ticket = Ticket { lease, secret: [lease as u8 ^ 0x5A; 16] };
    let read = |(at, target): (usize, &BlockRef)| PartRead {
        ticket,
        index: at as u32,
        part: 0,
        segment: places[at].segment,
        offset: places[at].offset,
        bytes: BYTES,
        target: *target,
    };
    (channel, slots.iter().enumerate().map(read).collect(), talk)
}

fn kill_in_the_middle(transport: &dyn Transport, side: &Side, devices: &[String]) {
    let mut numbers = Numbers::new();
    let slots = side.reserve(0..BLOCKS);
    let mut slowest = Duration::ZERO;
    let kills = std::env::var("PEGAFLOW_PEER_CASES").map_or(KILLS, |cases| cases.parse().unwrap());
    for _ in 0..kills {
        let mut peer = Peer::start(devices);
        let (mut channel, reads, _talk) = connect(&peer, transport, &slots);
        let started = Instant::now();
        let mut whole = check_arrived(side, 0, &reads, &channel.read(&reads, soon()));
        assert_eq!(whole, reads.len());
        // In the middle of the next read, or of one of those behind it.
        let wait = Duration::from_micros(numbers.below(1 + 2 * started.elapsed().as_micros() as u64));
        let (killed, outcome, ended) = std::thread::scope(|scope| {
            let killer = scope.spawn(|| {
                std::thread::sleep(wait);
                peer.kill();
                Instant::now()
            });
            let outcome = loop {
                let outcome = channel.read(&reads, soon());
                whole += check_arrived(side, 0, &reads, &outcome);
                if outcome.broken.is_some() {
                    break outcome;
                }
            };
            let ended = Instant::now();
            (killer.join().unwrap(), outcome, ended)
        });
        assert!(outcome.quiet);
        slowest = slowest.max(ended.saturating_duration_since(killed));
        stay_as_they_are(side, &reads);
        println!("killed after {wait:?}: {whole} parts had come, {:?}", outcome.broken);
    }
    println!("{:?}: of {kills}, the slowest read ended {slowest:?} after the kill", transport.kind());
}

#[test]
fn a_peer_killed_in_the_middle_of_reads_leaves_nothing_that_writes() {
    let side = Side::new("peers-killed", &[BYTES]);
    kill_in_the_middle(&TcpTransport::new(side.space()), &side, &[]);
    if let [ours, theirs] = &devices()[..] {
        let side = Side::new("peers-killed-rdma", &[BYTES]);
        let transport = RdmaTransport::open(Arc::clone(&side.pool), std::slice::from_ref(ours), 2).expect("a device");
        kill_in_the_middle(&transport, &side, &[theirs.device.clone(), theirs.gid_index.to_string()]);
    }
}
