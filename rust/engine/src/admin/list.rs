//! All pools below a directory, refused ones with their reason.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::Serialize;

use super::view::View;
use crate::error::{Error, ErrorKind, Result};
use crate::shm::clock::unix_seconds;
use crate::shm::names::{LAYOUT_VERSION, parse_pool_dir, removal_command};
use crate::shm::namespace::facts;
use crate::sync::Relaxed;

#[derive(Serialize)]
struct Entry {
    name: String,
    path: String,
    segments_path: Option<String>,
    state: &'static str,
    error: Option<String>,
    pool_bytes: Option<u64>,
    bytes_used: Option<u64>,
    processes_alive: Option<usize>,
    processes_dead: Option<usize>,
    idle_seconds: Option<u64>,
    processes_max: Option<usize>,
    namespaces: Option<usize>,
    namespaces_max: Option<usize>,
    slots: Option<u64>,
    slots_max: Option<u64>,
}

/// JSON list of what is named like a pool below `shm_dir`, sorted by name.
pub fn list_pools(shm_dir: &Path) -> Result<String> {
    let dir = std::fs::read_dir(shm_dir).map_err(|error| {
        Error::new(
            ErrorKind::NotFound,
            format!("cannot list {}: {error}; give the directory that holds the pools", shm_dir.display()),
        )
    })?;
    let names = dir.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut entries: Vec<Entry> = names.filter_map(|name| entry(shm_dir, &name)).collect();
    entries.sort_by(|one, other| one.name.cmp(&other.name).then(one.path.cmp(&other.path)));
    Ok(super::inspect::to_json(&entries))
}

fn entry(shm_dir: &Path, dir_name: &str) -> Option<Entry> {
    let parsed = parse_pool_dir(dir_name)?;
    let path = shm_dir.join(dir_name);
    let age =
        std::fs::symlink_metadata(&path).ok().map(|meta| unix_seconds().saturating_sub(meta.mtime().max(0) as u64));
    let refused = |error: String| Entry {
        name: parsed.name.clone(),
        path: path.display().to_string(),
        segments_path: None,
        state: "refused",
        error: Some(error),
        pool_bytes: None,
        bytes_used: None,
        processes_alive: None,
        processes_dead: None,
        idle_seconds: age,
        processes_max: None,
        namespaces: None,
        namespaces_max: None,
        slots: None,
        slots_max: None,
    };
    if parsed.version != LAYOUT_VERSION {
        return Some(refused(format!(
            "{} has layout version {}, this program has {LAYOUT_VERSION}: remove it with {}",
            path.display(),
            parsed.version,
            removal_command(&path)
        )));
    }
    Some(match View::open(&path) {
        Ok(view) => described(&view, &path),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let (processes_alive, processes_dead) = (Some(0), Some(0));
            Entry { state: "creating", error: None, processes_alive, processes_dead, ..refused(String::new()) }
        }
        Err(error) => refused(error.to_string()),
    })
}

fn described(view: &View, path: &Path) -> Entry {
    let processes = view.processes();
    let alive = processes.iter().filter(|process| process.alive).count();
    let last_used = view.control.header().last_used_unix_s.load(Relaxed);
    let (extents, namespaces_max) = (view.extents().0, view.control.namespaces().len());
    Entry {
        name: view.name.clone(),
        path: path.display().to_string(),
        segments_path: view.home.place.path().map(|dir| dir.display().to_string()),
        state: "ok",
        error: None,
        pool_bytes: Some(view.superblock.geometry.pool_bytes),
        bytes_used: Some(extents.iter().map(|extent| extent.bytes).sum()),
        processes_alive: Some(alive),
        processes_dead: Some(processes.len() - alive),
        idle_seconds: Some(unix_seconds().saturating_sub(last_used)),
        processes_max: Some(view.control.processes().len()),
        namespaces: Some((0..namespaces_max).filter(|id| facts(&view.control, *id as u32).is_some()).count()),
        namespaces_max: Some(namespaces_max),
        slots: Some(extents.iter().map(|extent| u64::from(extent.slot_count)).sum()),
        slots_max: Some(view.superblock.geometry.slots_max),
    }
}
