//! Crashes at random moments of random histories: what is found afterwards is right, byte by byte, or it is not found.
//!
//! `make ssd-crash CASES=n`; a failure names the seed, which `PEGAFLOW_TEST_SEED` repeats.

use std::collections::BTreeSet;
use std::time::Duration;

use super::fake_block::{Block, Bytes, Fixture, Random, cases, seed, settle};
use super::fake_disk::Faults;
use super::reader::{ReadOutcome, ReadStart};
use super::store::{Event, Store};

const NAMESPACES: u64 = 3;

#[derive(Debug, Default)]
struct Found {
    crashes: u64,
    whole: u64,
    missing: u64,
    damaged: u64,
}

struct Case {
    fixture: Fixture,
    random: Random,
    epochs: [u64; NAMESPACES as usize],
    written: BTreeSet<Block>,
    /// A copy of these was seen that is not right. It may be found in place of a right one after the next start.
    damaged: BTreeSet<u64>,
    found: Found,
}

impl Case {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let disks = 1 + random.below(2) as usize;
        let mut fixture = Fixture::new(disks, random.next());
        let options = &mut fixture.options;
        let (block, zones) = ([512, 1024, 4096][random.below(3) as usize], 4 + random.below(6));
        let zone = (16 << 10) << random.below(3);
        fixture.device_block = if random.chance(70) { 512 } else { block };
        options.block_bytes = Some(block);
        options.zone_bytes = Some(zone);
        options.capacity_bytes = Some(disks as u64 * ((64 << 10) + zones * zone));
        options.chunk_bytes = 4096 << random.below(4);
        options.read_depth = 1 + random.below(4) as u16;
        options.write_depth = 1 + random.below(4) as u16;
        fixture.bytes_max = [300, 3000, 9000][random.below(3) as usize];
        let faults = Faults { short: random.below(40), late: random.below(80), ..Faults::default() };
        fixture.disk.set(faults);
        let (epochs, written, damaged) = ([0; NAMESPACES as usize], BTreeSet::new(), BTreeSet::new());
        Self { fixture, random, epochs, written, damaged, found: Found::default() }
    }

    fn any_block(&mut self) -> Block {
        let block = Block::new(self.random.below(200));
        Block { epoch: self.epochs[usize::from(block.namespace)], ..block }
    }

    fn step(&mut self, store: &mut Store<Bytes>) {
        match self.random.below(100) {
            0..60 => {
                let block = self.any_block();
                self.fixture.write(store, &block);
                self.written.insert(block);
            }
            60..75 => {
                let block = self.any_block();
                // Read in part only, or cancelled, or ended by one of the polls.
                if let ReadStart::Started(ticket) = self.fixture.start_read(store, &block)
                    && self.random.chance(20)
                {
                    store.cancel(ticket);
                }
            }
            75..90 => drop(store.poll(Duration::ZERO)),
            90..96 => store.flush(),
            96..98 => drop(settle(store)),
            _ => {
                let namespace = self.random.below(NAMESPACES) as u8;
                self.epochs[usize::from(namespace)] += 1;
                store.forget(&[namespace; 32]).unwrap();
            }
        }
    }

    /// Everything that was ever written: now right, or absent. Returns what is right.
    fn check(&mut self, store: &mut Store<Bytes>) -> BTreeSet<u64> {
        let mut whole = BTreeSet::new();
        let numbers: BTreeSet<u64> = self.written.iter().map(|block| block.number).collect();
        for number in numbers {
            let block = Block::new(number);
            let current = Block { epoch: self.epochs[usize::from(block.namespace)], ..block };
            // Compares the bytes: of the current epoch, so what was forgotten must not come.
            match self.fixture.read(store, &current) {
                Some(ReadOutcome::Whole) => drop(whole.insert(number)),
                Some(ReadOutcome::Damaged) => {
                    self.damaged.insert(number);
                    self.found.damaged += 1;
                }
                _ => self.found.missing += 1,
            }
        }
        self.found.whole += whole.len() as u64;
        whole
    }

    fn run(&mut self) {
        for _ in 0..1 + self.random.below(4) {
            let mut store = self.fixture.recovered();
            self.check(&mut store);
            for _ in 0..self.random.below(150) {
                self.step(&mut store);
            }
            self.end(store);
            self.found.crashes += 1;
        }
        let mut store = self.fixture.recovered();
        self.check(&mut store);
    }

    fn end(&mut self, mut store: Store<Bytes>) {
        match self.random.below(10) {
            0..6 => {
                drop(store);
                self.fixture.disk.crash();
            }
            6..8 => drop(store),
            _ => {
                store.flush();
                settle(&mut store);
                let before = self.check(&mut store);
                store.close().unwrap();
                self.fixture.disk.crash();
                let after = self.check(&mut self.fixture.recovered());
                // More may be there: a zone that was emptied and where nothing was written yet.
                let lost: Vec<_> = before.difference(&after).filter(|number| !self.damaged.contains(number)).collect();
                assert!(lost.is_empty(), "a clean stop lost {lost:?}");
            }
        }
    }
}

#[test]
fn after_any_crash_records_are_right_or_absent() {
    let seed = seed("ssd-crash");
    let mut random = Random::new(seed);
    let mut all = Found::default();
    for _ in 0..cases(120) {
        let mut case = Case::new(random.next());
        case.run();
        all.crashes += case.found.crashes;
        all.whole += case.found.whole;
        all.missing += case.found.missing;
        all.damaged += case.found.damaged;
    }
    println!("ssd-crash: {all:?}");
    assert!(all.whole > all.crashes && all.missing > 0 && all.damaged > 0, "the cases say nothing: {all:?}");
}

#[test]
fn a_crash_while_a_file_is_made_leaves_one_that_can_be_made() {
    for seed in 0..cases(100) {
        let fixture = Fixture::new(1, seed);
        drop(fixture.open().unwrap());
        fixture.disk.crash();
        let mut store = fixture.recovered();
        fixture.write_through(&mut store, &[Block::new(1)]);
        assert_eq!(fixture.count_whole(&mut store, &[Block::new(1)]), 1);
        let lost = settle(&mut store).iter().any(|event| matches!(event, Event::Lost(_)));
        assert!(!lost);
    }
}
