//! A control plane of one stream: messages of the protocol with their lengths before them.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;

use pegaflow_engine::{Error, ErrorKind, Result};
use pegaflow_peers::proto::{
    ConnectReply, ConnectRequest, HelloReply, LeaseReply, LeasedBlock, Place, RegionsReply, RegionsRequest,
};
use pegaflow_peers::rdma::RdmaServer;
use pegaflow_peers::transport::{ControlCalls, RegionSource, Ticket};
use prost::Message;

fn send(stream: &mut TcpStream, kind: u8, message: &impl Message) -> std::io::Result<()> {
    let bytes = message.encode_to_vec();
    stream.write_all(&[kind])?;
    stream.write_all(&(bytes.len() as u32).to_le_bytes())?;
    stream.write_all(&bytes)
}

/// `None` once the other side has gone.
fn receive(stream: &mut TcpStream) -> Option<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    stream.read_exact(&mut head).ok()?;
    let mut bytes = vec![0; u32::from_le_bytes(head[1..].try_into().unwrap()) as usize];
    stream.read_exact(&mut bytes).ok()?;
    Some((head[0], bytes))
}

/// Greet, say where the blocks are, and answer until the client goes.
pub fn serve_talk(
    mut stream: TcpStream,
    hello: &HelloReply,
    ticket: &Ticket,
    places: &[Place],
    rdma: Option<&RdmaServer>,
) {
    send(&mut stream, 0, hello).unwrap();
    let block = |place: &Place| LeasedBlock { parts: vec![*place], ..LeasedBlock::default() };
    let blocks = places.iter().map(block).collect();
    send(&mut stream, 1, &LeaseReply { lease: ticket.lease, blocks, ..LeaseReply::default() }).unwrap();
    while let (Some((kind, bytes)), Some(rdma)) = (receive(&mut stream), rdma) {
        match kind {
            2 => {
                let asked = ConnectRequest::decode(&bytes[..]).unwrap();
                let reply = rdma.connect(asked.session[..].try_into().unwrap(), &asked);
                send(&mut stream, 2, &reply.unwrap_or_else(|error| panic!("{error}"))).unwrap();
            }
            _ => {
                let asked = RegionsRequest::decode(&bytes[..]).unwrap();
                let reply = rdma.regions(asked.version, &asked.wanted);
                send(&mut stream, 3, &reply.unwrap_or_else(|error| panic!("{error}"))).unwrap();
            }
        }
    }
}

pub struct Talk(Mutex<TcpStream>);

impl Talk {
    /// What the server says at first: greeting, lease, places of the blocks.
    pub fn begin(mut stream: TcpStream) -> (Self, HelloReply, u64, Vec<Place>) {
        let hello = HelloReply::decode(&receive(&mut stream).unwrap().1[..]).unwrap();
        let lease = LeaseReply::decode(&receive(&mut stream).unwrap().1[..]).unwrap();
        let places = lease.blocks.iter().map(|block| block.parts[0]).collect();
        (Self(Mutex::new(stream)), hello, lease.lease, places)
    }

    /// The answer; an error once the server has gone.
    fn ask(&self, kind: u8, message: &impl Message) -> Result<Vec<u8>> {
        let mut stream = self.0.lock().unwrap();
        let answer = send(&mut stream, kind, message).ok().and_then(|()| receive(&mut stream));
        answer.map(|(_, bytes)| bytes).ok_or_else(|| Error::new(ErrorKind::Closed, "the peer has gone"))
    }
}

impl ControlCalls for Talk {
    fn connect(&self, request: ConnectRequest) -> Result<ConnectReply> {
        Ok(ConnectReply::decode(&self.ask(2, &request)?[..]).unwrap())
    }

    fn give_up(&self, request: ConnectRequest) {
        let _it_may_have_gone = self.connect(request);
    }

    fn regions(&self, request: RegionsRequest) -> Result<RegionsReply> {
        Ok(RegionsReply::decode(&self.ask(3, &request)?[..]).unwrap())
    }
}
