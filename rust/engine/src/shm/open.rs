//! Creating and attaching. Whoever comes first creates; the control file appears under its name complete or not at
//! all, so nobody ever maps half a pool.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::config::OpenOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::limits::{CREATE_WAIT_MAX, POOL_BYTES_DEFAULT, SEGMENT_BYTES_MIN};
use crate::shm::clock::unix_seconds;
use crate::shm::control::Control;
use crate::shm::core::Core;
use crate::shm::file::{Place, free_bytes, io_error, make_dir, set_length};
use crate::shm::geometry::{Geometry, PAGE};
#[cfg(not(loom))]
use crate::shm::gone::Gone;
use crate::shm::huge::{self, HugeMount};
use crate::shm::liveness::LockFile;
use crate::shm::names::{CONTROL, CONTROL_NEW, GONE_NEW, TIER_NEW, TRAFFIC_NEW, pool_dir};
use crate::shm::process::register;
use crate::shm::segments_dir::{self, NewDir};
use crate::shm::superblock::Superblock;
use crate::sync::Relaxed;

/// First reading of the recency clock: room below for chains of new blocks, each one under its parent.
pub(crate) const CLOCK_START: u64 = 1 << 40;

/// Attach to the pool, creating it if allowed. Returns the pool and whether this process created it.
pub(crate) fn open(name: &str, options: &OpenOptions) -> Result<(Core, bool)> {
    crate::crash_point::arm_from_environment()?;
    if options.private {
        let (file, superblock, _) = create_control(&Place::Anonymous, CONTROL, options, None)?;
        // Nobody else can attach, so nobody asks whether this process lives.
        let lock_file = file.try_clone().map_err(|error| io_error("open", Path::new(name), &error))?;
        let core = attach(name, Place::Anonymous, &file, lock_file, superblock, &options.label)?;
        return Ok((with_memory_of_the_gone(core), true));
    }
    let dir = pool_dir(&options.shm_dir, nix::unistd::geteuid().as_raw(), name);
    let started = std::time::Instant::now();
    let mut created = false;
    // Held until this process is attached or has lost to another.
    let mut _home = None;
    loop {
        match Place::directory(&dir).and_then(|place| attach_named(name, &place, &dir, &options.label)) {
            Ok(Some(core)) => return Ok((core, created)),
            Ok(None) => created = false,
            Err(error) if error.kind() == ErrorKind::NotFound && options.create => {
                (created, _home) = match create_named(&dir, options) {
                    // Somebody removed the directory under our hands.
                    Err(error) if error.kind() == ErrorKind::NotFound => (false, None),
                    outcome => outcome?,
                }
            }
            Err(error) => return Err(error),
        }
        if started.elapsed() > CREATE_WAIT_MAX {
            return Err(Error::busy(format!("pool '{name}' keeps being removed and created: try again")));
        }
    }
}

/// Attach to the control file in `dir`; `None` if it was removed or replaced meanwhile.
fn attach_named(name: &str, place: &Place, dir: &Path, label: &str) -> Result<Option<Core>> {
    let file = place.open(CONTROL)?;
    let superblock = Superblock::read(&file, dir)?;
    let path = &dir.join(CONTROL);
    // A mapping keeps the description of its file open, in forked children too, and with it the description's locks:
    // the liveness lock has a description of its own.
    let lock_file = place.open(CONTROL)?;
    if !is_still_there(&file, path) {
        return Ok(None);
    }
    let core = attach(name, place.clone(), &file, lock_file, superblock, label)?;
    // Registered first, then looked again: whoever removes the pool either sees us or is seen.
    if !is_still_there(&file, path) || !is_still_there(core.lock_file.file(), path) {
        return Ok(None);
    }
    remove_unfinished(place);
    Ok(Some(with_memory_of_the_gone(core)))
}

#[cfg(not(loom))]
fn with_memory_of_the_gone(mut core: Core) -> Core {
    core.gone = Gone::open(&core.place, core.control.geometry().slots_max);
    // The file may be younger than the pool's extents, or had no room when they came.
    core.remember_more();
    core
}

#[cfg(loom)]
fn with_memory_of_the_gone(core: Core) -> Core {
    core
}

/// Remove control files that were never finished. The pool has one, so whoever is still writing another finds that out
/// when it wants to give it the name.
fn remove_unfinished(place: &Place) {
    let Place::Directory(dir, _) = place else { return };
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|e| e.file_name().into_string().ok());
    let news = [CONTROL_NEW, TIER_NEW, TRAFFIC_NEW, GONE_NEW];
    let unfinished = |name: &String| news.iter().any(|new| name.starts_with(new));
    names.filter(unfinished).for_each(|name| place.remove(&name));
}

fn is_still_there(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::symlink_metadata(path)) {
        (Ok(opened), Ok(named)) => opened.ino() == named.ino() && opened.dev() == named.dev(),
        _ => false,
    }
}

/// Write a complete control file beside, then give it its name. `false` if another process was faster, and may even
/// have tidied ours away. With it the directory of segments, if there is one.
fn create_named(dir: &Path, options: &OpenOptions) -> Result<(bool, Option<NewDir>)> {
    make_dir(dir)?;
    crate::crash_point::pass("create.directory_made");
    let place = Place::directory(dir)?;
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_nanos());
    let new_name = format!("{CONTROL_NEW}{}.{nanos}", std::process::id());
    let written = create_control(&place, &new_name, options, Some(dir));
    let (written, home) = match written {
        Ok((_, _, home)) => (Ok(()), home),
        Err(error) => (Err(error), None),
    };
    let created = written.and_then(|()| {
        crate::crash_point::pass("create.control_written");
        place.link(&new_name, CONTROL)
    });
    crate::crash_point::pass("create.linked");
    place.remove(&new_name);
    match (&created, &home) {
        (Ok(true), Some(home)) => segments_dir::sweep(dir, &home.path),
        (_, Some(home)) => segments_dir::remove(&home.path)?,
        (_, None) => {}
    }
    Ok((created?, home))
}

/// The hugetlbfs for a new pool's segments, and the directory there, if that is wanted and possible.
fn choose_home(options: &OpenOptions, pool_dir: &Path, pool_id: u64) -> Option<(HugeMount, NewDir)> {
    let wanted = options.huge_pages.as_ref()?;
    let made = huge::choose(wanted, options.pool_bytes).and_then(|mount| {
        let dir = segments_dir::create(&mount, pool_dir, pool_id).map_err(|error| error.to_string())?;
        Ok((mount, dir))
    });
    made.map_err(|reason| log::warn!("pegaflow: no huge pages for this pool ({reason}), so it is in ordinary ones"))
        .ok()
}

/// Create a control file in `place`; segments may lie elsewhere if the pool has a directory.
fn create_control(
    place: &Place,
    file_name: &str,
    options: &OpenOptions,
    pool_dir: Option<&Path>,
) -> Result<(File, Superblock, Option<NewDir>)> {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_nanos() as u64);
    let pool_id = nanos ^ u64::from(std::process::id()) << 32;
    let home = pool_dir.and_then(|dir| choose_home(options, dir, pool_id));
    let named = home.as_ref().map(|(mount, dir)| (mount, dir.path.as_path()));
    let written = write_control(place, file_name, options, pool_id, named);
    if let (Err(_), Some((_, dir))) = (&written, &home) {
        segments_dir::remove(&dir.path)?;
    }
    written.map(|(file, superblock)| (file, superblock, home.map(|(_, dir)| dir)))
}

fn write_control(
    place: &Place,
    file_name: &str,
    options: &OpenOptions,
    pool_id: u64,
    home: Option<(&HugeMount, &Path)>,
) -> Result<(File, Superblock)> {
    let pool_bytes = match (options.pool_bytes, home) {
        (Some(bytes), _) => bytes,
        (None, Some((mount, _))) => POOL_BYTES_DEFAULT.min(mount.free_bytes),
        (None, None) => default_bytes(&options.shm_dir)?,
    };
    let page_bytes = home.map_or(0, |(mount, _)| mount.page_bytes);
    let geometry = Geometry::choose(pool_bytes, options.segment_bytes, options.slots_max, page_bytes.max(PAGE))?;
    let offsets = geometry.offsets();
    let file = place.create(file_name)?;
    crate::crash_point::pass("create.file_made");
    set_length(&file, offsets.end as u64)?;
    place.claim(&file, 0, offsets.fixed_end as u64, "the pool's index")?;
    let control = Control::map(&file, geometry)?;
    control.header().clock.store(CLOCK_START, Relaxed);
    control.header().last_used_unix_s.store(unix_seconds(), Relaxed);
    let name_checksum = home.map_or(Ok(0), |(_, dir)| segments_dir::write_name(&file, dir))?;
    let superblock = Superblock { geometry, created_unix_s: unix_seconds(), pool_id, page_bytes, name_checksum };
    let words: Vec<u8> = superblock.encode().iter().flat_map(|word| word.to_le_bytes()).collect();
    file.write_all_at(&words, 0)
        .map_err(|error| Error::new(ErrorKind::ShmFull, format!("cannot write the pool's superblock: {error}")))?;
    Ok((file, superblock))
}

/// Size of a pool for which none was asked, by what its file system has left.
fn default_bytes(shm_dir: &Path) -> Result<u64> {
    let free = free_bytes(shm_dir)?;
    if free / 2 < SEGMENT_BYTES_MIN {
        return Err(Error::new(
            ErrorKind::ShmFull,
            format!(
                "{} has only {free} bytes left: enlarge it (docker: --shm-size) or remove old pools with `pegaflow gc`",
                shm_dir.display()
            ),
        ));
    }
    Ok(POOL_BYTES_DEFAULT.min(free / 2))
}

fn attach(name: &str, place: Place, file: &File, lock_file: File, superblock: Superblock, label: &str) -> Result<Core> {
    let control = Control::map(file, superblock.geometry)?;
    let home = segments_dir::open(&place, file, &superblock)?;
    let lock_file = LockFile::new(lock_file)?;
    let registered = register(&control, &lock_file, label)?;
    let core = Core::new(name, place, home, control, lock_file, registered.me);
    if let Some(dead) = registered.inherited {
        core.clear_inherited(dead);
    }
    Ok(core)
}
