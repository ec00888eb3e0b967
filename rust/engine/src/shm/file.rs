//! Files of a pool: created 0600 in a directory 0700 of ours, never through a symlink, and claimed before use.

use std::fs::{DirBuilder, File};
use std::io::ErrorKind as IoKind;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, linkat, unlinkat};

use crate::error::{Error, ErrorKind, Result};

/// Where a pool's files live.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// Named files in this directory. It is held open: if its name goes to another pool, nothing is created or removed
    /// there.
    Directory(PathBuf, Arc<File>),
    /// Anonymous memory of this process.
    Anonymous,
}

impl Place {
    /// The pool's directory `dir`, after checking that it is ours and that nobody else can enter.
    pub(crate) fn directory(dir: &Path) -> Result<Self> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = match nix::fcntl::open(dir, flags, Mode::empty()) {
            Ok(fd) => File::from(fd),
            Err(Errno::ENOENT) => {
                return Err(Error::new(ErrorKind::NotFound, format!("there is no pool at {}", dir.display())));
            }
            Err(Errno::ENOTDIR) if dir.parent().is_some_and(|above| above.exists() && !above.is_dir()) => {
                let above = dir.parent().unwrap_or(dir).display();
                let text = format!("{above} is not a directory: choose a mounted tmpfs as shm_dir");
                return Err(Error::invalid(text));
            }
            Err(Errno::ENOTDIR | Errno::ELOOP) => {
                let text = format!("{} is not a directory: remove it or use another name", dir.display());
                return Err(Error::refused(text));
            }
            Err(error) => return Err(io_error("look at", dir, &error.into())),
        };
        let meta = file.metadata().map_err(|error| io_error("look at", dir, &error))?;
        check_owner(dir, &meta)?;
        Ok(Self::Directory(dir.to_owned(), Arc::new(file)))
    }

    /// The directory; `None` in anonymous memory.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::Directory(path, _) => Some(path),
            Self::Anonymous => None,
        }
    }

    /// Create file `name`, which does not exist.
    pub(crate) fn create(&self, name: &str) -> Result<File> {
        match self {
            Self::Directory(path, dir) => {
                let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
                openat(dir.as_fd(), name, flags, Mode::S_IRUSR | Mode::S_IWUSR)
                    .map(File::from)
                    .map_err(|error| io_error("create", &path.join(name), &error.into()))
            }
            Self::Anonymous => {
                let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
                let fd = nix::sys::memfd::memfd_create(name, flags).map_err(|error| {
                    Error::new(ErrorKind::ShmFull, format!("cannot create anonymous shared memory: {error}"))
                })?;
                Ok(File::from(fd))
            }
        }
    }

    /// Open the existing file `name` after checking that it is ours.
    pub(crate) fn open(&self, name: &str) -> Result<File> {
        match self {
            Self::Directory(path, dir) => open_checked(dir, name, &path.join(name)),
            Self::Anonymous => Err(Error::new(ErrorKind::NotFound, "an anonymous pool has no named files")),
        }
    }

    /// Claim memory for a range of a file of this place (see [`claim`]). Anonymous memory is claimed page by page as it
    /// is touched, like all other memory of the process: no file system below it can be full.
    pub(crate) fn claim(&self, file: &File, offset: u64, bytes: u64, what: &str) -> Result<()> {
        match self {
            Self::Directory(..) => claim(file, offset, bytes, what),
            Self::Anonymous => Ok(()),
        }
    }

    /// Remove file `name`; what does not exist counts as removed.
    pub(crate) fn remove(&self, name: &str) {
        if let Self::Directory(path, dir) = self
            && let Err(error) = unlinkat(dir.as_fd(), name, UnlinkatFlags::NoRemoveDir)
            && error != Errno::ENOENT
        {
            log::warn!("pegaflow: cannot remove {}: {error}", path.join(name).display());
        }
    }

    /// Give file `name` the name `second` too. `false` if that name is taken, or `name` is gone.
    pub(crate) fn link(&self, name: &str, second: &str) -> Result<bool> {
        let Self::Directory(path, dir) = self else { return Ok(false) };
        match linkat(dir.as_fd(), name, dir.as_fd(), second, AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::EEXIST | Errno::ENOENT) => Ok(false),
            Err(error) => Err(io_error("create", &path.join(second), &error.into())),
        }
    }
}

/// Make the pool's directory if it is not there.
pub(crate) fn make_dir(dir: &Path) -> Result<()> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == IoKind::AlreadyExists => Ok(()),
        Err(error) if error.kind() == IoKind::NotFound => Err(Error::invalid(format!(
            "{} does not exist: choose a mounted tmpfs as shm_dir",
            dir.parent().unwrap_or(dir).display()
        ))),
        Err(error) if error.kind() == IoKind::PermissionDenied => Err(Error::refused(format!(
            "this user may not create {}: choose a shm_dir that it may write to, or change that one's owner or mode",
            dir.display()
        ))),
        Err(error) => Err(io_error("create", dir, &error)),
    }
}

fn check_owner(path: &Path, meta: &std::fs::Metadata) -> Result<()> {
    let euid = nix::unistd::geteuid().as_raw();
    if meta.uid() != euid {
        return Err(Error::refused(format!(
            "{} belongs to user {}, not to user {euid}: use another pool name or remove it as its owner",
            path.display(),
            meta.uid()
        )));
    }
    if meta.mode() & 0o077 != 0 {
        return Err(Error::refused(format!(
            "{} is open to other users (mode {:o}), who may have changed it: remove the pool with `pegaflow rm \
             --force` and its path",
            path.display(),
            meta.mode() & 0o777
        )));
    }
    Ok(())
}

fn open_checked(dir: &File, name: &str, path: &Path) -> Result<File> {
    let flags = OFlag::O_RDWR | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
    let file = openat(dir.as_fd(), name, flags, Mode::empty()).map(File::from).map_err(|error| match error {
        Errno::ENOENT => Error::new(ErrorKind::NotFound, format!("there is no {}", path.display())),
        Errno::ELOOP => {
            Error::refused(format!("{} is a symbolic link: remove it, pools never follow links", path.display()))
        }
        Errno::EACCES => {
            Error::refused(format!("{} may not be opened by this user: remove it as its owner", path.display()))
        }
        _ => io_error("open", path, &error.into()),
    })?;
    let meta = file.metadata().map_err(|error| io_error("look at", path, &error))?;
    if !meta.is_file() {
        return Err(Error::refused(format!("{} is not a regular file: remove it", path.display())));
    }
    check_owner(path, &meta)?;
    Ok(file)
}

/// Give `file` its length without claiming memory.
pub(crate) fn set_length(file: &File, bytes: u64) -> Result<()> {
    file.set_len(bytes)
        .map_err(|error| Error::new(ErrorKind::ShmFull, format!("cannot make a file of {bytes} bytes: {error}")))
}

/// Claim memory for a range of `file`, so that a full file system is an error here and never a SIGBUS later.
fn claim(file: &File, offset: u64, bytes: u64, what: &str) -> Result<()> {
    loop {
        match nix::fcntl::posix_fallocate(file.as_fd(), offset as libc::off_t, bytes as libc::off_t) {
            Ok(()) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(error) => {
                return Err(Error::new(
                    ErrorKind::ShmFull,
                    format!(
                        "no room for {bytes} bytes of {what} ({}): enlarge the shared-memory file system (docker: \
                         --shm-size), choose a smaller pool_size, or remove old pools with `pegaflow gc`",
                        error.desc()
                    ),
                ));
            }
        }
    }
}

/// Bytes that the file system of `dir` has left.
pub(crate) fn free_bytes(dir: &Path) -> Result<u64> {
    let stat = nix::sys::statvfs::statvfs(dir).map_err(|error| {
        Error::invalid(format!("cannot look at {} ({}): choose an existing shm_dir", dir.display(), error.desc()))
    })?;
    Ok(stat.blocks_available() * stat.fragment_size())
}

pub(crate) fn io_error(action: &str, path: &Path, error: &std::io::Error) -> Error {
    let kind = match error.raw_os_error() {
        Some(libc::ENOSPC) => ErrorKind::ShmFull,
        Some(libc::ENOENT) => ErrorKind::NotFound,
        _ => ErrorKind::Refused,
    };
    Error::new(kind, format!("cannot {action} {}: {error}", path.display()))
}
