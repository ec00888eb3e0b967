//! Any bytes as a control file, with a right checksum for those that want to get further.

use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use pegaflow_engine::names::pool_dir;
use pegaflow_engine::{OpenOptions, Pool, admin};
use xxhash_rust::xxh3::xxh3_64;

use super::bytes::Bytes;

const SUPERBLOCK_BYTES: usize = 128;
/// Longest control file that is made in full.
const LENGTH_MAX: u64 = 32 << 20;

pub struct Target {
    dir: PathBuf,
    path: PathBuf,
    /// Superblock of a real pool.
    real: Vec<u8>,
    length: u64,
}

impl Target {
    pub fn new(dir: &Path) -> Self {
        let pool = Pool::open("p", &super::pool::options(dir)).unwrap();
        let control = fs::read(pool.path().join("control")).unwrap();
        drop(pool);
        // A file of the same name in a directory of another pool.
        let path = pool_dir(dir, nix::unistd::geteuid().as_raw(), "q");
        fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
        let (real, length) = (control[..SUPERBLOCK_BYTES].to_vec(), control.len() as u64);
        Self { dir: dir.to_owned(), path, real, length }
    }

    pub fn run(&mut self, data: &[u8]) {
        let mut bytes = Bytes::new(data);
        let mut superblock = self.real.clone();
        for _ in 0..bytes.byte() % 4 {
            let at = bytes.below(SUPERBLOCK_BYTES / 8) * 8;
            let before = u64::from_le_bytes(superblock[at..at + 8].try_into().unwrap());
            superblock[at..at + 8].copy_from_slice(&bytes.damaged(before).to_le_bytes());
        }
        if !bytes.one_in(4) {
            let sum = xxh3_64(&superblock[..SUPERBLOCK_BYTES - 8]);
            superblock[SUPERBLOCK_BYTES - 8..].copy_from_slice(&sum.to_le_bytes());
        }
        let length = if !bytes.one_in(4) { self.length } else { bytes.word() % LENGTH_MAX };
        let control = self.path.join("control");
        let _absent = fs::remove_file(&control);
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&control).unwrap();
        file.write_all_at(&superblock, 0).unwrap();
        // The rest of the input lies somewhere in the tables.
        let at = SUPERBLOCK_BYTES as u64 + bytes.word() % self.length;
        file.write_all_at(bytes.take(usize::MAX), at).unwrap();
        file.set_len(length).unwrap();
        let _any = (admin::inspect(&self.path), admin::verify(&self.path, false, &mut |_, _| {}));
        let _any = (admin::list_pools(&self.dir), admin::reap(&self.path));
        let options = OpenOptions { create: false, ..super::pool::options(&self.dir) };
        if let Ok(pool) = Pool::open("q", &options) {
            let _any = pool.namespace(&[3; 32], 0, &[512], "hostile").map(|ns| pool.reserve(ns, &[], None, true));
        }
    }
}
