//! What every transport has to do when its peer or its network fails: each trouble, over each transport that can have
//! it. What is said to have arrived has; what is said to be quiet is; and nobody waits for ever.
#![allow(missing_docs)]

mod fake;
mod parts;

use std::net::Shutdown;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use fake::{FakeTransport, Fault, Ghosts};
use parts::numbers::Numbers;
use parts::pools::Side;
use parts::rig::{HOST, NoCalls, Rig, SESSION, after, devices, soon, stay_as_they_are};
use parts::scripted::{self, Scripted};
use pegaflow_engine::checksum::part_checksum;
use pegaflow_peers::proto::HelloReply;
use pegaflow_peers::tcp::TcpTransport;
use pegaflow_peers::transport::{Channel, LeasedParts, PartRead, ReadOutcome, Transport, TransportKind};

const SIZES: [u64; 2] = [500, 40_000];
const BLOCKS: u64 = 3;
/// Of a read whose peer is not going to answer.
const DEADLINE_MS: u64 = 200;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    /// Answers come late, but in time.
    Delays,
    /// Only some of the bytes come, and then the end.
    ShortReads,
    /// Some byte is another one.
    WrongBytes,
    /// The rest comes when the deadline has passed.
    LateCompletion,
    /// The peer is gone.
    Disconnects,
    /// It is there, and says nothing.
    NeverAnswers,
}

const ALL: [Trouble; 6] = [
    Trouble::Delays,
    Trouble::ShortReads,
    Trouble::WrongBytes,
    Trouble::LateCompletion,
    Trouble::Disconnects,
    Trouble::NeverAnswers,
];

/// How often each, over each transport.
fn cases() -> usize {
    std::env::var("PEGAFLOW_PEER_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(3)
}

/// A channel that is in trouble once it reads.
struct Case<'a> {
    side: &'a Side,
    channel: Box<dyn Channel>,
    reads: Vec<PartRead>,
    /// Have whatever is late happen now.
    go_on: Box<dyn FnOnce() + 'a>,
}

/// One transport with which troubles can be had.
trait Troubled {
    fn name(&self) -> &'static str;

    fn can_have(&self, trouble: Trouble) -> bool;

    fn with_case(&self, trouble: Trouble, numbers: &mut Numbers, claim: &dyn Fn(Case<'_>));
}

struct Streams;

impl Troubled for Streams {
    fn name(&self) -> &'static str {
        "TCP"
    }

    fn can_have(&self, _: Trouble) -> bool {
        true
    }

    fn with_case(&self, trouble: Trouble, numbers: &mut Numbers, claim: &dyn Fn(Case<'_>)) {
        let side = Side::new("peers-troubled", &SIZES);
        let whole = BLOCKS * SIZES.iter().sum::<u64>();
        let (cut, bit) = (numbers.below(whole) as usize, numbers.below(8));
        let (go_on, wait) = mpsc::channel::<()>();
        let (done, late) = mpsc::channel::<()>();
        let mut server = Scripted::new(1, move |mut stream| {
            let asked = scripted::request(&mut stream, true);
            let mut answer = scripted::answer(&asked, &SIZES);
            match trouble {
                Trouble::WrongBytes => answer[cut] ^= 1 << bit,
                Trouble::ShortReads | Trouble::Disconnects => answer.truncate(cut),
                _ => {}
            }
            match trouble {
                Trouble::NeverAnswers => wait.recv().unwrap(),
                Trouble::LateCompletion | Trouble::Delays => {
                    scripted::write(&mut stream, &answer[..cut]);
                    let _in_time = match trouble {
                        Trouble::Delays => wait.recv_timeout(Duration::from_millis(50)).is_ok(),
                        _ => wait.recv().is_ok(),
                    };
                    scripted::write(&mut stream, &answer[cut..]);
                }
                _ => scripted::write(&mut stream, &answer),
            }
            let how = if trouble == Trouble::Disconnects { Shutdown::Both } else { Shutdown::Write };
            let _may_be_gone = stream.shutdown(how);
            done.send(()).unwrap();
        });
        let hello = HelloReply { data_port: server.address.port().into(), ..HelloReply::default() };
        let transport = TcpTransport::new(side.space());
        let channel = transport.open(HOST, &hello, SESSION, Arc::new(NoCalls), soon()).unwrap();
        let reads = reads_of(&side);
        let go_on = Box::new(move || {
            let _may_have_gone_on = go_on.send(());
            late.recv().unwrap();
        });
        claim(Case { side: &side, channel, reads, go_on });
        server.join();
    }
}

/// The one that the engine's own tests fetch with.
struct Fake;

impl Troubled for Fake {
    fn name(&self) -> &'static str {
        "the fake one"
    }

    fn can_have(&self, _: Trouble) -> bool {
        true
    }

    fn with_case(&self, trouble: Trouble, _: &mut Numbers, claim: &dyn Fn(Case<'_>)) {
        let rig = Rig::tcp(&SIZES);
        let (_, reads) = rig.blocks(BLOCKS);
        let ghosts = Ghosts::default();
        let fault = Mutex::new(match trouble {
            Trouble::Delays => Fault::Slow,
            Trouble::ShortReads => Fault::Short,
            Trouble::WrongBytes => Fault::WrongByte,
            Trouble::LateCompletion => Fault::Late,
            Trouble::Disconnects => Fault::Breaks,
            Trouble::NeverAnswers => Fault::Never,
        });
        let from: Arc<dyn LeasedParts> = Arc::clone(&rig.leases) as _;
        let source = move |_: u32, _: bool| (Some(Arc::clone(&from)), *fault.lock().unwrap());
        let space = rig.client.space();
        let transport =
            FakeTransport { kind: TransportKind::Tcp, space, source: Arc::new(source), ghosts: ghosts.clone() };
        let channel = transport.open(HOST, &rig.hello, SESSION, Arc::new(NoCalls), soon()).unwrap();
        let go_on = Box::new(|| std::thread::sleep(Duration::from_millis(20)));
        claim(Case { side: &rig.client, channel, reads, go_on });
        ghosts.lay();
    }
}

/// RDMA: a peer whose queue pairs are gone. Frozen ones answer, and wires are those of the kernel.
struct Verbs;

impl Troubled for Verbs {
    fn name(&self) -> &'static str {
        "RDMA"
    }

    fn can_have(&self, trouble: Trouble) -> bool {
        trouble == Trouble::Disconnects
    }

    fn with_case(&self, _: Trouble, _: &mut Numbers, claim: &dyn Fn(Case<'_>)) {
        let rig = Rig::rdma(&SIZES);
        let (_, reads) = rig.blocks(BLOCKS);
        let channel = rig.open();
        rig.stop_server();
        claim(Case { side: &rig.client, channel, reads, go_on: Box::new(|| {}) });
    }
}

fn reads_of(side: &Side) -> Vec<PartRead> {
    let ticket = pegaflow_peers::transport::Ticket { lease: 1, secret: [1; 16] };
    let mut reads = Vec::new();
    for (index, target) in (0u32..).zip(side.reserve(0..BLOCKS)) {
        for (part, bytes) in (0u32..).zip(SIZES) {
            reads.push(PartRead { ticket, index, part, segment: 0, offset: 0, bytes, target });
        }
    }
    reads
}

/// Every part that is said to have arrived lies in its slot with the checksum that is told; and with the bytes of its
/// block, unless these were spoiled and the checksum shows it.
fn is_true(side: &Side, reads: &[PartRead], outcome: &ReadOutcome) -> usize {
    assert_eq!(outcome.arrived.len(), reads.len());
    let mut right = 0;
    for (read, checksum) in reads.iter().zip(&outcome.arrived) {
        let Some(checksum) = checksum else { continue };
        let bytes = side.reserved_bytes(read.target, read.part);
        assert_eq!(*checksum, part_checksum(read.part, &bytes), "a checksum of other bytes");
        let expected = parts::pools::pattern(read.index.into(), read.part, read.bytes as usize);
        right += usize::from(bytes == expected);
        assert_eq!(bytes == expected, *checksum == part_checksum(read.part, &expected));
    }
    right
}

fn holds(troubled: &dyn Troubled, trouble: Trouble, case: Case<'_>) {
    let Case { side, mut channel, reads, go_on } = case;
    let what = format!("{trouble:?} over {}", troubled.name());
    let waits = matches!(trouble, Trouble::LateCompletion | Trouble::NeverAnswers);
    let outcome = channel.read(&reads, if waits { after(DEADLINE_MS) } else { soon() });
    let right = is_true(side, &reads, &outcome);
    if trouble == Trouble::Delays {
        assert!(outcome.quiet && outcome.broken.is_none() && right == reads.len(), "{what}: {:?}", outcome.broken);
    } else {
        assert!(right < reads.len(), "{what}: all has come");
        let shown = outcome.broken.is_some() || outcome.arrived.iter().all(Option::is_some);
        assert!(shown, "{what}: what is missing is nobody's fault");
    }
    go_on();
    if outcome.quiet {
        // Whatever comes now: the slots are somebody else's.
        stay_as_they_are(side, &reads);
    } else {
        assert!(outcome.broken.is_some(), "{what}: a channel that is not quiet is not used again");
        assert!(trouble == Trouble::LateCompletion, "{what}: nothing is under way");
    }
    if outcome.broken.is_some() {
        let again = channel.read(&reads, after(DEADLINE_MS));
        assert!(again.quiet && again.arrived.iter().all(Option::is_none), "{what}: a broken channel reads nothing");
    }
}

fn over(troubled: &(dyn Troubled + Sync)) {
    std::thread::scope(|scope| {
        for trouble in ALL.into_iter().filter(|trouble| troubled.can_have(*trouble)) {
            scope.spawn(move || {
                let mut numbers = Numbers::new();
                for _ in 0..cases() {
                    troubled.with_case(trouble, &mut numbers, &|case| holds(troubled, trouble, case));
                }
                println!("{trouble:?} over {}: {} times", troubled.name(), cases());
            });
        }
    });
}

#[test]
fn troubles_of_streams_are_told_truly_and_leave_slots_quiet() {
    over(&Streams);
}

#[test]
fn troubles_of_the_fake_transport_are_told_truly() {
    over(&Fake);
}

#[test]
fn troubles_of_rdma_are_told_truly_and_leave_slots_quiet() {
    // Where there are no devices, that there is no such transport.
    if devices().len() == 2 { over(&Verbs) } else { assert!(devices().is_empty()) }
}
