//! A directory of its own for a pool's segments, on a hugetlbfs; the pool's control file names it.
//!
//! Whoever is attached holds a shared lock on that directory. A pool's creator removes those of earlier pools of its
//! name that nobody holds: somebody removed their control file by hand.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::sys::stat::Mode;
use xxhash_rust::xxh3::xxh3_64;

use crate::error::{Error, ErrorKind, Result};
use crate::shm::file::{Place, io_error, make_dir};
use crate::shm::home::Home;
use crate::shm::huge::HugeMount;
use crate::shm::names::{parse_segment_file, removal_command, segments_dir_name, segments_dir_prefix};
use crate::shm::superblock::Superblock;

/// Place of the directory's name in the control file.
pub(crate) const NAME_OFFSET: u64 = 192;
/// Tries to make a directory that another process removes.
const CREATE_TRIES_MAX: usize = 64;
/// Bytes of it, padded with zeros.
pub(crate) const NAME_BYTES: usize = 512;

/// Where the segments are of the pool in `place` with this control file.
pub(crate) fn open(place: &Place, control: &File, superblock: &Superblock) -> Result<Home> {
    let Some(dir) = read_name(control, superblock)? else {
        return Ok(Home::beside(place));
    };
    let elsewhere = |reason: String| {
        Error::refused(format!(
            "the blocks of this pool lie in {}, which cannot be used here ({reason}): mount the same hugetlbfs \
             there, or remove the pool{}",
            dir.display(),
            place.path().map(|pool| format!(" with {}", removal_command(pool))).unwrap_or_default()
        ))
    };
    let place = Place::directory(&dir).map_err(|error| elsewhere(error.to_string()))?;
    let lock = lock(&dir, FlockArg::LockSharedNonblock).map_err(|error| elsewhere(error.to_string()))?;
    Ok(Home { place, page_bytes: superblock.page_bytes, lock: Some(lock) })
}

/// A directory for the segments of a new pool, held from its first moment on: whoever sweeps lets it be.
pub(crate) struct NewDir {
    pub(crate) path: PathBuf,
    _held: Flock<File>,
}

/// Make the directory for the segments of the new pool `pool_dir`, or say why not.
pub(crate) fn create(mount: &HugeMount, pool_dir: &Path, pool_id: u64) -> Result<NewDir> {
    let dir = mount.dir.join(segments_dir_name(&dir_name(pool_dir), device_of(pool_dir), pool_id));
    if dir.as_os_str().len() > NAME_BYTES || !dir.is_absolute() {
        return Err(Error::invalid(format!("{} is too long or not absolute: choose another directory", dir.display())));
    }
    for _ in 0..CREATE_TRIES_MAX {
        make_dir(&dir)?;
        Place::directory(&dir)?;
        // Who sweeps may have come before the lock: it has gone then, or goes.
        if let Ok(held) = lock(&dir, FlockArg::LockSharedNonblock)
            && is_at(&held, &dir)
        {
            return Ok(NewDir { path: dir, _held: held });
        }
    }
    Err(Error::busy(format!("{} keeps being removed: try again", dir.display())))
}

/// Whether the directory of this lock is still the one at `path`.
fn is_at(held: &File, path: &Path) -> bool {
    match (held.metadata(), std::fs::symlink_metadata(path)) {
        (Ok(held), Ok(named)) => (held.dev(), held.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

/// Write the directory's name into a new control file. Returns what the superblock has to say of it.
pub(crate) fn write_name(control: &File, dir: &Path) -> Result<u64> {
    let mut name = [0u8; NAME_BYTES];
    let bytes = dir.as_os_str().as_bytes();
    name[..bytes.len()].copy_from_slice(bytes);
    control
        .write_all_at(&name, NAME_OFFSET)
        .map_err(|error| Error::new(ErrorKind::ShmFull, format!("cannot write the pool's control file: {error}")))?;
    Ok(xxh3_64(&name))
}

/// The directory's name; `None` if segments lie beside the control file.
pub(crate) fn read_name(control: &File, superblock: &Superblock) -> Result<Option<PathBuf>> {
    if superblock.page_bytes == 0 {
        return Ok(None);
    }
    let damaged = || Error::refused("the name of the segments' directory is damaged: remove the pool");
    let mut name = [0u8; NAME_BYTES];
    control.read_exact_at(&mut name, NAME_OFFSET).map_err(|_| damaged())?;
    let length = name.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES);
    let dir = PathBuf::from(std::ffi::OsStr::from_bytes(&name[..length]));
    if xxh3_64(&name) != superblock.name_checksum || !dir.is_absolute() {
        return Err(damaged());
    }
    Ok(Some(dir))
}

/// Delete a directory of segments; one that is gone is fine.
pub(crate) fn remove(dir: &Path) -> Result<()> {
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(|error| io_error("list", dir, &error))?,
    };
    for name in entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()) {
        if parse_segment_file(&name).is_some() {
            let file = dir.join(&name);
            std::fs::remove_file(&file).map_err(|error| io_error("remove", &file, &error))?;
        }
    }
    std::fs::remove_dir(dir).map_err(|error| io_error("remove", dir, &error))
}

/// Remove what earlier pools in `pool_dir` left beside `home`, the directory of the pool that is there now.
pub(crate) fn sweep(pool_dir: &Path, home: &Path) {
    let prefix = segments_dir_prefix(&dir_name(pool_dir), device_of(pool_dir));
    let is_id = |rest: &str| rest.len() == 16 && rest.bytes().all(|byte| byte.is_ascii_hexdigit());
    for entry in home.parent().and_then(|mount| std::fs::read_dir(mount).ok()).into_iter().flatten().flatten() {
        let left = entry.file_name().to_str().and_then(|name| name.strip_prefix(&prefix)).is_some_and(is_id);
        let dir = entry.path();
        if !left || dir == home || Place::directory(&dir).is_err() {
            continue;
        }
        if let Ok(_nobody_comes) = lock(&dir, FlockArg::LockExclusiveNonblock) {
            match remove(&dir) {
                Ok(()) => log::info!("pegaflow: removed {}, left by a pool that is gone", dir.display()),
                Err(error) => log::warn!("pegaflow: {error}"),
            }
        }
    }
}

fn lock(dir: &Path, how: FlockArg) -> std::io::Result<Flock<File>> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let file = File::from(nix::fcntl::open(dir, flags, Mode::empty())?);
    Flock::lock(file, how).map_err(|(_, error)| error.into())
}

fn dir_name(dir: &Path) -> String {
    dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The file system that holds the pool: containers with a /dev/shm each may share one hugetlbfs.
fn device_of(pool_dir: &Path) -> u64 {
    std::fs::metadata(pool_dir).map_or(0, |meta| meta.dev())
}
