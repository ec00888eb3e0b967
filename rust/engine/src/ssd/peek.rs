//! Looking at cache files from outside: whose they are, what their superblocks say, whether somebody uses them.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use super::file::{LOCK_ROW, check_ours, open};
use super::geometry::Geometry;
use super::superblock::{SUPERBLOCK_BYTES, Superblock};
use crate::error::{Error, ErrorKind, Result};
use crate::limits::SSD_BLOCK_BYTES_MAX;
use crate::shm::file::io_error;
use crate::shm::liveness::LockFile;

/// What a superblock says.
pub(crate) struct Peek {
    pub(crate) geometry: Geometry,
    pub(crate) created_unix_s: u64,
    /// Namespaces that were reset and are remembered one by one.
    pub(crate) namespaces_forgotten: usize,
}

/// The superblock of the file at `path`, in use or not; `None` if it has no valid one.
pub(crate) fn peek(path: &Path) -> Result<Option<Peek>> {
    let file = open(path, false, 0)?;
    check_ours(path, &file)?;
    let places = std::iter::once(0).chain((12..).map(|bits| 1 << bits).take_while(|at| *at <= SSD_BLOCK_BYTES_MAX));
    let found = places.filter_map(|at| superblock_at(&file, at)).max_by_key(|superblock| superblock.generation);
    Ok(found.map(|superblock| Peek {
        geometry: superblock.geometry,
        created_unix_s: superblock.created_unix_s,
        namespaces_forgotten: superblock.epochs.raised().count(),
    }))
}

fn superblock_at(file: &File, at: usize) -> Option<Superblock> {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    file.read_exact_at(&mut bytes, at as u64).ok()?;
    Superblock::decode(&bytes).filter(|found| at == 0 || at == found.geometry.superblock_bytes())
}

/// Delete the cache file at `path`, whatever it holds; not while somebody uses it unless `force`. Returns the bytes
/// that it took.
pub(crate) fn remove(path: &Path, force: bool) -> Result<u64> {
    let meta = std::fs::symlink_metadata(path)
        .map_err(|_| Error::new(ErrorKind::NotFound, format!("there is no {}", path.display())))?;
    let euid = nix::unistd::geteuid().as_raw();
    if meta.uid() != euid || meta.is_dir() {
        return Err(Error::refused(format!("{} is no file of user {euid}: it was left alone", path.display())));
    }
    // Held until the name is gone, so that nobody opens the file in between.
    let mut lock = None;
    if meta.is_file() {
        let opened = LockFile::new(open(path, false, 0)?)?;
        if !opened.try_lock(LOCK_ROW)? && !force {
            let text = format!("{} is in use: stop the processes of its pool first, or use --force", path.display());
            return Err(Error::new(ErrorKind::InUse, text));
        }
        lock = Some(opened);
    }
    std::fs::remove_file(path).map_err(|error| io_error("remove", path, &error))?;
    drop(lock);
    Ok(meta.blocks() * 512)
}
