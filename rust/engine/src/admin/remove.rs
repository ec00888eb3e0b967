//! Deleting pools and cleaning up after dead processes, from outside.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::view::{View, pool_name};
use crate::config::OpenOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::shm::file::{Place, io_error};
use crate::shm::names::{CONTROL, GONE_ANY, TIER, TRAFFIC_ANY, parse_segment_file};
use crate::shm::pool::Pool;
use crate::shm::segments_dir;
use crate::shm::superblock::Superblock;
use crate::sync::Relaxed;

/// Directories being deleted; what a killed remover leaves under this name the next one finishes.
const REMOVING: &str = "pegaflow-removing-";

/// Clean up after the dead processes of the pool in directory `path`.
pub fn reap(path: &Path) -> Result<usize> {
    let name = pool_name(path)?;
    let shm_dir = path.parent().unwrap_or(Path::new("/")).to_owned();
    let options = OpenOptions { shm_dir, create: false, label: "pegaflow gc".into(), ..OpenOptions::default() };
    let view = View::open(path)?;
    let dead = || view.processes().iter().filter(|process| !process.alive).count();
    let (before, last_used) = (dead(), view.control.header().last_used_unix_s.load(Relaxed));
    let pool = Pool::open(&name, &options)?;
    pool.reap()?;
    drop(pool);
    if living(path) == 0 {
        // Cleaning up is no use of the pool: its idle time goes on.
        view.control.header().last_used_unix_s.store(last_used, Relaxed);
    }
    Ok(before.saturating_sub(dead()))
}

/// Delete the pool in directory `path`; refuses while a living process uses it unless `force`.
pub fn remove(path: &Path, force: bool) -> Result<()> {
    pool_name(path)?;
    let meta = std::fs::symlink_metadata(path)
        .map_err(|_| Error::new(ErrorKind::NotFound, format!("there is no pool at {}", path.display())))?;
    let euid = nix::unistd::geteuid().as_raw();
    if !meta.is_dir() || meta.uid() != euid {
        return Err(Error::refused(format!(
            "{} is not a directory of this user, so it was left alone: its owner may delete it with `rm -r`",
            path.display()
        )));
    }
    check_removable(path, force)?;
    // First out of everybody's reach, then look again: who attached meanwhile has either registered, and is seen
    // here, or finds the name gone, and starts over.
    let aside = name_aside(path);
    std::fs::rename(path, &aside).map_err(|error| io_error("remove", path, &error))?;
    crate::crash_point::pass("remove.set_aside");
    if !force && living(&aside) > 0 {
        std::fs::rename(&aside, path).map_err(|error| io_error("put back", path, &error))?;
        return Err(in_use(path));
    }
    delete(&aside)?;
    finish_others(path.parent().unwrap_or(Path::new("/")), euid);
    Ok(())
}

fn check_removable(path: &Path, force: bool) -> Result<()> {
    if force {
        return Ok(());
    }
    match View::open(path) {
        Ok(_) if living(path) > 0 => Err(in_use(path)),
        Ok(_) => Ok(()),
        // Half created: nobody can be using it, but its creator may still be at work.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn in_use(path: &Path) -> Error {
    Error::new(
        ErrorKind::InUse,
        format!("living processes use the pool at {}: stop them first, or use --force", path.display()),
    )
}

fn living(dir: &Path) -> usize {
    let Ok(file) = Place::directory(dir).and_then(|place| place.open(CONTROL)) else { return 0 };
    let rows = 0..crate::limits::PROCESSES_MAX as u32;
    rows.filter(|row| crate::shm::liveness::held_by_other(&file, *row)).count()
}

fn name_aside(path: &Path) -> PathBuf {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_nanos());
    path.with_file_name(format!("{REMOVING}{}-{nanos}", std::process::id()))
}

/// Delete a directory that holds nothing but a pool's files, and what it names elsewhere before that.
fn delete(dir: &Path) -> Result<()> {
    let control = Place::directory(dir).and_then(|place| place.open(CONTROL));
    let home = control.and_then(|file| segments_dir::read_name(&file, &Superblock::read(&file, dir)?));
    // Of a control file that is damaged, or not there yet, nothing is known.
    if let Ok(Some(home)) = home {
        segments_dir::remove(&home)?;
    }
    let entries = std::fs::read_dir(dir).map_err(|error| io_error("list", dir, &error))?;
    for name in entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()) {
        let table = [CONTROL, TIER, TRAFFIC_ANY, GONE_ANY].iter().any(|known| name.starts_with(known));
        if table || parse_segment_file(&name).is_some() {
            let file = dir.join(&name);
            std::fs::remove_file(&file).map_err(|error| io_error("remove", &file, &error))?;
            crate::crash_point::pass("remove.file_removed");
        }
    }
    std::fs::remove_dir(dir).map_err(|error| match error.kind() {
        std::io::ErrorKind::DirectoryNotEmpty => Error::refused(format!(
            "{} has files in it that are no pool's: look at them, and delete it by hand",
            dir.display()
        )),
        _ => io_error("remove", dir, &error),
    })
}

/// Finish what removers that died have begun.
fn finish_others(shm_dir: &Path, euid: u32) {
    for entry in std::fs::read_dir(shm_dir).into_iter().flatten().flatten() {
        let mine = entry.metadata().is_ok_and(|meta| meta.is_dir() && meta.uid() == euid);
        let begun = entry.file_name().to_str().is_some_and(|name| name.starts_with(REMOVING));
        if mine
            && begun
            && living(&entry.path()) == 0
            && let Err(error) = delete(&entry.path())
        {
            log::warn!("pegaflow: {error}");
        }
    }
}
