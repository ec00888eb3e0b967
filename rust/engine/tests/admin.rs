//! Looking at pools and removing them, with nobody attached.
#![allow(missing_docs)]

mod common;

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;

use common::{ShmDir, keys, namespace, store};
use pegaflow_engine::{ErrorKind, Pool, admin};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// A pool "p" with 20 blocks of two parts, which everybody has left.
fn abandoned_pool(test: &str) -> (ShmDir, PathBuf) {
    let dir = ShmDir::new(test);
    let pool = Pool::open("p", &dir.options(8 * MIB, MIB)).unwrap();
    let ns = namespace(&pool, &[4096, 8192]);
    assert_eq!(store(&pool, ns, 0..20), 20);
    let path = pool.path().to_owned();
    (dir, path)
}

fn verified(path: &std::path::Path) -> Value {
    serde_json::from_str(&admin::verify(path, true, &mut |_, _| {}).unwrap()).unwrap()
}

#[test]
fn a_pool_that_everybody_left_is_clean_and_described() {
    let (dir, path) = abandoned_pool("described");
    let report = verified(&path);
    assert_eq!(report["problems"], Value::Array(vec![]), "{report}");
    assert_eq!(report["blocks_checked"], 20);
    let facts: Value = serde_json::from_str(&admin::inspect(&path).unwrap()).unwrap();
    assert_eq!(facts["namespaces"][0]["blocks_sealed"], 20);
    assert_eq!(facts["namespaces"][0]["bytes_sealed"], 20 * 12288);
    assert_eq!(facts["processes"], Value::Array(vec![]));
    let list: Value = serde_json::from_str(&admin::list_pools(&dir.0).unwrap()).unwrap();
    assert_eq!((list[0]["name"].as_str(), list[0]["state"].as_str()), (Some("p"), Some("ok")));
    assert_eq!(list[0]["segments_path"].as_str(), path.to_str());
}

#[test]
fn a_living_user_is_seen_and_protects_the_pool() {
    let (dir, path) = abandoned_pool("living");
    let pool = Pool::open("p", &dir.options(8 * MIB, MIB)).unwrap();
    let ns = namespace(&pool, &[4096, 8192]);
    let leased = pool.lease(ns, &keys(0..20), 0, 5).unwrap();
    let facts: Value = serde_json::from_str(&admin::inspect(&path).unwrap()).unwrap();
    assert_eq!(
        (facts["processes"][0]["alive"].as_bool(), facts["processes"][0]["leases"].as_u64()),
        (Some(true), Some(5))
    );
    assert_eq!(admin::remove(&path, false).unwrap_err().kind(), ErrorKind::InUse);
    pool.release(&leased).unwrap();
    drop(pool);
    std::fs::write(path.join("traffic-v1"), "statistics of another version").unwrap();
    admin::remove(&path, false).unwrap();
    assert_eq!(std::fs::read_dir(&dir.0).unwrap().count(), 0);
}

#[test]
fn flipped_bytes_are_found_by_their_checksum() {
    let dir = ShmDir::new("flipped");
    let pool = Pool::open("p", &dir.options(8 * MIB, MIB)).unwrap();
    let ns = namespace(&pool, &[4096]);
    let reserved = common::reserve(&pool, ns, &keys(0..1))[0].1;
    let sum = pegaflow_engine::checksum::part_checksum(0, &[0; 4096]);
    pool.mark_written(0, &[reserved], Some(&[sum])).unwrap();
    pool.publish(&[reserved]).unwrap();
    assert_eq!(verified(pool.path())["checksums_checked"], 1);
    let (file, offset, _) = pool.locate(reserved, 0).unwrap().unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(file).unwrap();
    file.write_all_at(&[1], offset + 100).unwrap();
    assert_eq!(verified(pool.path())["ok"], false);
}

#[test]
fn pools_open_to_others_are_refused_and_listed_with_the_reason() {
    let (dir, path) = abandoned_pool("open-mode");
    std::fs::set_permissions(path.join("control"), std::fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(Pool::open("p", &dir.options(MIB, MIB)).unwrap_err().kind(), ErrorKind::Refused);
    let list: Value = serde_json::from_str(&admin::list_pools(&dir.0).unwrap()).unwrap();
    assert_eq!(list[0]["state"], "refused");
    assert!(list[0]["error"].as_str().unwrap().contains("open to other users"), "{list}");
    assert_eq!(admin::remove(&path, false).unwrap_err().kind(), ErrorKind::Refused);
    admin::remove(&path, true).unwrap();
}

#[test]
fn nothing_but_pools_is_ever_removed() {
    let dir = ShmDir::new("foreign");
    let foreign = dir.0.join("somebody");
    std::fs::create_dir(&foreign).unwrap();
    assert_eq!(admin::remove(&foreign, true).unwrap_err().kind(), ErrorKind::Refused);
    let absent = pegaflow_engine::names::pool_dir(&dir.0, 0, "absent");
    assert_eq!(admin::remove(&absent, true).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(foreign.is_dir());
    let facts: Value = serde_json::from_str(&admin::system_info()).unwrap();
    assert!(facts["page_bytes"].as_u64().unwrap() >= 4096, "{facts}");
}

#[test]
fn a_removal_leaves_what_is_no_pools_and_says_so() {
    let (_dir, path) = abandoned_pool("notes");
    std::fs::write(path.join("notes.txt"), "mine").unwrap();
    let error = admin::remove(&path, false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    let place = error.to_string().split(" has files in it that are no pool's").next().map(PathBuf::from).unwrap();
    assert_eq!(std::fs::read_to_string(place.join("notes.txt")).unwrap(), "mine");
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 1);
}

#[test]
fn a_pool_that_is_not_complete_says_what_clears_it_away() {
    let (_dir, path) = abandoned_pool("half");
    std::fs::remove_file(path.join("control")).unwrap();
    let error = admin::inspect(&path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("is not complete") && error.to_string().contains("pegaflow gc"), "{error}");
}

#[test]
fn a_file_in_the_place_of_the_directory_of_pools_is_what_is_named() {
    let dir = ShmDir::new("file-as-dir");
    let file = dir.0.join("file");
    std::fs::write(&file, "x").unwrap();
    let mut options = dir.options(MIB, MIB);
    options.shm_dir = file.clone();
    let error = Pool::open("p", &options).unwrap_err();
    assert!(error.to_string().starts_with(&format!("{} is not a directory: choose", file.display())), "{error}");
}
