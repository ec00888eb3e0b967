//! The file of a directory: ours alone, locked, without the page cache, its space claimed.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::FallocateFlags;

use super::bounded::within;
use super::buffer::{BUFFER_ALIGN, Buffers};
use crate::error::{Error, ErrorKind, Result};
use crate::shm::file::io_error;
use crate::shm::liveness::LockFile;
use crate::shm::names::check_pool_name;

/// Version of the layout of these files, which is part of their names.
pub const SSD_LAYOUT_VERSION: u32 = 1;

const PREFIX: &str = "pegaflow-ssd-v";
/// The one lock of a file.
pub(crate) const LOCK_ROW: u32 = 0;
/// The smallest block there is.
const SECTOR_BYTES: usize = 512;

/// Path of the file of cache `name` of user `uid` in `dir`.
pub fn cache_path(dir: &Path, uid: u32, name: &str) -> PathBuf {
    dir.join(format!("{PREFIX}{SSD_LAYOUT_VERSION}-{uid}-{name}"))
}

/// What the name of a cache file says.
pub(crate) struct CacheFileName {
    pub(crate) version: u32,
    pub(crate) uid: u32,
    pub(crate) name: String,
}

/// Parse the name of a cache file; `None` for anything else.
pub(crate) fn parse_cache_file(file_name: &str) -> Option<CacheFileName> {
    let (version, rest) = file_name.strip_prefix(PREFIX)?.split_once('-')?;
    let (uid, name) = rest.split_once('-')?;
    check_pool_name(name).ok()?;
    Some(CacheFileName { version: version.parse().ok()?, uid: uid.parse().ok()?, name: name.to_owned() })
}

/// An open cache file, locked as long as `lock` lives.
pub(crate) struct CacheFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    pub(crate) lock: LockFile,
}

impl CacheFile {
    /// Open the file of cache `name` in `dir`; made if `create`.
    pub(crate) fn open(dir: &Path, name: &str, create: bool) -> Result<Self> {
        check_pool_name(name)?;
        if !dir.is_dir() {
            let text = format!("{} is no directory: mount the disk, or create it", dir.display());
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        let path = cache_path(dir, nix::unistd::geteuid().as_raw(), name);
        let handle = open(&path, create, 0)?;
        check_ours(&path, &handle)?;
        let lock = LockFile::new(handle)?;
        if !lock.try_lock(LOCK_ROW)? {
            let text =
                format!("{} is in use by another process: stop it first, or use another directory", path.display());
            return Err(Error::new(ErrorKind::InUse, text));
        }
        let file = open_direct(&path)?;
        let same = |of: &File| of.metadata().map(|meta| (meta.dev(), meta.ino())).ok();
        if same(&file) != same(lock.file()) {
            return Err(Error::busy(format!("{} was replaced while it was opened: try again", path.display())));
        }
        Ok(Self { path, file, lock })
    }
}

pub(crate) fn open(path: &Path, create: bool, flags: i32) -> Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK | flags;
    let mut options = OpenOptions::new();
    let opened =
        options.read(true).write(true).create(create).truncate(false).mode(0o600).custom_flags(flags).open(path);
    opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::new(ErrorKind::NotFound, format!("there is no {}", path.display())),
        _ => io_error("open", path, &error),
    })
}

/// Without the page cache if the file system can.
fn open_direct(path: &Path) -> Result<File> {
    open(path, false, libc::O_DIRECT).or_else(|error| {
        let plain = open(path, false, 0)?;
        log::warn!("pegaflow: no direct I/O on {}, its pages take memory: {error}", path.display());
        Ok(plain)
    })
}

pub(crate) fn check_ours(path: &Path, file: &File) -> Result<()> {
    let meta = file.metadata().map_err(|error| io_error("look at", path, &error))?;
    let euid = nix::unistd::geteuid().as_raw();
    if !meta.is_file() || meta.uid() != euid || meta.mode() & 0o077 != 0 {
        return Err(Error::refused(format!(
            "{} is no file of user {euid} alone: remove it, since others may have changed it",
            path.display()
        )));
    }
    Ok(())
}

/// The smallest block that reads of `file` may have. Of an empty file any would do, so it is given a few bytes first.
pub(crate) fn block_bytes_min(file: &File) -> io::Result<usize> {
    if file.metadata()?.len() < 2 * BUFFER_ALIGN as u64 {
        claim_space(file, 2 * BUFFER_ALIGN as u64)?;
    }
    let mut buffer = Buffers::new(1, BUFFER_ALIGN).take().ok_or(io::ErrorKind::OutOfMemory)?;
    let mut block = SECTOR_BYTES;
    loop {
        match file.read_at(&mut buffer[..block], block as u64) {
            Ok(_) => return Ok(block),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput && block < BUFFER_ALIGN => block *= 2,
            Err(error) => return Err(error),
        }
    }
}

/// Make `file` as long as `bytes`, all of it claimed where the file system can do that.
pub(crate) fn claim_space(file: &File, bytes: u64) -> io::Result<()> {
    if file.metadata()?.len() > bytes {
        return file.set_len(bytes);
    }
    match nix::fcntl::fallocate(file.as_fd(), FallocateFlags::empty(), 0, bytes as libc::off_t) {
        Ok(()) => Ok(()),
        Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => file.set_len(bytes),
        Err(error) => Err(error.into()),
    }
}

/// As [`claim_space`]; an error if it takes longer than `limit`.
pub(crate) fn claim_space_within(file: &File, bytes: u64, limit: Duration) -> io::Result<()> {
    let copy = file.try_clone()?;
    within(limit, move || claim_space(&copy, bytes))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_format_and_parse() {
        let path = cache_path(Path::new("/mnt"), 1000, "llama-3.1_8b");
        let parsed = parse_cache_file(path.file_name().and_then(|name| name.to_str()).unwrap()).unwrap();
        assert_eq!((parsed.version, parsed.uid, parsed.name.as_str()), (SSD_LAYOUT_VERSION, 1000, "llama-3.1_8b"));
        for other in ["pegaflow-ssd-v1-1000-", "pegaflow-ssd-v1-x-a", "pegaflow-ssd-vx-1-a", "pegaflow-v1-1-a", "a"] {
            assert!(parse_cache_file(other).is_none(), "{other}");
        }
    }
}
