//! Hostile bytes in the files of a pool, before and while a process works with it, and in everything that is parsed: an
//! error or correct service, and never a crash, a hang or an access outside. `PEGAFLOW_TEST_SEED` repeats a run,
//! `PEGAFLOW_TEST_CASES` makes it longer; `make fuzz` looks for inputs of the same targets.
#![allow(missing_docs)]

mod common;
mod hostile;
mod kill;

use std::os::unix::fs::{FileExt, OpenOptionsExt};

use common::ShmDir;
use kill::child::Worker;
use kill::random::seed;
use pegaflow_engine::{BlockRef, OpenOptions, Pool, admin};
use xxhash_rust::xxh3::xxh3_64;

/// A worker takes all known inputs and `cases` random ones, and says which before each.
fn survive(target: &str, cases: u64) {
    let (dir, seed) = (ShmDir::new(target), seed(target));
    let cases = std::env::var("PEGAFLOW_TEST_CASES").unwrap_or(cases.to_string());
    let mut worker = Worker::start("hostile", &dir.0, &[target, &seed.to_string(), &cases]);
    let mut last = String::from("before the first case");
    loop {
        let line = worker.line_in_time(&last);
        match line.as_str() {
            "done" => break,
            "" => panic!("the worker died at {last}: {:?}", worker.end()),
            _ => last = line,
        }
    }
    worker.finish();
}

#[test]
fn a_control_file_of_any_bytes_is_refused_or_served() {
    survive("control", 200);
}

#[test]
fn words_damaged_before_and_under_the_hands_of_a_process_do_it_no_harm() {
    survive("pool", 400);
}

#[test]
fn words_of_the_ssd_tier_damaged_under_the_hands_of_who_serves_and_asks_do_no_harm() {
    survive("tier", 100);
}

#[test]
fn damaged_values_are_errors_or_right() {
    survive("objects", 300);
}

#[test]
fn what_is_parsed_is_an_error_or_right() {
    survive("parsers", 2000);
}

#[test]
fn every_target_has_known_inputs() {
    for target in hostile::TARGETS {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hostile/inputs").join(target);
        assert!(std::fs::read_dir(dir).unwrap().count() > 0, "no input of {target}");
    }
}

/// A geometry that is possible, with a part as large as its one segment: slots times bytes is beyond 64 bits.
#[test]
fn sizes_whose_product_is_beyond_64_bits_are_problems() {
    const LARGEST: u64 = 1 << 50;
    let dir = ShmDir::new("largest");
    let options = OpenOptions { slots_max: Some(1 << 14), ..dir.options(512 << 10, 64 << 10) };
    let pool = Pool::open("p", &options).unwrap();
    let path = pool.path().to_owned();
    drop(pool);
    let control = std::fs::File::options().read(true).write(true).open(path.join("control")).unwrap();
    let mut superblock = [0u8; 128];
    control.read_exact_at(&mut superblock, 0).unwrap();
    superblock[16..24].copy_from_slice(&LARGEST.to_le_bytes());
    superblock[24..32].copy_from_slice(&LARGEST.to_le_bytes());
    let sum = xxh3_64(&superblock[..120]);
    superblock[120..].copy_from_slice(&sum.to_le_bytes());
    control.write_all_at(&superblock, 0).unwrap();
    let (namespaces, extents) = (20_480, 200_704);
    let write = |at: u64, words: &[u64]| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        control.write_all_at(&bytes, at).unwrap();
    };
    write(namespaces, &[1, 1, 0, 0, 0, 0, 1 << 32]);
    write(namespaces + 192, &[LARGEST]);
    write(extents, &[2, 1 << 32, 1 << 46, 0]);
    // Behind the extents and the stripes: 256 ranges, all of extent 0.
    write(extents + 4096 + (64 << 10), &[1 << 32 | 1; 128]);
    // The last slot is reserved by nobody alive.
    write(control.metadata().unwrap().len() - 128, &[7 << 32 | 5 << 8 | 1]);
    std::fs::File::options().write(true).create_new(true).mode(0o600).open(path.join("segment-00000")).unwrap();
    let report = admin::verify(&path, true, &mut |_, _| {}).unwrap();
    assert!(report.contains("slots need 18446744073709551615"), "{report}");
    admin::inspect(&path).unwrap();
    let pool = Pool::open("p", &options).unwrap();
    assert_eq!(pool.locate(BlockRef(7 << 32 | ((1 << 14) - 1)), 0).unwrap(), None);
}
