//! What happens in a tmpfs of 64 MiB.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pegaflow_engine::{ErrorKind, Key, Namespace, OpenOptions, Pool, admin};

use crate::blocks::{MAIN, check_chain, key, keys, store_chain};
use crate::patience::PATIENCE;

const MIB: u64 = 1 << 20;
/// Large, so that little is stored until all is full.
const PART_BYTES: [u64; 2] = [16 << 10, 32 << 10];

fn namespace(pool: &Pool, byte: u8) -> Namespace {
    pool.namespace(&[byte; 32], 0, &PART_BYTES, "small tmpfs").unwrap()
}

pub fn run(dir: &Path, what: &str) {
    match what {
        "pool-too-large" => pool_too_large(dir),
        "filled-by-others" => filled_by_others(dir),
        "index-too-large" => index_too_large(dir),
        "default-size" => default_size(dir),
        "completely-full" => completely_full(dir),
        "one-starves" => one_starves(dir),
        "sibling" => sibling(dir),
        other => panic!("no test {other}"),
    }
}

fn options(dir: &Path, pool_bytes: u64, segment_bytes: u64) -> OpenOptions {
    OpenOptions {
        shm_dir: dir.to_owned(),
        pool_bytes: Some(pool_bytes),
        segment_bytes: Some(segment_bytes),
        slots_max: Some(1 << 16),
        policy: Some("lru".into()),
        ..OpenOptions::default()
    }
}

fn stat(pool: &Pool, name: &str) -> u64 {
    pool.stats().iter().find(|(known, _)| *known == name).unwrap().1
}

fn free_bytes(dir: &Path) -> u64 {
    let stat = nix::sys::statvfs::statvfs(dir).unwrap();
    stat.blocks_available() * stat.fragment_size()
}

/// A file that leaves `left` bytes, even if the pool grows meanwhile.
fn fill_up(dir: &Path, left: u64) {
    let file = File::create(dir.join("others")).unwrap();
    let mut piece = 16 * MIB;
    while piece >= 4096 {
        let taken = file.metadata().unwrap().len();
        let room = free_bytes(dir) >= left + piece;
        if !room || nix::fcntl::posix_fallocate(file.as_fd(), taken as i64, piece as i64).is_err() {
            piece /= 2;
        }
    }
}

/// Store single blocks until `done`.
fn store_until(pool: &Arc<Pool>, ns: Namespace, first: u64, done: impl Fn(u64) -> bool) -> u64 {
    let (started, mut number) = (Instant::now(), first);
    while !done(number) {
        assert!(started.elapsed() < PATIENCE, "block {number}: {:?}", pool.last_grow_error());
        if store_chain(pool, ns, &[key(number)], number) == 1 {
            number += 1;
        } else {
            std::thread::sleep(Duration::from_micros(500));
        }
    }
    number
}

fn assert_clean(pool: &Pool) {
    let report = admin::verify(pool.path(), true, &mut |_, _| {}).unwrap();
    assert!(report.contains("\"problems\":[]") || report.contains("\"problems\": []"), "{report}");
}

fn assert_says_what_to_do(text: &str) {
    assert!(text.contains("no room for") && text.contains("--shm-size") && text.contains("pegaflow gc"), "{text}");
}

fn pool_too_large(dir: &Path) {
    let pool = Pool::open("p", &options(dir, 1 << 30, 4 * MIB)).unwrap();
    let ns = namespace(&pool, MAIN);
    let failed = || pool.last_grow_error().is_some();
    let stored = store_until(&pool, ns, 0, |_| failed());
    assert_says_what_to_do(&pool.last_grow_error().unwrap());
    assert!(stat(&pool, "grow_failures") > 0);
    assert!(stored * PART_BYTES.iter().sum::<u64>() > 20 * MIB, "{stored} blocks");
    for number in 0..stored {
        assert_eq!(check_chain(&pool, ns, &[key(number)]), 1, "block {number} is lost");
    }
    assert_clean(&pool);
    // From now on others make room, and nothing is lost by the segments that could not be made.
    let slots = pool.namespace_stats(ns).unwrap()[0].1;
    store_until(&pool, ns, stored, |number| number == stored + slots);
    assert!(stat(&pool, "blocks_evicted") > 0);
    let all = (stored..stored + slots).all(|number| check_chain(&pool, ns, &[key(number)]) == 1);
    assert!(all, "all {slots} slots hold what was stored last");
    assert_clean(&pool);
}

fn filled_by_others(dir: &Path) {
    let pool = Pool::open("p", &options(dir, 48 * MIB, 4 * MIB)).unwrap();
    let ns = namespace(&pool, MAIN);
    let stored = store_until(&pool, ns, 0, |number| number == 100);
    fill_up(dir, 5 * MIB);
    let stored = store_until(&pool, ns, stored, |_| pool.last_grow_error().is_some());
    let text = pool.last_grow_error().unwrap();
    assert_says_what_to_do(&text);
    let slots = pool.namespace_stats(ns).unwrap()[0].1;
    let stored = store_until(&pool, ns, stored, |number| number == stored + slots);
    let before = pool.namespace_stats(ns).unwrap()[0].1;
    assert_eq!(before, slots, "nothing grew while there was no room");
    assert_clean(&pool);
    fs::remove_file(dir.join("others")).unwrap();
    store_until(&pool, ns, stored, |_| pool.namespace_stats(ns).unwrap()[0].1 > before);
    let started = Instant::now();
    while pool.last_grow_error().is_some() {
        assert!(started.elapsed() < PATIENCE, "it could grow, but still says why it could not");
    }
    assert_clean(&pool);
}

fn index_too_large(dir: &Path) {
    let large = OpenOptions { slots_max: Some(1 << 27), ..options(dir, 1 << 40, 1 << 30) };
    let error = Pool::open("p", &large).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ShmFull, "{error}");
    assert_says_what_to_do(&error.to_string());
    let left: Vec<_> =
        fs::read_dir(dir).unwrap().flat_map(|pool| fs::read_dir(pool.unwrap().path()).unwrap()).collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(free_bytes(dir) > 63 * MIB);
    let pool = Pool::open("p", &options(dir, 32 * MIB, 4 * MIB)).unwrap();
    store_until(&pool, namespace(&pool, MAIN), 0, |number| number == 10);
}

fn default_size(dir: &Path) {
    let pool = Pool::open("p", &OpenOptions { shm_dir: dir.to_owned(), ..OpenOptions::default() }).unwrap();
    assert!(pool.pool_bytes() <= 32 * MIB, "{} bytes", pool.pool_bytes());
    let ns = namespace(&pool, MAIN);
    store_until(&pool, ns, 0, |number| number == 1500);
    assert!(stat(&pool, "blocks_evicted") > 0);
    assert_eq!(pool.last_grow_error(), None, "half of what was left is enough for all of the pool");
    assert_clean(&pool);
}

fn completely_full(dir: &Path) {
    let pool = Pool::open("p", &options(dir, 32 * MIB, 4 * MIB)).unwrap();
    let ns = namespace(&pool, MAIN);
    let chain: Vec<Key> = keys(0..8);
    store_until(&pool, ns, 0, |number| number == 1);
    store_chain(&pool, ns, &chain, 1);
    fill_up(dir, 0);
    let error = Pool::open("second", &options(dir, 8 * MIB, MIB)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ShmFull, "{error}");
    assert_eq!(check_chain(&pool, ns, &chain), 8);
    let slots = pool.namespace_stats(ns).unwrap()[0].1;
    store_until(&pool, ns, 100, |number| number == 100 + 2 * slots);
    assert_clean(&pool);
    drop(pool);
    let pool = Pool::open("p", &OpenOptions { create: false, ..options(dir, 0, 0) }).unwrap();
    assert_eq!(check_chain(&pool, ns, &[key(100 + 2 * slots - 1)]), 1, "a full file system keeps what it has");
}

/// Blocks that all fit.
const BLOCKS: u64 = 400;

fn one_starves(dir: &Path) {
    let pool = Pool::open("p", &options(dir, 48 * MIB, 4 * MIB)).unwrap();
    let ns = namespace(&pool, MAIN);
    store_until(&pool, ns, 0, |number| number == BLOCKS);
    // Memory of an extent is free when its siblings have let it go, too.
    let mut sibling = Sibling::start(dir);
    fill_up(dir, 0);
    let before = pool.namespace_stats(ns).unwrap()[0].1;
    let starving = namespace(&pool, MAIN + 1);
    store_until(&pool, starving, 0, |number| number == 64);
    let left = pool.namespace_stats(ns).unwrap()[0].1;
    assert!(0 < left && left < before, "{left} of {before} slots are left to the other");
    assert!((0..64).all(|number| check_chain(&pool, starving, &[key(number)]) == 1), "a block is lost");
    let kept = (0..BLOCKS).filter(|number| check_chain(&pool, ns, &[key(*number)]) == 1).count() as u64;
    assert!(kept >= left.min(BLOCKS) / 2, "{kept} blocks in {left} slots");
    sibling.end();
    assert_clean(&pool);
}

/// A process that has all segments mapped and does nothing.
fn sibling(dir: &Path) {
    let pool = Pool::open("p", &OpenOptions { create: false, ..options(dir, 0, 0) }).unwrap();
    let ns = namespace(&pool, MAIN);
    assert!((0..BLOCKS).all(|number| check_chain(&pool, ns, &[key(number)]) == 1));
    crate::say("holding");
    crate::wait_for_parent();
}

struct Sibling(Child);

impl Sibling {
    fn start(dir: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["full", dir.to_str().unwrap(), "sibling"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), "holding");
        Self(child)
    }

    fn end(&mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Sibling {
    fn drop(&mut self) {
        if self.0.try_wait().is_ok_and(|status| status.is_none()) {
            let _killed = self.0.kill();
            let _waited = self.0.wait();
        }
    }
}
