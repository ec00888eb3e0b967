//! Callers without the token cost nothing that lasts, and leave room for those who have it.
#![allow(missing_docs, reason = "tests")]

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::net::Net;
use common::{ShmDir, connect, fetch_whole, keys, namespace, serve, store};
use pegaflow_peers::limits::{CONNECTIONS_MAX, STRANGERS_SHARE};
use pegaflow_peers::proto::{FindReply, FindRequest};
use tokio_stream::StreamExt;
use tonic::transport::Endpoint;
use tonic::{Code, Request};

const POOL_BYTES: u64 = 4 << 20;
const PING: u8 = 6;
const SETTINGS: u8 = 4;
const ACK: u8 = 1;

/// A client of HTTP/2 that says nothing, and answers pings for as long as it is let.
struct Stranger(TcpStream);

impl Stranger {
    fn come(address: &str) -> Self {
        let mut stream = TcpStream::connect(address).unwrap();
        let _it_may_be_closed_already = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
        Self(stream)
    }

    /// Read one frame, and answer it. `None` once the connection has ended.
    fn answer(&mut self) -> Option<()> {
        let mut head = [0; 9];
        self.0.read_exact(&mut head).ok()?;
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).ok()?;
        let (kind, flags) = (head[3], head[4]);
        if flags & ACK == 0 && (kind == PING || kind == SETTINGS) {
            head[4] = ACK;
            if kind == SETTINGS {
                (head[2], body) = (0, Vec::new());
            }
            let _it_may_be_closed_already = self.0.write_all(&[&head[..], &body].concat());
        }
        Some(())
    }

    fn stays_until_it_is_closed(mut self) {
        self.0.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let started = Instant::now();
        while self.answer().is_some() {
            assert!(started.elapsed() < Duration::from_secs(60), "a stranger is let in for ever");
        }
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// A call without the token, of which the end never comes: why it is refused.
async fn half_a_call(address: String, bytes: usize) -> Code {
    let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.unwrap();
    let find = FindRequest { session: vec![1; bytes], ..FindRequest::default() };
    let body = tokio_stream::once(find).chain(tokio_stream::pending());
    let codec = tonic_prost::ProstCodec::<FindRequest, FindReply>::default();
    let path = "/pegaflow.peer.v1.Peer/Find".parse().unwrap();
    client.client_streaming(Request::new(body), path, codec).await.unwrap_err().code()
}

#[test]
fn a_call_without_the_token_is_refused_before_its_body_has_come() {
    let (dir, net) = (ShmDir::new("half-calls"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    store(&theirs, namespace(&theirs), 0..10);
    let (server, address) = serve(&theirs, &net);
    runtime().block_on(async {
        // More than is taken before somebody reads it, and less.
        for bytes in [4 << 20, 1 << 10] {
            let calls: Vec<_> = (0..40).map(|_| tokio::spawn(half_a_call(address.clone(), bytes))).collect();
            for call in calls {
                assert_eq!(call.await.unwrap(), Code::Unauthenticated);
            }
        }
    });
    let count = |name| server.facts().numbers.iter().find(|(known, _)| *known == name).unwrap().1;
    assert_eq!((count("calls_unknown"), count("calls")), (80, 0));
    let peers = connect(&ours, &net, &[address]);
    fetch_whole(&peers, namespace(&ours), &keys(0..10));
}

#[test]
fn strangers_leave_room_and_do_not_stay() {
    let (dir, net) = (ShmDir::new("strangers"), Net::default());
    let (theirs, ours) = (dir.pool("theirs", POOL_BYTES), dir.pool("ours", POOL_BYTES));
    store(&theirs, namespace(&theirs), 0..10);
    let (_server, address) = serve(&theirs, &net);
    let (files, _) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
    let count = CONNECTIONS_MAX.min(files as usize / 4) / STRANGERS_SHARE + 20;
    let mut strangers: Vec<Stranger> = (0..count).map(|_| Stranger::come(&address)).collect();
    let peers = connect(&ours, &net, &[address]);
    fetch_whole(&peers, namespace(&ours), &keys(0..10));
    strangers.drain(..).step_by(count / 20).for_each(Stranger::stays_until_it_is_closed);
    fetch_whole(&peers, namespace(&ours), &keys(0..10));
}
