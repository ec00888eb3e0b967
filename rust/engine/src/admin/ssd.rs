//! Cache files on SSD: list, check and delete them.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use super::inspect::to_json;
use crate::error::{Error, ErrorKind, Result};
use crate::shm::file::io_error;
use crate::ssd::check::Nowhere;
use crate::ssd::file::{CacheFileName, parse_cache_file};
use crate::ssd::peek::{Peek, peek};
use crate::ssd::{SSD_LAYOUT_VERSION, Store, StoreOptions, cache_path};

/// Told how much of something is done and how much there is; says whether to go on.
pub type GoOn<'a> = dyn FnMut(u64, u64) -> bool + 'a;

#[derive(Serialize)]
struct FileReport {
    name: String,
    path: String,
    uid: u32,
    layout_version: u32,
    state: &'static str,
    error: Option<String>,
    bytes: u64,
    block_bytes: Option<u64>,
    zone_bytes: Option<u64>,
    zones: Option<u64>,
    created_unix_s: Option<u64>,
    namespaces_forgotten: Option<u64>,
    zones_used: Option<u64>,
    records: Option<u64>,
    record_bytes: Option<u64>,
}

#[derive(Serialize)]
struct HeldReport {
    fingerprint: String,
    group: u32,
    records: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct CheckReport {
    ok: bool,
    records: u64,
    bytes: u64,
    forgotten: u64,
    damaged: u64,
    unreadable: u64,
    problems: Vec<String>,
    namespaces: Vec<HeldReport>,
}

/// JSON list of all cache files in `dir`, with what can be known without changing them. `progress`: zones of the file
/// that is being looked at.
pub fn ssd_inspect(dir: &Path, progress: &mut GoOn) -> Result<String> {
    let mut reports = Vec::new();
    for (file_name, name) in files(dir)? {
        reports.push(report(dir, file_name, name, progress)?);
    }
    Ok(to_json(&reports))
}

/// JSON outcome of reading everything in cache `name` of these directories. `progress`: zones, then bytes.
pub fn ssd_verify(dirs: &[PathBuf], name: &str, progress: &mut GoOn) -> Result<String> {
    for dir in dirs {
        find(dir, name)?;
    }
    let mut store = open(dirs.to_vec(), name)?;
    recover(&mut store, progress)?;
    let checked = store.check(progress).ok_or_else(stopped)?;
    let namespaces: Vec<HeldReport> = checked
        .namespaces
        .iter()
        .map(|((fingerprint, group), held)| HeldReport {
            fingerprint: fingerprint.iter().map(|byte| format!("{byte:02x}")).collect(),
            group: *group,
            records: held.records,
            bytes: held.bytes,
        })
        .collect();
    Ok(to_json(&CheckReport {
        ok: checked.damaged == 0 && checked.unreadable == 0,
        records: namespaces.iter().map(|held| held.records).sum(),
        bytes: namespaces.iter().map(|held| held.bytes).sum(),
        forgotten: checked.forgotten,
        damaged: checked.damaged,
        unreadable: checked.unreadable,
        problems: checked.problems,
        namespaces,
    }))
}

/// Delete the file of cache `name` in `dir`; refuses while somebody uses it unless `force`. Returns the bytes it took.
pub fn ssd_remove(dir: &Path, name: &str, force: bool) -> Result<u64> {
    crate::ssd::peek::remove(&find(dir, name)?, force)
}

/// File names of the caches in `dir`, by name.
fn files(dir: &Path) -> Result<Vec<(String, CacheFileName)>> {
    let entries = std::fs::read_dir(dir).map_err(|error| io_error("list", dir, &error))?;
    let mut found: Vec<(String, CacheFileName)> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter_map(|name| parse_cache_file(&name).map(|parsed| (name, parsed)))
        .collect();
    found.sort_by(|left, right| left.0.cmp(&right.0));
    Ok(found)
}

/// Path of this user's cache `name` in `dir`; an error says what is there instead.
fn find(dir: &Path, name: &str) -> Result<PathBuf> {
    let euid = nix::unistd::geteuid().as_raw();
    let path = cache_path(dir, euid, name);
    if path.symlink_metadata().is_ok() {
        return Ok(path);
    }
    let found = files(dir)?;
    if let Some((_, other)) = found.iter().find(|(_, file)| file.name == name && file.uid == euid) {
        let text = format!(
            "the cache '{name}' in {} has layout version {}, and this build reads {SSD_LAYOUT_VERSION}: use the build \
             that wrote it, or delete the file",
            dir.display(),
            other.version
        );
        return Err(Error::refused(text));
    }
    if let Some((_, other)) = found.iter().find(|(_, file)| file.name == name) {
        let text = format!("the cache '{name}' in {} belongs to user {}: work as that user", dir.display(), other.uid);
        return Err(Error::refused(text));
    }
    let mut names: Vec<&str> = found.iter().map(|(_, file)| file.name.as_str()).collect();
    names.dedup();
    let there = match names.is_empty() {
        true => "no cache is there, so give the directory of pegaflow.ssd_cache_path".into(),
        false => format!("give --name of one that is there ({})", names.join(", ")),
    };
    Err(Error::new(ErrorKind::NotFound, format!("there is no cache '{name}' in {}: {there}", dir.display())))
}

fn report(dir: &Path, file_name: String, parsed: CacheFileName, progress: &mut GoOn) -> Result<FileReport> {
    let path = dir.join(file_name);
    let mut report = FileReport {
        name: parsed.name,
        bytes: path.symlink_metadata().map_or(0, |meta| meta.blocks() * 512),
        path: path.display().to_string(),
        uid: parsed.uid,
        layout_version: parsed.version,
        state: "ok",
        error: None,
        block_bytes: None,
        zone_bytes: None,
        zones: None,
        created_unix_s: None,
        namespaces_forgotten: None,
        zones_used: None,
        records: None,
        record_bytes: None,
    };
    let euid = nix::unistd::geteuid().as_raw();
    if parsed.uid != euid {
        return Ok(refused(report, format!("it belongs to user {}", parsed.uid)));
    }
    if parsed.version != SSD_LAYOUT_VERSION {
        let why = format!("it has layout version {}, and this build reads {SSD_LAYOUT_VERSION}", parsed.version);
        return Ok(refused(report, why));
    }
    match peek(&path) {
        Err(error) => return Ok(refused(report, error.to_string())),
        Ok(None) => (report.state, report.error) = ("damaged", Some("it has no valid superblock".into())),
        Ok(Some(Peek { geometry, created_unix_s, namespaces_forgotten })) => {
            report.block_bytes = Some(geometry.block_bytes as u64);
            report.zone_bytes = Some(geometry.zone_bytes);
            report.zones = Some(u64::from(geometry.zones));
            report.created_unix_s = Some(created_unix_s);
            report.namespaces_forgotten = Some(namespaces_forgotten as u64);
            count(dir, &mut report, progress)?;
        }
    }
    Ok(report)
}

fn refused(report: FileReport, why: String) -> FileReport {
    FileReport { state: "refused", error: Some(why), ..report }
}

/// What only recovery can tell.
fn count(dir: &Path, report: &mut FileReport, progress: &mut GoOn) -> Result<()> {
    match open(vec![dir.to_owned()], &report.name) {
        Ok(mut store) => {
            recover(&mut store, progress)?;
            let contents = store.contents();
            report.zones_used = Some(contents.zones_used);
            report.records = Some(contents.records);
            report.record_bytes = Some(contents.bytes);
        }
        Err(error) if error.kind() == ErrorKind::InUse => report.state = "in use",
        Err(error) => (report.state, report.error) = ("damaged", Some(error.to_string())),
    }
    Ok(())
}

fn open(directories: Vec<PathBuf>, name: &str) -> Result<Store<Nowhere>> {
    let name = name.to_owned();
    let (capacity_bytes, create, read_only) = (None, false, true);
    Store::open(StoreOptions { directories, name, capacity_bytes, create, read_only, ..StoreOptions::default() })
}

fn recover(store: &mut Store<Nowhere>, progress: &mut GoOn) -> Result<()> {
    loop {
        let seen = store.recover_some(Duration::from_millis(100));
        if !progress(seen.zones_done as u64, seen.zones as u64) {
            return Err(stopped());
        }
        if seen.zones_done >= seen.zones {
            return Ok(());
        }
    }
}

fn stopped() -> Error {
    Error::busy("stopped before the end: nothing was changed")
}
