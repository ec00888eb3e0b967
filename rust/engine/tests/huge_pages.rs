//! Pools whose segments lie on a hugetlbfs: a tmpfs that the made-up files of a kernel call one, since few test
//! machines have huge pages to give away.
#![allow(missing_docs)]

mod common;

use std::path::{Path, PathBuf};

use common::{ShmDir, keys, namespace, store};
use nix::fcntl::{Flock, FlockArg};
use pegaflow_engine::{ErrorKind, HugePages, OpenOptions, Pool, admin};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const PAGE_BYTES: u64 = 2 * MIB;
const POOL_BYTES: u64 = 16 * MIB;

/// A directory for pools, one that is said to be a hugetlbfs, and files that say so.
struct World {
    pools: ShmDir,
    huge: ShmDir,
    system: ShmDir,
}

fn world(test: &str, free_pages: u64) -> World {
    let [pools, huge, system] = ["pools", "huge", "system"].map(|what| ShmDir::new(&format!("{test}-{what}")));
    let put = |path: &str, text: String| {
        let path = system.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    put("proc/meminfo", "Hugepagesize: 2048 kB\n".into());
    put("proc/self/mounts", format!("none {} hugetlbfs rw 0 0\n", huge.0.display()));
    put("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", format!("{free_pages}\n"));
    put("sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "0\n".into());
    World { pools, huge, system }
}

impl World {
    fn options(&self) -> OpenOptions {
        let huge_pages = Some(HugePages { dir: None, system_root: self.system.0.clone() });
        OpenOptions { huge_pages, ..self.pools.options(POOL_BYTES, 3 * MIB) }
    }

    fn open(&self) -> std::sync::Arc<Pool> {
        Pool::open("p", &self.options()).unwrap()
    }

    /// Directories of segments.
    fn homes(&self) -> Vec<PathBuf> {
        std::fs::read_dir(&self.huge.0).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

fn segments(dir: &Path) -> Vec<u64> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let named = entries.filter(|entry| entry.file_name().to_str().unwrap().starts_with("segment-"));
    named.map(|entry| entry.metadata().unwrap().len()).collect()
}

/// Store a few blocks and leave.
fn fill(world: &World) -> PathBuf {
    let pool = world.open();
    assert_eq!(store(&pool, namespace(&pool, &[4096, 70_000]), 0..20), 20);
    pool.path().to_owned()
}

#[test]
fn segments_are_whole_huge_pages_in_a_directory_that_everybody_finds() {
    let world = world("found", 100);
    let path = fill(&world);
    let homes = world.homes();
    assert_eq!((homes.len(), segments(&path)), (1, vec![]));
    let lengths = segments(&homes[0]);
    assert!(lengths.len() >= 2 && lengths.iter().all(|bytes| bytes.is_multiple_of(PAGE_BYTES)), "{lengths:?}");
    let list: Value = serde_json::from_str(&admin::list_pools(&world.pools.0).unwrap()).unwrap();
    assert_eq!(list[0]["segments_path"].as_str(), homes[0].to_str());
    // Whoever comes later need not want huge pages, or know where they are.
    let pool = Pool::open("p", &world.pools.options(MIB, MIB)).unwrap();
    assert_eq!(pool.segment_bytes(), PAGE_BYTES);
    let ns = namespace(&pool, &[4096, 70_000]);
    assert_eq!(pool.lookup(ns, &keys(0..20), 0).unwrap(), 20);
    let leased = pool.lease(ns, &keys(0..20), 0, 1).unwrap();
    let (file, _, _) = pool.locate(leased[0], 1).unwrap().unwrap();
    assert_eq!(file.parent().unwrap(), homes[0]);
    pool.release(&leased).unwrap();
    let report: Value = serde_json::from_str(&admin::verify(&path, true, &mut |_, _| {}).unwrap()).unwrap();
    assert_eq!((&report["problems"], &report["blocks_checked"]), (&Value::Array(vec![]), &20.into()), "{report}");
}

#[test]
fn a_pool_that_is_removed_leaves_no_huge_page_behind() {
    let world = world("removed", 100);
    let path = fill(&world);
    admin::remove(&path, false).unwrap();
    assert!(world.homes().is_empty());
    assert_eq!(std::fs::read_dir(&world.pools.0).unwrap().count(), 0);
}

#[test]
fn without_enough_huge_pages_the_pool_is_in_ordinary_ones() {
    let world = world("scarce", POOL_BYTES / PAGE_BYTES - 1);
    let path = fill(&world);
    assert!(world.homes().is_empty());
    assert!(segments(&path).len() >= 2);
}

#[test]
fn the_default_size_of_a_pool_is_no_more_than_there_are_huge_pages() {
    let world = world("default", 20);
    let pool = Pool::open("p", &OpenOptions { pool_bytes: None, segment_bytes: None, ..world.options() }).unwrap();
    assert_eq!((pool.pool_bytes(), pool.segment_bytes()), (20 * PAGE_BYTES, PAGE_BYTES));
}

#[test]
fn a_pool_whose_segments_are_not_there_is_refused_by_their_directory() {
    let world = world("elsewhere", 100);
    let path = fill(&world);
    let home = world.homes().remove(0);
    std::fs::rename(&home, home.with_extension("gone")).unwrap();
    let error = Pool::open("p", &world.options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().contains(home.to_str().unwrap()), "{error}");
    assert!(error.to_string().contains(&format!("`pegaflow rm --force {}`", path.display())), "{error}");
    admin::remove(&path, true).unwrap();
}

#[test]
fn what_a_pool_removed_by_hand_left_is_swept_unless_somebody_uses_it() {
    let world = world("swept", 100);
    let path = fill(&world);
    let left = world.homes().remove(0);
    for used in [true, false] {
        std::fs::remove_dir_all(&path).unwrap();
        let user = std::fs::File::open(&left).unwrap();
        let lock = used.then(|| Flock::lock(user, FlockArg::LockSharedNonblock).unwrap());
        fill(&world);
        let homes = world.homes();
        assert_eq!((homes.contains(&left), homes.len()), (used, if used { 2 } else { 1 }));
        drop(lock);
    }
}

#[test]
fn a_damaged_name_of_the_directory_is_refused() {
    use std::os::unix::fs::FileExt;
    let world = world("damaged", 100);
    let path = fill(&world);
    let control = std::fs::File::options().write(true).open(path.join("control")).unwrap();
    control.write_all_at(b"/x", 192).unwrap();
    let error = Pool::open("p", &world.options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("directory is damaged"), "{error}");
}
