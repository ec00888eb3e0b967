//! How fast a store writes, reads and recovers; `benchmarks/ssd.py` runs it beside fio.
//!
//! `ssd-speed spill|prefetch DIR BACKEND TOTAL_BYTES RECORD_BYTES CHUNK_BYTES DEPTH` and
//! `ssd-speed fill-clean|fill-crash|recover DIR RECORDS` print one line of JSON.
#![allow(missing_docs)]

use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use pegaflow_engine::Key;
use pegaflow_engine::ssd::{
    Backend, Event, ReadOutcome, ReadStart, ReadTarget, Record, RecordId, Store, StoreOptions, WriteStart,
};

/// Copies what is read to one place, as a load into a slot does.
struct Slot(Vec<u8>);

impl ReadTarget for Slot {
    fn put(&mut self, _part: usize, offset: usize, bytes: &[u8]) {
        self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

fn id(number: u64) -> RecordId {
    let key = number.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    RecordId { fingerprint: [1; 32], group: 0, key: Key::new(&key).unwrap() }
}

fn cpu_seconds() -> f64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    seconds(usage.user_time()) + seconds(usage.system_time())
}

fn open(options: StoreOptions) -> Store<Slot> {
    Store::open(options).unwrap_or_else(|error| panic!("{error}"))
}

/// Write all records; returns when all are on disk.
fn write_all(store: &mut Store<Slot>, records: u64, block: &[u8]) {
    let (mut next, mut ended) = (0, 0);
    while ended < records {
        while next < records {
            match store.write(&Record { id: id(next), parts: &[block], checksum: None }) {
                WriteStart::Queued(_) => next += 1,
                WriteStart::Busy => break,
                other => panic!("{other:?}"),
            }
        }
        if next == records {
            store.flush();
        }
        for event in store.poll(Duration::from_millis(100)) {
            assert!(matches!(event, Event::Written(_)), "a write failed");
            ended += 1;
        }
    }
}

/// Read all records, with as many on their way as there are slots.
fn read_all(store: &mut Store<Slot>, records: u64, block: &[u8], slots: usize) {
    let mut free: Vec<Slot> = (0..slots).map(|_| Slot(vec![0; block.len()])).collect();
    let (mut next, mut ended) = (0, 0);
    while ended < records {
        while next < records
            && let Some(slot) = free.pop()
        {
            let ReadStart::Started(_) = store.read(&id(next), &[block.len() as u64], slot) else {
                panic!("record {next} is not there")
            };
            next += 1;
        }
        for event in store.poll(Duration::from_millis(100)) {
            let Event::Read(_, slot, ReadOutcome::Whole) = event else { panic!("a read failed") };
            free.push(slot);
            ended += 1;
        }
    }
    assert!(free.iter().all(|slot| slot.0 == block));
}

fn move_bytes(what: &str, arguments: &[String]) {
    let number = |at: usize| arguments[at].parse::<u64>().unwrap();
    let backend = if arguments[1] == "uring" { Backend::Uring } else { Backend::Threads };
    let (total, record, chunk, depth) = (number(2), number(3), number(4) as usize, number(5) as u16);
    // The header takes a block of its own, so the record on disk is as large as asked for.
    let block: Vec<u8> = (0..record - 4096).map(|at| (at * 7 % 251) as u8).collect();
    let mut store = open(StoreOptions {
        directories: vec![arguments[0].clone().into()],
        capacity_bytes: Some(total + total / 4 + (64 << 20)),
        chunk_bytes: chunk,
        read_depth: depth,
        write_depth: depth,
        backend,
        ..StoreOptions::default()
    });
    store.recover();
    let records = total / record;
    let (started, cpu) = (Instant::now(), cpu_seconds());
    match what {
        "spill" => write_all(&mut store, records, &block),
        _ => read_all(&mut store, records, &block, 2 * usize::from(depth)),
    }
    let (seconds, cpu) = (started.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    let gigabytes = (records * record) as f64 / 1e9;
    println!("{{\"gb_per_s\": {}, \"cpu_s_per_gb\": {}}}", gigabytes / seconds, cpu / gigabytes);
    store.close().unwrap();
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    status.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

fn fill_or_recover(what: &str, arguments: &[String]) {
    let records: u64 = arguments[1].parse().unwrap();
    let options = StoreOptions {
        directories: vec![arguments[0].clone().into()],
        // One block each, and as many records per zone as with blocks of 32 KiB in zones of 256 MiB.
        capacity_bytes: Some(records * 512 + records * 64 + (64 << 20)),
        block_bytes: Some(512),
        zone_bytes: Some(4 << 20),
        ..StoreOptions::default()
    };
    let started = Instant::now();
    let mut store = open(options);
    let before = resident_bytes();
    store.recover();
    let seconds = started.elapsed().as_secs_f64();
    if what == "recover" {
        let (found, memory) = (store.view().records(), resident_bytes().saturating_sub(before));
        println!("{{\"records\": {found}, \"seconds\": {seconds}, \"bytes_per_record\": {}}}", memory / found as u64);
        return;
    }
    write_all(&mut store, records, &[7; 200]);
    println!("{{\"records\": {}}}", store.view().records());
    if what == "fill-clean" {
        store.close().unwrap();
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments[0].as_str() {
        what @ ("spill" | "prefetch") => move_bytes(what, &arguments[1..]),
        what => fill_or_recover(what, &arguments[1..]),
    }
}
