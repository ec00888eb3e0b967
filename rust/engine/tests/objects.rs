//! What the object store does for one process: values of all sizes, replacing, removing, full pools, many threads.
#![allow(missing_docs)]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::ShmDir;
use pegaflow_engine::objects::{ObjectStore, ObjectStoreOptions, ValueKind};
use pegaflow_engine::{Error, ErrorKind, OpenOptions, Pool};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

fn options(dir: &ShmDir, pool_bytes: usize) -> ObjectStoreOptions {
    ObjectStoreOptions { shm_dir: dir.0.clone(), pool_bytes: Some(pool_bytes as u64), ..ObjectStoreOptions::default() }
}

fn open(dir: &ShmDir, pool_bytes: usize) -> ObjectStore {
    ObjectStore::open(Some("p"), &options(dir, pool_bytes)).unwrap()
}

/// Bytes that tell which value they are of, and where in it.
fn value(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|index| (index.wrapping_mul(2_654_435_761) >> 9) as u8 ^ (seed.wrapping_mul(97) >> 2) as u8)
        .collect()
}

/// What comes of it once nobody is in the way: a thread that has no CPU may be so for longer than a call waits.
fn patiently<T>(mut call: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    let started = Instant::now();
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Busy && started.elapsed() < Duration::from_secs(120) => {}
            outcome => return outcome,
        }
    }
}

fn put(store: &ObjectStore, key: &str, value: &[u8]) -> Result<(), Error> {
    patiently(|| store.put(key, ValueKind::Bytes, value))
}

fn get(store: &ObjectStore, key: &str) -> Option<Vec<u8>> {
    patiently(|| store.get(key)).unwrap().map(|value| value.to_vec().unwrap())
}

fn verify(store: &ObjectStore) {
    let report = pegaflow_engine::admin::verify(store.path(), true, &mut |_, _| {}).unwrap();
    assert!(report.contains("\"ok\":true"), "{report}");
}

/// Around everything that changes how a value lies in its slots, for an empty key.
fn interesting_sizes() -> Vec<usize> {
    let borders =
        [0, 496, 512, 496 + 512, 496 + 8 * KIB, 496 + 16 * KIB, 496 + 24 * KIB, 496 + 128 * KIB, MIB, 3 * MIB];
    borders.iter().flat_map(|border| [border.saturating_sub(1), *border, border + 1]).collect()
}

#[test]
fn values_of_any_size_come_back_as_they_went_in() {
    let dir = ShmDir::new("object-sizes");
    for checksum in [true, false] {
        let options = ObjectStoreOptions { checksum, ..options(&dir, 64 * MIB) };
        let store = ObjectStore::open(Some(if checksum { "with" } else { "without" }), &options).unwrap();
        for (seed, bytes) in interesting_sizes().into_iter().enumerate() {
            let stored = value(seed, bytes);
            put(&store, "", &stored).unwrap();
            assert!(get(&store, "") == Some(stored), "{bytes} bytes");
        }
        assert_eq!(store.count().unwrap(), 1);
        verify(&store);
    }
}

#[test]
fn long_keys_lie_across_slots() {
    let dir = ShmDir::new("object-keys");
    let store = open(&dir, 64 * MIB);
    let mut keys: Vec<String> = [1, 495, 496, 497, 5000, 64 * KIB].iter().map(|length| "k".repeat(*length)).collect();
    for (seed, key) in keys.iter().enumerate() {
        put(&store, key, &value(seed, 100 * seed)).unwrap();
    }
    for (seed, key) in keys.iter().enumerate() {
        assert_eq!(get(&store, key), Some(value(seed, 100 * seed)));
    }
    let mut listed = store.keys().unwrap();
    listed.sort_unstable();
    keys.sort_unstable();
    assert!(listed == keys);
    assert_eq!(get(&store, &"k".repeat(498)), None);
    assert_eq!(put(&store, &"k".repeat(64 * KIB + 1), b"").unwrap_err().kind(), ErrorKind::InvalidArgument);
    verify(&store);
}

#[test]
fn the_kind_of_a_value_is_kept() {
    let store = ObjectStore::open(None, &ObjectStoreOptions::default()).unwrap();
    store.put("text", ValueKind::Str, "text".as_bytes()).unwrap();
    store.put("bytes", ValueKind::Bytes, b"text").unwrap();
    assert_eq!(store.get("text").unwrap().unwrap().kind(), ValueKind::Str);
    assert_eq!(store.get("bytes").unwrap().unwrap().kind(), ValueKind::Bytes);
}

#[test]
fn replacing_a_value_gives_its_slots_back() {
    let dir = ShmDir::new("object-replace");
    let store = open(&dir, 8 * MIB);
    for round in 0..50 {
        let bytes = [10, 5 * MIB / 2, 700, 3 * MIB, 20 * KIB][round % 5];
        put(&store, "key", &value(round, bytes)).unwrap();
        assert!(get(&store, "key") == Some(value(round, bytes)), "round {round}");
        assert_eq!(store.count().unwrap(), 1);
    }
    verify(&store);
    let dir = ShmDir::new("object-alone");
    let alone = open(&dir, 8 * MIB);
    put(&alone, "key", &value(0, 20 * KIB)).unwrap();
    assert_eq!(bytes_in_use(&store), bytes_in_use(&alone));
}

/// Bytes of all slots that hold something; a leak would change it.
fn bytes_in_use(store: &ObjectStore) -> u64 {
    let report = pegaflow_engine::admin::inspect(store.path()).unwrap();
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    report["namespaces"].as_array().unwrap().iter().map(|ns| ns["bytes_sealed"].as_u64().unwrap()).sum()
}

#[test]
fn a_removed_value_is_returned_once() {
    let dir = ShmDir::new("object-remove");
    let store = open(&dir, 8 * MIB);
    put(&store, "key", &value(1, 100 * KIB)).unwrap();
    let removed = store.remove("key").unwrap().unwrap();
    assert!(store.remove("key").unwrap().is_none());
    assert!(!store.contains("key").unwrap());
    assert_eq!(store.count().unwrap(), 0);
    assert_eq!(removed.to_vec().unwrap(), value(1, 100 * KIB));
    drop(removed);
    assert_eq!(bytes_in_use(&store), 0);
    verify(&store);
}

#[test]
fn a_held_value_outlives_its_key() {
    let dir = ShmDir::new("object-held");
    let store = open(&dir, 8 * MIB);
    put(&store, "key", &value(1, MIB)).unwrap();
    let held = store.get("key").unwrap().unwrap();
    for round in 2..20 {
        put(&store, "key", &value(round, MIB)).unwrap();
    }
    store.remove("key").unwrap();
    drop(store);
    assert!(held.to_vec().unwrap() == value(1, MIB));
}

#[test]
fn a_full_pool_refuses_and_loses_nothing() {
    for bytes in [40, 3 * KIB, 40 * KIB, 200 * KIB] {
        let dir = ShmDir::new("object-full");
        let store = open(&dir, 2 * MIB);
        let mut count = 0;
        let error = loop {
            match put(&store, &format!("key {count}"), &value(count, bytes)) {
                Ok(()) => count += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        assert!(count * bytes.max(512) > 1 << 20, "{count} values of {bytes} bytes in a pool of 2 MiB");
        assert_eq!(put(&store, "key 0", &value(7, MIB)).unwrap_err().kind(), ErrorKind::Full);
        for index in 0..count {
            assert!(get(&store, &format!("key {index}")) == Some(value(index, bytes)), "{index} of {count}");
        }
        assert_eq!(store.count().unwrap(), count);
        verify(&store);
        store.remove("key 0").unwrap();
        put(&store, "another", &value(0, bytes)).unwrap();
    }
}

#[test]
fn what_a_full_pool_held_makes_room_for_values_of_other_sizes() {
    let dir = ShmDir::new("object-shift");
    let store = open(&dir, 4 * MIB);
    for bytes in [100, 3 * MIB, 30 * KIB, 200, MIB] {
        let mut count = 0;
        while put(&store, &format!("key {count}"), &value(count, bytes)).is_ok() {
            count += 1;
        }
        assert!(count * bytes.max(512) > 5 * MIB / 2, "{count} values of {bytes} bytes in a pool of 4 MiB");
        for index in 0..count {
            assert!(store.remove(&format!("key {index}")).unwrap().is_some());
        }
    }
    assert_eq!(bytes_in_use(&store), 0);
}

#[test]
fn with_evict_every_value_that_fits_the_pool_is_taken() {
    let dir = ShmDir::new("object-evict");
    let store = ObjectStore::open(Some("p"), &ObjectStoreOptions { evict: true, ..options(&dir, 4 * MIB) }).unwrap();
    for (round, bytes) in [100, 3 * MIB, 30 * KIB, 200, MIB, 100].into_iter().enumerate() {
        for index in 0..(8 * MIB / bytes.max(512)) {
            let key = format!("{round} {index}");
            put(&store, &key, &value(index, bytes)).unwrap();
            assert!(get(&store, &key) == Some(value(index, bytes)), "{key}");
        }
    }
    verify(&store);
}

#[test]
fn eviction_takes_what_was_used_longest_ago() {
    let dir = ShmDir::new("object-lru");
    let store = ObjectStore::open(Some("p"), &ObjectStoreOptions { evict: true, ..options(&dir, 2 * MIB) }).unwrap();
    put(&store, "precious", b"mine").unwrap();
    for index in 0..20_000 {
        put(&store, &format!("key {index}"), b"junk").unwrap();
        if index % 16 == 0 {
            assert_eq!(get(&store, "precious").as_deref(), Some(&b"mine"[..]), "after {index} others");
        }
    }
    assert!(get(&store, "key 0").is_none());
    assert!(get(&store, "key 19999").is_some());
}

#[test]
fn a_value_larger_than_the_pool_is_refused_and_evicts_nothing() {
    let dir = ShmDir::new("object-larger");
    let store = ObjectStore::open(Some("p"), &ObjectStoreOptions { evict: true, ..options(&dir, 2 * MIB) }).unwrap();
    put(&store, "key", b"value").unwrap();
    let error = put(&store, "key", &value(0, 3 * MIB)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full);
    assert!(error.to_string().contains("larger than a pool of"), "{error}");
    assert_eq!(get(&store, "key").as_deref(), Some(&b"value"[..]));
}

#[test]
fn a_pool_too_small_for_its_classes_is_refused() {
    let options = ObjectStoreOptions { pool_bytes: Some(1000), ..ObjectStoreOptions::default() };
    assert_eq!(ObjectStore::open(None, &options).err().map(|error| error.kind()), Some(ErrorKind::InvalidArgument));
}

#[test]
fn values_stay_when_everybody_leaves() {
    let dir = ShmDir::new("object-restart");
    let sizes = [0, 10, 2000, 50 * KIB, 2 * MIB];
    {
        let store = open(&dir, 16 * MIB);
        for bytes in sizes {
            put(&store, &format!("{bytes}"), &value(bytes, bytes)).unwrap();
        }
    }
    let store = open(&dir, MIB);
    assert_eq!(store.pool_bytes(), 16 * MIB as u64, "an existing pool keeps its size");
    for bytes in sizes {
        assert!(get(&store, &format!("{bytes}")) == Some(value(bytes, bytes)));
    }
}

#[test]
fn a_cache_that_starves_in_the_same_pool_takes_no_value() {
    let dir = ShmDir::new("object-neighbour");
    let store = open(&dir, 2 * MIB);
    let mut count = 0;
    while put(&store, &format!("key {count}"), &value(count, 10_000)).is_ok() {
        count += 1;
    }
    let pool = Pool::open("p", &OpenOptions { shm_dir: dir.0.clone(), ..OpenOptions::default() }).unwrap();
    let ns = common::namespace(&pool, &[4096]);
    for _ in 0..20 {
        assert!(pool.reserve(ns, &common::keys(0..4), None, true).unwrap().is_empty());
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(store.count().unwrap(), count);
}

#[test]
fn a_store_that_evicts_leaves_a_cache_in_the_same_pool_its_share() {
    let dir = ShmDir::new("object-busy");
    let alias = dir.0.join("another-instance");
    std::os::unix::fs::symlink(&dir.0, &alias).unwrap();
    let cache = Pool::open("p", &OpenOptions { shm_dir: alias, ..dir.options(2 << 20, 128 << 10) }).unwrap();
    let ns = common::namespace(&cache, &[4096]);
    common::store(&cache, ns, 0..20);
    let store = ObjectStore::open(Some("p"), &ObjectStoreOptions { evict: true, ..options(&dir, 2 * MIB) }).unwrap();
    for count in 0..200 {
        put(&store, &format!("key {count}"), &value(count, 50 * KIB)).unwrap();
    }
    assert_eq!(cache.lookup(ns, &common::keys(0..20), 0).unwrap(), 20);
    assert!(get(&store, "key 199").is_some() && get(&store, "key 0").is_none());
}

#[test]
fn a_store_that_evicts_gets_room_in_a_pool_that_another_instance_has_filled() {
    let dir = ShmDir::new("object-late");
    let alias = dir.0.join("another-instance");
    std::os::unix::fs::symlink(&dir.0, &alias).unwrap();
    let cache = Pool::open("p", &OpenOptions { shm_dir: alias, ..dir.options(1 << 20, 128 << 10) }).unwrap();
    let ns = common::namespace(&cache, &[4096]);
    common::store(&cache, ns, 0..256);
    assert_eq!(cache.share().unwrap().bytes, cache.share().unwrap().used_bytes, "none of it is beyond its share");
    let store = ObjectStore::open(Some("p"), &ObjectStoreOptions { evict: true, ..options(&dir, MIB) }).unwrap();
    // Slots of each class, and more of one than a segment has.
    for bytes in [100, 20 * KIB, 100 * KIB, 300 * KIB] {
        put(&store, "key", &value(bytes, bytes)).unwrap();
        assert!(get(&store, "key") == Some(value(bytes, bytes)), "{bytes} bytes");
    }
    assert_eq!(cache.namespace_stats(ns).unwrap()[0], ("slots", 128), "no more than was needed");
    assert!(cache.lookup(ns, &common::keys(0..256), 0).unwrap() > 0);
    verify(&store);
}

#[test]
fn a_store_that_evicts_looks_beyond_segments_that_are_in_use() {
    let dir = ShmDir::new("object-beyond");
    let cache = Pool::open("p", &dir.options(1 << 20, 128 << 10)).unwrap();
    let ns = common::namespace(&cache, &[4096]);
    common::store(&cache, ns, 0..256);
    // One block in each segment but the hottest, where the head of the chain is.
    let segment_of = |lent: &pegaflow_engine::Lent| lent.places().next().unwrap().segment;
    let all = cache.lend(ns, &common::keys(0..256), true, u64::MAX).unwrap();
    let hottest = segment_of(&all[0].1);
    let mut lent = std::collections::HashMap::new();
    for (_, block) in all.into_iter().filter(|(_, block)| segment_of(block) != hottest) {
        lent.entry(segment_of(&block)).or_insert(block);
    }
    assert_eq!(lent.len(), 7);
    let store = ObjectStore::open(Some("p"), &ObjectStoreOptions { evict: true, ..options(&dir, MIB) }).unwrap();
    put(&store, "key", b"value").unwrap();
    assert_eq!(get(&store, "key").as_deref(), Some(&b"value"[..]));
}

#[test]
fn a_damaged_value_is_an_error_and_can_be_removed() {
    let dir = ShmDir::new("object-damaged");
    let store = open(&dir, 2 * MIB);
    for (key, bytes) in [("small", 300), ("large", 100 * KIB)] {
        put(&store, key, &vec![0x5A; bytes]).unwrap();
    }
    let segments = std::fs::read_dir(store.path()).unwrap().map(|entry| entry.unwrap().path());
    for segment in segments.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("segment")) {
        let mut bytes = std::fs::read(&segment).unwrap();
        for run in bytes.chunks_mut(64).filter(|run| run.iter().all(|byte| *byte == 0x5A)) {
            run[7] ^= 1;
        }
        std::os::unix::fs::FileExt::write_all_at(
            &std::fs::OpenOptions::new().write(true).open(&segment).unwrap(),
            &bytes,
            0,
        )
        .unwrap();
    }
    for key in ["small", "large"] {
        assert_eq!(store.get(key).unwrap().unwrap().to_vec().unwrap_err().kind(), ErrorKind::Corrupt);
        assert!(store.remove(key).unwrap().is_some());
        put(&store, key, b"new").unwrap();
        assert_eq!(get(&store, key).as_deref(), Some(&b"new"[..]));
    }
}

#[test]
fn threads_that_hammer_one_store_never_see_a_mixture() {
    let dir = ShmDir::new("object-threads");
    let store = ObjectStore::open(Some("p"), &ObjectStoreOptions { evict: true, ..options(&dir, 8 * MIB) }).unwrap();
    let gets = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            let (store, gets) = (&store, &gets);
            scope.spawn(move || {
                for round in (thread..6000).step_by(4) {
                    let key = format!("key {}", round * 7 % 13);
                    match round % 5 {
                        0 | 1 => {
                            let bytes = [8, 600, 9000, 30_000, 1_100_000 * usize::from(round % 60 == 0)][round / 5 % 5];
                            put(store, &key, &vec![round as u8; bytes]).unwrap();
                        }
                        2 => {
                            patiently(|| store.remove(&key)).unwrap();
                        }
                        _ => {
                            if let Some(value) = get(store, &key) {
                                assert!(value.iter().all(|byte| *byte == value[0]), "{key}");
                                gets.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    }
                }
            });
        }
    });
    assert!(gets.into_inner() > 100);
    verify(&store);
}

#[test]
fn of_racing_removers_one_gets_the_value() {
    let store = ObjectStore::open(None, &ObjectStoreOptions::default()).unwrap();
    for round in 0..300 {
        put(&store, "key", &value(round, 100)).unwrap();
        let got = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    if let Some(value) = patiently(|| store.remove("key")).unwrap() {
                        assert_eq!(value.bytes(), 100);
                        got.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(got.into_inner(), 1, "round {round}");
    }
}
