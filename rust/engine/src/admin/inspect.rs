//! One pool in numbers.

use std::path::Path;

use serde::Serialize;

use super::tier::{TierReport, tier};
use super::view::View;
use crate::error::Result;
use crate::shm::extent::{Extent, ExtentState};
use crate::shm::file::Place;
use crate::shm::liveness::held_by_other;
use crate::shm::names::LAYOUT_VERSION;
use crate::shm::namespace::{NamespaceFacts, facts};
use crate::shm::process::Member;
use crate::shm::rows::{SlotHeader, load_label, load4};
use crate::shm::shares::Shares;
use crate::shm::state::{SlotState, State};
use crate::sync::{Acquire, Relaxed, SeqCst};
use crate::traffic::{self, TrafficReport};

#[derive(Serialize)]
struct Report {
    name: String,
    path: String,
    geometry: GeometryReport,
    created_unix_s: u64,
    last_used_unix_s: u64,
    bytes_used: u64,
    bytes_max: u64,
    segments: SegmentsReport,
    locks_held: usize,
    namespaces: Vec<NamespaceReport>,
    processes: Vec<ProcessReport>,
    ssd: Option<TierReport>,
    traffic: Option<TrafficReport>,
}

#[derive(Serialize)]
struct GeometryReport {
    layout_version: u32,
    pool_bytes: u64,
    segment_bytes: u64,
    slots_max: u64,
    slots_used: u64,
}

#[derive(Serialize)]
struct SegmentsReport {
    ready: usize,
    creating: usize,
    free: usize,
}

#[derive(Serialize, Default)]
struct NamespaceReport {
    id: usize,
    fingerprint: String,
    group: u32,
    label: String,
    epoch: u64,
    parts: usize,
    part_bytes: Vec<u64>,
    segments: usize,
    slots: u64,
    blocks_sealed: u64,
    blocks_reserved: u64,
    blocks_quarantined: u64,
    bytes_sealed: u64,
    leases: u64,
}

#[derive(Serialize)]
struct ProcessReport {
    row: u32,
    epoch: u64,
    pid: u64,
    label: String,
    alive: bool,
    leader_row: Option<u32>,
    weight_milli: u64,
    share_bytes: u64,
    used_bytes: u64,
    leases: u64,
    reserved: u64,
    started_unix_s: u64,
}

/// JSON description of the pool in directory `path`.
pub fn inspect(path: &Path) -> Result<String> {
    let view = View::open(path)?;
    let (extents, _) = view.extents();
    let mut namespaces = namespaces(&view);
    let mut processes = processes(&view, &extents);
    for extent in extents.iter().filter(|extent| extent.state == ExtentState::Ready) {
        for slot in extent.slots() {
            if let Some(header) = view.control.slot(slot) {
                count_slot(header, extent, &mut namespaces, &mut processes);
            }
        }
    }
    let geometry = view.superblock.geometry;
    let segments = |wanted: &[ExtentState]| -> usize {
        extents.iter().filter(|extent| wanted.contains(&extent.state)).map(|extent| extent.segments.len()).sum()
    };
    let ready = segments(&[ExtentState::Ready]);
    let creating = segments(&[ExtentState::Creating, ExtentState::Retiring, ExtentState::Dropping]);
    let ids: Vec<usize> = namespaces.iter().map(|(report, _)| report.id).collect();
    let living = processes.iter().filter(|process| process.alive);
    let alive: Vec<Member> = living.map(|process| Member { row: process.row, epoch: process.epoch }).collect();
    let traffic =
        Place::directory(path).ok().and_then(|place| traffic::report(&place, geometry.pool_bytes, &ids, &alive));
    let report = Report {
        name: view.name.clone(),
        path: view.dir.display().to_string(),
        geometry: GeometryReport {
            layout_version: LAYOUT_VERSION,
            pool_bytes: geometry.pool_bytes,
            segment_bytes: geometry.segment_bytes,
            slots_max: geometry.slots_max,
            slots_used: extents.iter().map(|extent| u64::from(extent.slot_count)).sum(),
        },
        created_unix_s: view.superblock.created_unix_s,
        last_used_unix_s: view.control.header().last_used_unix_s.load(Relaxed),
        bytes_used: extents.iter().map(|extent| extent.bytes).sum(),
        bytes_max: geometry.pool_bytes,
        segments: SegmentsReport {
            ready,
            creating,
            free: (geometry.segments_max() as usize).saturating_sub(ready + creating),
        },
        locks_held: locks_held(&view),
        namespaces: namespaces.into_iter().map(|(report, _)| report).collect(),
        processes,
        ssd: tier(&view),
        traffic,
    };
    Ok(to_json(&report))
}

fn locks_held(view: &View) -> usize {
    let words = view.control.stripes().iter().map(|stripe| &stripe.lock);
    words.chain([&view.control.header().structure_lock]).filter(|word| word.load(Acquire) != 0).count()
}

fn namespaces(view: &View) -> Vec<(NamespaceReport, NamespaceFacts)> {
    let (extents, _) = view.extents();
    (0..view.control.namespaces().len())
        .filter_map(|id| {
            let facts = facts(&view.control, id as u32)?;
            let mine: Vec<&Extent> = extents.iter().filter(|extent| extent.namespace as usize == id).collect();
            let report = NamespaceReport {
                id,
                fingerprint: facts
                    .fingerprint
                    .iter()
                    .flat_map(|w| w.to_le_bytes())
                    .map(|b| format!("{b:02x}"))
                    .collect(),
                group: facts.group,
                label: facts.label.clone(),
                epoch: facts.epoch,
                parts: facts.part_bytes.len(),
                part_bytes: facts.part_bytes.clone(),
                segments: mine.iter().map(|extent| extent.segments.len()).sum(),
                slots: mine.iter().map(|extent| u64::from(extent.slot_count)).sum(),
                ..NamespaceReport::default()
            };
            Some((report, facts))
        })
        .collect()
}

fn processes(view: &View, extents: &[Extent]) -> Vec<ProcessReport> {
    let shares = Shares::count(&view.control, extents, |row| held_by_other(&view.file, row));
    let report = |process: super::view::ProcessView| {
        let row = &view.control.processes()[process.member.row as usize];
        let share = shares.of(process.member.row);
        ProcessReport {
            row: process.member.row,
            epoch: process.member.epoch,
            pid: row.pid.load(Relaxed),
            label: load_label(&row.label),
            alive: process.alive,
            leader_row: Member::decode(row.leader.load(SeqCst)).map(|leader| leader.row),
            weight_milli: share.weight_milli,
            share_bytes: share.bytes,
            used_bytes: share.used_bytes,
            leases: 0,
            reserved: 0,
            started_unix_s: row.started_unix_s.load(Relaxed),
        }
    };
    view.processes().into_iter().map(report).collect()
}

fn count_slot(
    header: &SlotHeader,
    extent: &Extent,
    namespaces: &mut [(NamespaceReport, NamespaceFacts)],
    processes: &mut [ProcessReport],
) {
    let leases = [header.leases[0].load(Relaxed), header.leases[1].load(Relaxed)];
    let Some(state) = SlotState::decode(header.state.load(Acquire)) else { return };
    for process in processes.iter_mut() {
        process.leases += leases[process.row as usize / 64] >> (process.row % 64) & 1;
        process.reserved += u64::from(state.state == State::Reserved && state.owner == process.row);
    }
    let Some((report, facts)) = namespaces.iter_mut().find(|(report, _)| report.id == extent.namespace as usize) else {
        return;
    };
    report.leases += leases.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
    match state.state {
        State::Sealed => {
            let mut now = facts.fingerprint;
            now[3] ^= facts.epoch;
            if load4(&header.fingerprint) == now {
                report.blocks_sealed += 1;
                report.bytes_sealed = report.bytes_sealed.saturating_add(facts.part_bytes.iter().sum());
            }
        }
        State::Member => report.bytes_sealed = report.bytes_sealed.saturating_add(facts.part_bytes.iter().sum()),
        State::Reserved => report.blocks_reserved += 1,
        State::Quarantined => report.blocks_quarantined += 1,
        _ => {}
    }
}

/// Reports are plain data, which always has a JSON form.
pub(super) fn to_json<T: Serialize>(report: &T) -> String {
    serde_json::to_string(report).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
}
