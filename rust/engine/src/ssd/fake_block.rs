//! Made-up blocks, whose bytes follow from their names, and the store that tests write them to.

use std::time::Duration;

use super::buffer::Buffers;
use super::check::Nowhere;
use super::fake_disk::FakeDisk;
use super::open::Opened;
use super::options::StoreOptions;
use super::reader::{ReadOutcome, ReadStart, ReadTarget};
use super::record::RecordId;
use super::store::{Event, Store};
use super::writer::{Record, WriteStart};
use crate::checksum::part_checksum;
use crate::error::Result;
use crate::key::Key;

/// SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    pub(crate) fn below(&mut self, count: u64) -> u64 {
        self.next() % count
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// Takes what is read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) Vec<Vec<u8>>);

impl ReadTarget for Bytes {
    fn put(&mut self, part: usize, offset: usize, bytes: &[u8]) {
        self.0[part][offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

/// A block: its namespace, its number, and how often the namespace was forgotten when it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Block {
    pub(crate) namespace: u8,
    pub(crate) number: u64,
    pub(crate) epoch: u64,
}

impl Block {
    pub(crate) fn new(number: u64) -> Self {
        Self { namespace: (number % 3) as u8, number, epoch: 0 }
    }

    pub(crate) fn id(&self) -> RecordId {
        let key = Key::new(&Random::new(self.number).next().to_le_bytes()).unwrap();
        RecordId { fingerprint: [self.namespace; 32], group: (self.number % 2) as u32, key }
    }

    /// The same for all epochs.
    fn sizes(&self, bytes_max: u64) -> Vec<u64> {
        let mut random = Random::new(self.number ^ 0x51CE);
        let parts = 1 + random.below(4);
        (0..parts).map(|_| if random.chance(10) { 0 } else { 1 + random.below(bytes_max / parts) }).collect()
    }

    pub(crate) fn parts(&self, bytes_max: u64) -> Vec<Vec<u8>> {
        let mut random = Random::new(self.number ^ self.epoch.rotate_left(32) ^ 0xB17E);
        self.sizes(bytes_max).iter().map(|bytes| (0..*bytes).map(|_| random.next() as u8).collect()).collect()
    }
}

/// A store on fake disks, and the largest block that it is given.
#[derive(Clone)]
pub(crate) struct Fixture {
    pub(crate) disk: FakeDisk,
    pub(crate) options: StoreOptions,
    pub(crate) bytes_max: u64,
    pub(crate) device_block: usize,
}

impl Fixture {
    /// So many disks of 8 zones of 32 KiB.
    pub(crate) fn new(disks: usize, seed: u64) -> Self {
        let options = StoreOptions {
            directories: vec!["fake".into(); disks],
            capacity_bytes: Some(disks as u64 * ((64 << 10) + 8 * (32 << 10))),
            block_bytes: Some(512),
            zone_bytes: Some(32 << 10),
            chunk_bytes: 4096,
            read_depth: 4,
            write_depth: 3,
            // Only who says otherwise gives a disk up: threads may be without a CPU for long.
            hang_max: Duration::from_secs(3600),
            ..StoreOptions::default()
        };
        Self { disk: FakeDisk::new(disks, seed), options, bytes_max: 6000, device_block: 512 }
    }

    /// Open without recovery.
    pub(crate) fn open(&self) -> Result<Store<Bytes>> {
        self.open_for()
    }

    /// As [`Self::open`], for what takes the reads of a test.
    pub(crate) fn open_for<T: ReadTarget>(&self) -> Result<Store<T>> {
        self.open_with(self.options.clone())
    }

    /// Open to look.
    pub(crate) fn open_read_only(&self) -> Result<Store<Nowhere>> {
        let (capacity_bytes, create, read_only) = (None, false, true);
        self.open_with(StoreOptions { capacity_bytes, create, read_only, ..self.options.clone() })
    }

    fn open_with<T: ReadTarget>(&self, options: StoreOptions) -> Result<Store<T>> {
        self.disk.set_block(self.device_block);
        let disks = self.options.directories.len();
        let opened = (0..disks).map(|disk| Opened {
            path: format!("fake-{disk}").into(),
            lock: None,
            device_block: self.device_block,
        });
        let buffers = Buffers::new(self.options.buffers() * disks as u16, self.options.chunk_bytes);
        Store::assemble(options, Box::new(self.disk.io()), buffers, opened.collect())
    }

    pub(crate) fn recovered(&self) -> Store<Bytes> {
        let mut store = self.open().unwrap();
        store.recover();
        store
    }

    pub(crate) fn write(&self, store: &mut Store<Bytes>, block: &Block) -> WriteStart {
        let parts = block.parts(self.bytes_max);
        let slices: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let sum = (0..).zip(&parts).fold(0u64, |sum, (number, part)| sum.wrapping_add(part_checksum(number, part)));
        store.write(&Record { id: block.id(), parts: &slices, checksum: Some(sum) })
    }

    /// Write, waiting for room and for the end.
    pub(crate) fn write_through(&self, store: &mut Store<Bytes>, blocks: &[Block]) {
        for block in blocks {
            while self.write(store, block) == WriteStart::Busy {
                store.flush();
                store.poll(Duration::from_millis(1));
            }
        }
        store.flush();
        settle(store);
    }

    pub(crate) fn start_read(&self, store: &mut Store<Bytes>, block: &Block) -> ReadStart<Bytes> {
        let sizes = block.sizes(self.bytes_max);
        let target = Bytes(sizes.iter().map(|bytes| vec![0xEE; *bytes as usize]).collect());
        store.read(&block.id(), &sizes, target)
    }

    /// What a lookup and a read give. Bytes that count are the right ones.
    pub(crate) fn read(&self, store: &mut Store<Bytes>, block: &Block) -> Option<ReadOutcome> {
        let ReadStart::Started(wanted) = self.start_read(store, block) else { return None };
        loop {
            for event in store.poll(Duration::from_millis(1)) {
                let Event::Read(ticket, target, outcome) = event else { continue };
                if ticket == wanted {
                    if outcome == ReadOutcome::Whole {
                        assert_eq!(target.0, block.parts(self.bytes_max), "wrong bytes of {block:?}");
                    }
                    return Some(outcome);
                }
            }
        }
    }

    /// How many of `blocks` are read whole.
    pub(crate) fn count_whole(&self, store: &mut Store<Bytes>, blocks: &[Block]) -> usize {
        blocks.iter().filter(|block| self.read(store, block) == Some(ReadOutcome::Whole)).count()
    }
}

/// Poll until nothing is on its way.
pub(crate) fn settle(store: &mut Store<Bytes>) -> Vec<Event<Bytes>> {
    let mut events = Vec::new();
    while store.is_busy() {
        events.extend(store.poll(Duration::from_millis(1)));
    }
    events.extend(store.poll(Duration::ZERO));
    events
}

/// Cases of a test: `PEGAFLOW_SSD_CASES`, or as many as every run can afford.
pub(crate) fn cases(usual: u64) -> u64 {
    std::env::var("PEGAFLOW_SSD_CASES").map_or(usual, |text| text.parse().expect("a number of cases"))
}

/// `PEGAFLOW_TEST_SEED`, or one from the clock; printed, so that a failure tells.
pub(crate) fn seed(test: &str) -> u64 {
    let clock = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let seed = std::env::var("PEGAFLOW_TEST_SEED").map_or(clock, |text| text.parse().expect("a seed"));
    println!("{test}: PEGAFLOW_TEST_SEED={seed}");
    seed
}
