//! Checking every invariant of `docs/shm-format.md` on a pool that nobody is changing meanwhile.

use std::collections::HashSet;
use std::path::Path;

use serde::Serialize;

use super::verify_blocks::check_blocks;
use super::view::View;
use crate::error::Result;
use crate::limits::{CHAIN_HOPS_MAX, PROCESSES_MAX};
use crate::shm::evict::name_of;
use crate::shm::extent::{Extent, ExtentState};
use crate::shm::file::Place;
use crate::shm::geometry::slot_stride;
use crate::shm::names::{parse_segment_file, segment_file};
use crate::shm::namespace::facts;
use crate::shm::process::{Member, load};
use crate::sync::Acquire;

/// Problems listed at most; what is behind them is counted.
const PROBLEMS_MAX: usize = 100;

/// Outcome of a check.
#[derive(Serialize, Default)]
pub(super) struct Report {
    pub(super) ok: bool,
    pub(super) blocks_checked: u64,
    pub(super) checksums_checked: u64,
    pub(super) problems: Vec<String>,
    #[serde(skip)]
    unlisted: u64,
}

impl Report {
    pub(super) fn problem(&mut self, text: String) {
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(text);
        } else {
            self.unlisted += 1;
        }
    }
}

/// How far a check is: `(slots done, slots in all)`.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// JSON report over the pool in directory `path`.
pub fn verify(path: &Path, checksums: bool, progress: Progress<'_>) -> Result<String> {
    let view = View::open(path)?;
    let mut report = Report::default();
    let (extents, problems) = view.extents();
    problems.into_iter().for_each(|problem| report.problem(problem));
    check_processes(&view, &mut report);
    check_extents(&view, &extents, &mut report);
    check_ranges(&view, &extents, &mut report);
    let linked = check_chains(&view, &mut report);
    check_blocks(&view, &extents, &linked, checksums, &mut report, progress);
    if report.unlisted > 0 {
        report.problems.push(format!("and {} more", report.unlisted));
    }
    report.ok = report.problems.is_empty();
    Ok(super::inspect::to_json(&report))
}

fn check_processes(view: &View, report: &mut Report) {
    let header = view.control.header();
    let stripes = view.control.stripes();
    let words = stripes.iter().map(|stripe| &stripe.lock).chain([&header.structure_lock]);
    for word in words.map(|word| word.load(Acquire)).filter(|word| *word != 0) {
        let alive = Member::decode(word).is_some_and(|member| {
            let (epoch, state) = load(&view.control.processes()[member.row as usize]);
            epoch == member.epoch && state.may_live()
        });
        if !alive {
            report.problem(format!("a lock is held by {word:#x}, which is no process of the pool"));
        }
    }
    let torn = stripes.iter().filter(|stripe| stripe.version.load(Acquire) % 2 == 1 && stripe.lock.load(Acquire) == 0);
    for _ in torn {
        report.problem("a stripe of the index is marked as changing, but nobody holds its lock".into());
    }
    if header.rebuild_wanted.load(Acquire) != 0 {
        report.problem("the index waits to be rebuilt".into());
    }
}

fn check_extents(view: &View, extents: &[Extent], report: &mut Report) {
    let (mut segments, mut last_range) = (HashSet::new(), 0);
    let mut sorted: Vec<&Extent> = extents.iter().collect();
    sorted.sort_by_key(|extent| extent.first_slot);
    for extent in sorted {
        let ranges = extent.ranges();
        if ranges.start < last_range {
            report.problem(format!("extent {} shares slots with another", extent.index));
        }
        last_range = ranges.end;
        if extent.owner as usize >= PROCESSES_MAX {
            report.problem(format!("extent {} has the impossible owner {}", extent.index, extent.owner));
        }
        for segment in &extent.segments {
            if !segments.insert(*segment) {
                report.problem(format!("segment {segment} belongs to two parts"));
            }
        }
        if extent.state == ExtentState::Ready {
            check_segment_files(view, extent, report);
        }
    }
    let Place::Directory(home, _) = &view.home.place else { return };
    let files = std::fs::read_dir(home).into_iter().flatten().flatten();
    for name in files.filter_map(|entry| entry.file_name().into_string().ok()) {
        if parse_segment_file(&name).is_some_and(|segment| !segments.contains(&segment)) {
            report.problem(format!("{name} belongs to no extent"));
        }
    }
}

fn check_segment_files(view: &View, extent: &Extent, report: &mut Report) {
    let Some(facts) = facts(&view.control, extent.namespace) else {
        return report.problem(format!("extent {} belongs to no namespace that can be", extent.index));
    };
    if facts.part_bytes.len() != extent.segments.len() {
        return report.problem(format!("extent {} has another number of parts than its namespace", extent.index));
    }
    for (segment, part_bytes) in extent.segments.iter().zip(&facts.part_bytes) {
        let needed = u64::from(extent.slot_count).saturating_mul(slot_stride(*part_bytes));
        match view.home.place.open(&segment_file(*segment)).map(|file| file.metadata().map_or(0, |meta| meta.len())) {
            Ok(bytes) if bytes >= needed => {}
            Ok(bytes) => report.problem(format!("segment {segment} has {bytes} bytes, its slots need {needed}")),
            Err(error) => report.problem(error.to_string()),
        }
    }
}

fn check_ranges(view: &View, extents: &[Extent], report: &mut Report) {
    let mut expected = vec![0u32; view.control.ranges().len()];
    for extent in extents.iter().filter(|extent| extent.state == ExtentState::Ready) {
        extent.ranges().for_each(|range| expected[range] = extent.index + 1);
    }
    let transient = extents.iter().any(|extent| extent.state != ExtentState::Ready);
    for (range, (entry, expected)) in view.control.ranges().iter().zip(expected).enumerate() {
        let entry = entry.load(Acquire);
        if entry != expected && !(transient && expected == 0) {
            report.problem(format!("slot range {range} says extent {entry}, not {expected}"));
        }
    }
}

/// Walk every chain; returns the slots that are on one.
fn check_chains(view: &View, report: &mut Report) -> HashSet<u32> {
    let mut linked = HashSet::new();
    let mask = view.control.geometry().buckets() - 1;
    for (bucket, head) in view.control.buckets().iter().enumerate() {
        let mut link = head.load(Acquire);
        let mut hops = 0;
        while let Some(slot) = link.checked_sub(1) {
            let Some(header) = view.control.slot(slot) else {
                report.problem(format!("bucket {bucket} leads to slot {slot}, which no extent has"));
                break;
            };
            let home = name_of(header).map(|(identity, key)| key.spread(u64::from(identity.id)) as usize & mask);
            if home != Some(bucket) {
                report
                    .problem(format!("slot {slot} is on the chain of bucket {bucket}, where its key does not belong"));
            }
            hops += 1;
            if !linked.insert(slot) || hops > CHAIN_HOPS_MAX {
                report.problem(format!("the chain of bucket {bucket} does not end"));
                break;
            }
            link = header.next.load(Acquire);
        }
    }
    linked
}
