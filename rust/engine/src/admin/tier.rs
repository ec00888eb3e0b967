//! The SSD tier of a pool in numbers.

use std::collections::BTreeMap;

use serde::Serialize;

use super::view::View;
use crate::shm::file::Place;
use crate::shm::process::Member;
use crate::sync::{Acquire, Relaxed, SeqCst};
use crate::tier::Segment;

#[derive(Serialize)]
pub(super) struct TierReport {
    state: &'static str,
    leader_row: Option<u32>,
    /// Gauges and counters.
    #[serde(flatten)]
    numbers: BTreeMap<&'static str, u64>,
}

/// The tier of the pool, if it has one that this build can read.
pub(super) fn tier(view: &View) -> Option<TierReport> {
    let place = Place::directory(&view.dir).ok()?;
    let segment = Segment::open(&place).ok().flatten()?;
    let header = segment.header();
    let leader = Member::decode(header.leader.load(SeqCst));
    let alive = |leader: &Member| {
        view.processes()
            .iter()
            .any(|process| process.alive && process.member.row == leader.row && process.member.epoch == leader.epoch)
    };
    let leader = leader.filter(alive);
    let state = match header.state.load(Acquire) as u8 {
        1 if leader.is_some() => "recovering",
        2 if leader.is_some() => "serving",
        3 if leader.is_some() => "off",
        _ => "none",
    };
    let mut numbers: BTreeMap<&'static str, u64> = header.counts().collect();
    numbers.insert("zones_done", header.zones_done.load(Relaxed));
    numbers.insert("zones", header.zones.load(Relaxed));
    numbers.insert("records", header.records.load(Relaxed));
    numbers.insert("read_bytes_per_second", header.read_bytes_per_second.load(Relaxed));
    numbers.insert("queued_bytes", header.queued_bytes.load(Relaxed));
    Some(TierReport { state, leader_row: leader.map(|leader| leader.row), numbers })
}
