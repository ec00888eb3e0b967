//! Streams whose other end is broken, slow or malicious: bounded time, no wrong byte, and others are served as before.
#![allow(missing_docs)]

mod parts;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use parts::numbers::Numbers;
use parts::pools::Side;
use parts::rig::{HOST, NoCalls, Rig, SESSION, after, soon, until};
use parts::scripted::{self, Scripted};
use pegaflow_engine::ErrorKind;
use pegaflow_peers::limits::STREAMS_MAX;
use pegaflow_peers::proto::HelloReply;
use pegaflow_peers::tcp::TcpTransport;
use pegaflow_peers::transport::{Channel, PartRead, Ticket, Transport};

const SIZES: [u64; 3] = [1, 500, 40_000];

/// A client of a scripted server, with slots for some blocks.
struct Client {
    side: Side,
    reads: Vec<PartRead>,
}

impl Client {
    fn new(blocks: u64) -> Self {
        let side = Side::new("peers-hostile", &SIZES);
        let slots = side.reserve(0..blocks);
        let ticket = Ticket { lease: 1, secret: [1; 16] };
        let mut reads = Vec::new();
        for (index, &target) in slots.iter().enumerate() {
            for (part, &bytes) in SIZES.iter().enumerate() {
                let (index, part) = (index as u32, part as u32);
                reads.push(PartRead { ticket, index, part, segment: 0, offset: 0, bytes, target });
            }
        }
        Self { side, reads }
    }

    fn open(&self, server: &Scripted) -> Box<dyn Channel> {
        let hello = HelloReply { data_port: server.address.port().into(), ..HelloReply::default() };
        TcpTransport::new(self.side.space()).open(HOST, &hello, SESSION, Arc::new(NoCalls), soon()).unwrap()
    }

    /// Everything that is said to have arrived is right. Returns how many parts did.
    fn check(&self, arrived: &[Option<u64>]) -> usize {
        for (read, _) in self.reads.iter().zip(arrived).filter(|(_, checksum)| checksum.is_some()) {
            let expected = parts::pools::pattern(read.index.into(), read.part, read.bytes as usize);
            assert!(self.side.reserved_bytes(read.target, read.part) == expected, "wrong bytes were taken for right");
        }
        arrived.iter().flatten().count()
    }
}

/// One answer, damaged: a byte changed, some bytes lost, some put in, the rest made up, or the end missing.
fn damaged(mut bytes: Vec<u8>, numbers: &mut Numbers) -> Vec<u8> {
    let at = numbers.below(bytes.len() as u64) as usize;
    let count = 1 + numbers.below(40) as usize;
    match numbers.below(5) {
        0 => bytes[at] ^= 1 << numbers.below(8),
        1 => drop(bytes.drain(at..(at + count).min(bytes.len()))),
        2 => drop(bytes.splice(at..at, (0..count).map(|_| numbers.next() as u8))),
        3 => bytes[at..].iter_mut().for_each(|byte| *byte = numbers.next() as u8),
        _ => bytes.truncate(at),
    }
    bytes
}

#[test]
fn damaged_answers_are_never_taken_for_blocks() {
    const CASES: usize = 300;
    let client = Client::new(2);
    let mut numbers = Numbers::new();
    let mut server = Scripted::new(CASES, move |mut stream| {
        let asked = scripted::request(&mut stream, true);
        scripted::write(&mut stream, &damaged(scripted::answer(&asked, &SIZES), &mut numbers));
        let _may_be_gone = stream.shutdown(Shutdown::Write);
    });
    let mut whole = 0;
    for _ in 0..CASES {
        let outcome = client.open(&server).read(&client.reads, soon());
        assert!(outcome.quiet);
        let count = client.check(&outcome.arrived);
        assert_eq!(outcome.broken.is_none(), count == client.reads.len(), "{:?}", outcome.broken);
        whole += usize::from(outcome.broken.is_none());
    }
    server.join();
    // Bytes put in behind the end, or changed into themselves, are no damage.
    assert!(whole < CASES / 20, "{whole} of {CASES} damaged answers were taken");
}

#[test]
fn a_server_that_stalls_is_given_up_at_the_deadline_and_writes_nothing_later() {
    let client = Client::new(2);
    for cut in [0, 7, 16, 17, 100, 600, 30_000] {
        let (go_on, wait) = mpsc::channel::<()>();
        let (done, late) = mpsc::channel::<()>();
        let mut server = Scripted::new(1, move |mut stream| {
            let asked = scripted::request(&mut stream, true);
            let answer = scripted::answer(&asked, &SIZES);
            scripted::write(&mut stream, &answer[..cut]);
            wait.recv().unwrap();
            scripted::write(&mut stream, &answer[cut..]);
            done.send(()).unwrap();
        });
        let mut channel = client.open(&server);
        let outcome = channel.read(&client.reads, after(150));
        assert!(outcome.quiet && outcome.broken.is_some());
        client.check(&outcome.arrived);
        for read in &client.reads {
            client.side.fill(read.target, 0x11);
        }
        go_on.send(()).unwrap();
        late.recv().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        for read in &client.reads {
            let bytes = client.side.reserved_bytes(read.target, read.part);
            assert!(bytes.iter().all(|&byte| byte == 0x11), "something was written after the read had returned");
        }
        server.join();
    }
}

#[test]
fn a_server_that_trickles_is_given_up_at_the_deadline() {
    let client = Client::new(1);
    let mut server = Scripted::new(1, |mut stream| {
        let asked = scripted::request(&mut stream, true);
        for byte in scripted::answer(&asked, &SIZES) {
            if stream.write_all(&[byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        panic!("the client waited for all of it");
    });
    let outcome = client.open(&server).read(&client.reads, after(300));
    assert!(outcome.quiet && outcome.broken.is_some());
    client.check(&outcome.arrived);
    server.join();
}

#[test]
fn a_stream_that_the_server_closed_between_reads_is_opened_anew() {
    let client = Client::new(2);
    let (tell, closed) = mpsc::channel();
    let mut server = Scripted::new(3, move |mut stream| {
        let asked = scripted::request(&mut stream, true);
        scripted::write(&mut stream, &scripted::answer(&asked, &SIZES));
        drop(stream);
        tell.send(()).unwrap();
    });
    let mut channel = client.open(&server);
    for _ in 0..3 {
        let outcome = channel.read(&client.reads, soon());
        assert!(outcome.broken.is_none(), "{:?}", outcome.broken);
        assert_eq!(client.check(&outcome.arrived), client.reads.len());
        closed.recv().unwrap();
    }
    server.join();
}

/// A server that ends streams before it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    /// When it has read the request.
    AfterRequest,
    /// With some of it unread, so that the kernel resets the stream.
    WithinRequest,
}

/// As many streams end as that says; the next one, if there is one, is answered.
fn ending(streams: usize, ended: usize, ends: Ends) -> Scripted {
    let mut taken = 0;
    Scripted::new(streams, move |mut stream| {
        taken += 1;
        if taken > ended {
            let asked = scripted::request(&mut stream, true);
            scripted::write(&mut stream, &scripted::answer(&asked, &SIZES));
        } else if ends == Ends::AfterRequest {
            scripted::request(&mut stream, true);
        } else {
            stream.read_exact(&mut [0; 20]).unwrap();
        }
    })
}

#[test]
fn a_stream_that_ends_before_any_answer_is_opened_anew_once_and_then_the_peer_is_full() {
    let client = Client::new(2);
    for ends in [Ends::AfterRequest, Ends::WithinRequest] {
        let mut server = ending(2, 1, ends);
        let outcome = client.open(&server).read(&client.reads, soon());
        assert!(outcome.broken.is_none(), "{ends:?}: {:?}", outcome.broken);
        assert_eq!(client.check(&outcome.arrived), client.reads.len());
        server.join();
        let mut server = ending(2, 2, ends);
        let outcome = client.open(&server).read(&client.reads, soon());
        assert!(outcome.quiet && outcome.arrived.iter().all(Option::is_none));
        assert_eq!(outcome.broken.unwrap().kind(), ErrorKind::Full, "{ends:?}");
        server.join();
    }
}

#[test]
fn a_stream_that_ends_within_an_answer_has_failed() {
    let client = Client::new(2);
    for cut in [1, 15, 16, 17, 30_000] {
        let mut server = Scripted::new(1, move |mut stream| {
            let asked = scripted::request(&mut stream, true);
            scripted::write(&mut stream, &scripted::answer(&asked, &SIZES)[..cut]);
        });
        let outcome = client.open(&server).read(&client.reads, soon());
        assert!(outcome.quiet);
        assert_eq!(outcome.broken.unwrap().kind(), ErrorKind::Closed, "{cut}");
        server.join();
    }
}

#[test]
fn nobody_at_the_port_is_an_error_in_bounded_time() {
    let client = Client::new(1);
    let mut server = Scripted::new(0, |_| {});
    server.join();
    let hello = HelloReply { data_port: server.address.port().into(), ..HelloReply::default() };
    let transport = TcpTransport::new(client.side.space());
    let open =
        |hello: &HelloReply, deadline| transport.open(HOST, hello, SESSION, Arc::new(NoCalls), deadline).map(drop);
    assert!(open(&hello, soon()).unwrap_err().to_string().contains("data port"));
    assert!(open(&hello, Instant::now()).is_err());
    let none = open(&HelloReply::default(), soon()).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::NotFound);
}

/// Bytes that a client of ours would send, with random damage, or random ones from the beginning.
fn bad_requests(numbers: &mut Numbers) -> Vec<u8> {
    let mut bytes = b"PEGADATA".to_vec();
    bytes.extend_from_slice(&1u32.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&[3; 24]);
    bytes.extend_from_slice(&2u32.to_le_bytes());
    bytes.extend_from_slice(&[0; 20]);
    damaged(bytes, numbers)
}

#[test]
fn a_server_survives_bad_requests_and_serves_others_meanwhile() {
    let rig = Rig::tcp(&SIZES);
    let (_, reads) = rig.blocks(2);
    let mut numbers = Numbers::new();
    let mut channel = rig.open();
    for case in 0..200 {
        let mut stream = TcpStream::connect((HOST, rig.hello.data_port as u16)).unwrap();
        scripted::write(&mut stream, &bad_requests(&mut numbers));
        let _may_be_gone = stream.shutdown(Shutdown::Write);
        if case % 10 == 0 {
            let outcome = channel.read(&reads, soon());
            assert_eq!(rig.check(0, &reads, &outcome), reads.len(), "{:?}", outcome.broken);
        }
        // The server ends every one of them by itself.
        let _all = stream.read_to_end(&mut Vec::new());
    }
    until("only the good stream is left", || rig.tcp.lock().unwrap().as_ref().unwrap().streams() == 1);
    assert!(rig.tcp.lock().unwrap().as_ref().unwrap().counters().streams_garbled > 0);
    assert_eq!(rig.leases.sending(), 0);
}

#[test]
fn streams_that_ask_for_nothing_make_room_for_others() {
    let rig = Rig::tcp(&SIZES);
    let (_, reads) = rig.blocks(1);
    let idle: Vec<TcpStream> =
        (0..2 * STREAMS_MAX).map(|_| TcpStream::connect((HOST, rig.hello.data_port as u16)).unwrap()).collect();
    let outcome = rig.open().read(&reads, soon());
    assert_eq!(rig.check(0, &reads, &outcome), reads.len(), "{:?}", outcome.broken);
    assert!(rig.tcp.lock().unwrap().as_ref().unwrap().streams() <= STREAMS_MAX);
    drop(idle);
}

#[test]
fn a_client_that_does_not_read_holds_no_lease_beyond_its_end() {
    let rig = Rig::tcp(&[3 << 20]);
    let leased = rig.server.store(0..8);
    let ticket = rig.leases.add(leased);
    let mut stream = TcpStream::connect((HOST, rig.hello.data_port as u16)).unwrap();
    let mut bytes = b"PEGADATA\x01\0\0\0\0\0\0\0".to_vec();
    bytes.extend_from_slice(&ticket.lease.to_le_bytes());
    bytes.extend_from_slice(&ticket.secret);
    bytes.extend_from_slice(&[8, 0, 0, 0, 0, 0, 0, 0]);
    (0..8).for_each(|block: u8| bytes.extend_from_slice(&[block, 0, 0, 0, 0, 0, 0, 0]));
    stream.write_all(&bytes).unwrap();
    until("the server sends", || rig.leases.sending() == 1);
    rig.leases.end(ticket.lease);
    until("the server has stopped", || rig.leases.sending() == 0);
    until("the stream is gone", || rig.tcp.lock().unwrap().as_ref().unwrap().streams() == 0);
}
