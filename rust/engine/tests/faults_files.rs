//! Files that are not a pool's, or not ours, in the place of a pool's files: refused with a sentence, and never
//! followed, waited for or mapped. Two processes that create the same pool end up in one.
#![allow(missing_docs)]

mod common;
mod kill;

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use common::ShmDir;
use kill::blocks::{MAIN, POOL_NAME, check_chain, key, keys, namespace, open, options, store_all, store_chain};
use kill::child::Worker;
use kill::settled::{assert_nothing_lost, assert_settled};
use pegaflow_engine::{ErrorKind, Pool, checksum::part_checksum, names::pool_dir};

const WORDS: usize = 16;

/// A pool with blocks that everybody has left, and its control file.
fn abandoned(test: &str) -> (ShmDir, PathBuf) {
    let dir = ShmDir::new(test);
    let pool = open(&dir.0);
    store_all(&pool, namespace(&pool, MAIN), &keys(0..4), 1);
    let control = pool.path().join("control");
    (dir, control)
}

/// What opening the pool says; it must be refused.
fn refusal(dir: &Path) -> String {
    let error = Pool::open(POOL_NAME, &options(dir)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    let text = error.to_string();
    assert!(text.contains(&dir.display().to_string()), "it names the file: {text}");
    text
}

/// Change words of the superblock, with a checksum to match.
fn rewrite_superblock(control: &Path, change: impl Fn(&mut [u64; WORDS])) {
    let file = File::options().read(true).write(true).open(control).unwrap();
    let mut bytes = [0u8; WORDS * 8];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let mut words = [0u64; WORDS];
    for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(chunk.try_into().unwrap());
    }
    change(&mut words);
    let encode = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    words[WORDS - 1] = part_checksum(0, &encode(&words[..WORDS - 1]));
    file.write_all_at(&encode(&words), 0).unwrap();
}

#[test]
fn a_superblock_that_was_only_encoded_anew_is_accepted() {
    let (dir, control) = abandoned("same-superblock");
    rewrite_superblock(&control, |_| {});
    let pool = open(&dir.0);
    assert_eq!(pool.lookup(namespace(&pool, MAIN), &keys(0..4), 0).unwrap(), 4);
}

#[test]
fn another_layout_version_is_refused_by_name() {
    let (dir, control) = abandoned("version");
    rewrite_superblock(&control, |words| words[1] += 1);
    assert!(refusal(&dir.0).contains("has layout version 3, this program has 2"));
}

#[test]
fn impossible_sizes_are_refused_even_with_a_good_checksum() {
    type Change = fn(&mut [u64; WORDS]);
    let changes: [Change; 6] = [
        |words| words[2] = 0,
        |words| words[2] = u64::MAX,
        |words| words[3] = 0,
        |words| words[3] = 4097,
        |words| words[4] = u64::MAX,
        |words| words[4] *= 2,
    ];
    for change in changes {
        let (dir, control) = abandoned("sizes");
        rewrite_superblock(&control, change);
        refusal(&dir.0);
    }
}

#[test]
fn truncated_extended_and_random_files_are_refused() {
    for bytes in [0, 1, 127, 128, 4096, 100_000] {
        let (dir, control) = abandoned("truncated");
        File::options().write(true).open(&control).unwrap().set_len(bytes).unwrap();
        refusal(&dir.0);
    }
    let (dir, control) = abandoned("extended");
    let file = File::options().write(true).open(&control).unwrap();
    file.set_len(file.metadata().unwrap().len() + 4096).unwrap();
    refusal(&dir.0);
    let (dir, control) = abandoned("random");
    let mut random = kill::random::Random::new(kill::random::seed("random control file"));
    let noise: Vec<u8> = (0..fs::metadata(&control).unwrap().len()).map(|_| random.next() as u8).collect();
    fs::write(&control, noise).unwrap();
    assert!(refusal(&dir.0).contains("is not a pool's control file"));
}

#[test]
fn files_of_others_and_files_open_to_others_are_refused() {
    let (dir, control) = abandoned("owner");
    chown(&control, Some(12345), None).unwrap();
    assert!(refusal(&dir.0).contains("belongs to user 12345"));
    let (dir, control) = abandoned("dir-owner");
    chown(control.parent().unwrap(), Some(12345), None).unwrap();
    assert!(refusal(&dir.0).contains("belongs to user 12345"));
    let (dir, control) = abandoned("mode");
    fs::set_permissions(&control, Permissions::from_mode(0o644)).unwrap();
    assert!(refusal(&dir.0).contains("mode 644"));
    let (dir, control) = abandoned("dir-mode");
    fs::set_permissions(control.parent().unwrap(), Permissions::from_mode(0o750)).unwrap();
    assert!(refusal(&dir.0).contains("mode 750"));
}

#[test]
fn links_pipes_and_directories_in_the_place_of_a_control_file_are_refused() {
    let (dir, control) = abandoned("link");
    let elsewhere = dir.0.join("elsewhere");
    fs::rename(&control, &elsewhere).unwrap();
    symlink(&elsewhere, &control).unwrap();
    assert!(refusal(&dir.0).contains("symbolic link"));
    fs::remove_file(&control).unwrap();
    nix::unistd::mkfifo(&control, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(refusal(&dir.0).contains("not a regular file"));
    fs::remove_file(&control).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(&control).unwrap();
    refusal(&dir.0);
    fs::remove_file(&control).unwrap();
    fs::create_dir(&control).unwrap();
    refusal(&dir.0);
    fs::remove_dir(&control).unwrap();
    fs::rename(&elsewhere, &control).unwrap();
    assert_settled(&open(&dir.0));
}

#[test]
fn a_link_or_a_file_in_the_place_of_a_pools_directory_is_refused() {
    let (dir, control) = abandoned("dir-link");
    let place = control.parent().unwrap();
    let elsewhere = dir.0.join("elsewhere");
    fs::rename(place, &elsewhere).unwrap();
    symlink(&elsewhere, place).unwrap();
    assert!(refusal(&dir.0).contains("is not a directory"));
    fs::remove_file(place).unwrap();
    File::create(place).unwrap();
    assert!(refusal(&dir.0).contains("is not a directory"));
}

#[test]
fn a_dangling_link_creates_nothing_elsewhere() {
    let dir = ShmDir::new("dangling");
    let place = pool_dir(&dir.0, nix::unistd::geteuid().as_raw(), POOL_NAME);
    fs::create_dir(&place).unwrap();
    fs::set_permissions(&place, Permissions::from_mode(0o700)).unwrap();
    let target = dir.0.join("target");
    symlink(&target, place.join("control")).unwrap();
    refusal(&dir.0);
    assert!(!target.exists());
}

#[test]
fn a_segment_that_is_gone_cut_or_foreign_is_a_block_without_bytes() {
    type Damage = fn(&Path);
    let damages: [Damage; 5] = [
        |segment| fs::remove_file(segment).unwrap(),
        |segment| File::options().write(true).open(segment).unwrap().set_len(0).unwrap(),
        |segment| fs::set_permissions(segment, Permissions::from_mode(0o666)).unwrap(),
        |segment| chown(segment, Some(12345), None).unwrap(),
        |segment| {
            fs::rename(segment, segment.with_extension("aside")).unwrap();
            symlink(segment.with_extension("aside"), segment).unwrap();
        },
    ];
    for damage in damages {
        let (dir, control) = abandoned("segment");
        damage(&control.with_file_name("segment-00000"));
        let pool = open(&dir.0);
        let ns = namespace(&pool, MAIN);
        let leased = pool.lease(ns, &keys(0..1), 0, 1).unwrap();
        assert!(pool.space().read_source(leased[0], 0).is_none(), "no address rather than a wrong one");
        assert!(pool.space().read_source(leased[0], 1).is_some(), "the other segment is whole");
        pool.release(&leased).unwrap();
    }
}

#[test]
fn processes_that_create_a_pool_at_once_share_it() {
    const ROUNDS: usize = 60;
    let dir = ShmDir::new("create-race");
    let mut workers: Vec<Worker> = (0..3).map(|_| Worker::start("create", &dir.0, &[])).collect();
    for round in 0..ROUNDS {
        workers.iter_mut().for_each(|worker| worker.tell(&format!("pool-{round}")));
        let answers: Vec<String> = workers.iter_mut().map(Worker::line).collect();
        let created = answers.iter().filter(|answer| answer.starts_with("created")).count();
        assert_eq!(created, 1, "round {round}: {answers:?}");
        let mut rows: Vec<&str> = answers.iter().map(|answer| answer.split_once(' ').unwrap().1).collect();
        rows.sort_unstable();
        assert_eq!(rows, ["0", "1", "2"], "all are members of one pool");
        let place = pool_dir(&dir.0, nix::unistd::geteuid().as_raw(), &format!("pool-{round}"));
        let files: Vec<_> = fs::read_dir(place).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(files.iter().all(|name| !name.to_str().unwrap().contains("new")), "{files:?}");
    }
    workers.into_iter().for_each(Worker::finish);
}

#[test]
fn an_unfinished_control_file_is_removed_by_the_next_process() {
    let dir = ShmDir::new("unfinished");
    for point in ["create.control_written", "create.linked"] {
        let mut worker = Worker::start("point", &dir.0, &[point, "kill"]);
        assert!(matches!(worker.end(), nix::sys::wait::WaitStatus::Signaled(..)));
        let pool = open(&dir.0);
        let mut files: Vec<_> = fs::read_dir(pool.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        files.sort();
        assert_eq!(files, ["control", "gone-v1"], "after {point}");
        let path = pool.path().to_owned();
        drop(pool);
        pegaflow_engine::admin::remove(&path, false).unwrap();
    }
}

#[test]
fn a_pool_that_is_removed_and_created_again_and_again_is_always_one() {
    let dir = ShmDir::new("remove-race");
    let path = pool_dir(&dir.0, nix::unistd::geteuid().as_raw(), POOL_NAME);
    let (mut removed, mut workers) = (0, 0);
    // Who is faster how often is up to the host.
    while removed <= 10 {
        workers += 1;
        assert!(workers < 50, "removed only {removed} times");
        let mut worker = Worker::start("open-close", &dir.0, &["400"]);
        while worker.ended().is_none() {
            removed += usize::from(pegaflow_engine::admin::remove(&path, false).is_ok());
        }
    }
    println!("removed {removed} times, from under {workers} processes");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    store_all(&pool, ns, &[key(1)], 1);
    store_chain(&pool, ns, &keys(1..5), 1);
    assert_eq!(check_chain(&pool, ns, &keys(1..5)), 4);
    assert_nothing_lost(&pool, &[ns]);
    drop(pool);
    pegaflow_engine::admin::remove(&path, false).unwrap();
    assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 0, "nothing set aside is left");
}
