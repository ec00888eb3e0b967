//! A process that writes to an SSD cache is killed (kill -9) again and again. What it said was written is found by the
//! next one, byte by byte, but for the last writes that were on their way together.
#![allow(missing_docs)]

mod kill;

use std::path::{Path, PathBuf};
use std::time::Duration;

use kill::child::Worker;
use kill::random::{Random, seed};
use kill::records::{CHUNK_BYTES, DEPTH, Target, open_store, record_bytes, record_id};
use pegaflow_engine::ssd::{Event, ReadOutcome, ReadStart, Store};

const ROUNDS: u64 = 6;
const RECORDS_PER_ROUND: u64 = 300;

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

/// Whether a record is there; if it is, it is right.
fn is_whole(store: &mut Store<Target>, number: u64) -> bool {
    let bytes = record_bytes(number);
    let target = Target(vec![0; bytes.len()]);
    let ReadStart::Started(_) = store.read(&record_id(number), &[bytes.len() as u64], target) else { return false };
    loop {
        for event in store.poll(Duration::from_millis(100)) {
            let Event::Read(_, target, outcome) = event else { continue };
            assert!(outcome != ReadOutcome::Whole || target.0 == bytes, "wrong bytes of record {number}");
            return outcome == ReadOutcome::Whole;
        }
    }
}

/// Let a process write, kill it, and return the numbers that it said were written.
fn write_and_kill(dir: &Path, backend: &str, first: u64, random: &mut Random) -> Vec<u64> {
    let (start, count) = (first.to_string(), RECORDS_PER_ROUND.to_string());
    let mut worker = Worker::start("ssd", dir, &[backend, &start, &count]);
    let mut written = Vec::new();
    let wanted = 1 + random.below(RECORDS_PER_ROUND);
    while (written.len() as u64) < wanted {
        written.push(worker.line_in_time("writing records").parse().unwrap());
    }
    worker.kill_alone();
    // What it said before it died.
    while let Ok(number) = worker.line().parse() {
        written.push(number);
    }
    written
}

#[test]
fn records_that_were_written_outlive_kill_9() {
    let mut random = Random::new(seed("ssd_kill"));
    let folder = Folder(Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("ssd-kill-{}", std::process::id())));
    std::fs::create_dir_all(&folder.0).unwrap();
    let mut kept: Vec<u64> = Vec::new();
    for round in 0..ROUNDS {
        let backend = if round % 2 == 0 { "uring" } else { "threads" };
        let written = write_and_kill(&folder.0, backend, round * RECORDS_PER_ROUND, &mut random);
        let mut store = open_store(&folder.0, backend);
        let (found, lost): (Vec<u64>, Vec<u64>) = written.iter().partition(|number| is_whole(&mut store, **number));
        let bytes_lost = lost.iter().map(|number| record_bytes(*number).len()).sum::<usize>();
        assert!(bytes_lost <= usize::from(DEPTH + 1) * CHUNK_BYTES, "{} records are lost", lost.len());
        assert!(kept.iter().all(|number| is_whole(&mut store, *number)), "records of earlier rounds are lost");
        assert_eq!(store.counters().zones_evicted, 0);
        kept.extend(found);
    }
    assert!(kept.len() as u64 > ROUNDS);
}
