//! The part of `verify` that goes over every slot.

use std::collections::{HashMap, HashSet};

use super::verify::{Progress, Report};
use super::view::View;
use crate::checksum::{ChainChecksum, part_checksum};
use crate::key::BlockRef;
use crate::limits::PROCESSES_MAX;
use crate::shm::core::Core;
use crate::shm::evict::name_of;
use crate::shm::extent::{Extent, ExtentState};
use crate::shm::geometry::slot_stride;
use crate::shm::mapping::Mapping;
use crate::shm::names::segment_file;
use crate::shm::namespace::{NamespaceFacts, facts};
use crate::shm::process::{ProcessState, load};
use crate::shm::recency::{owner_of, tick_of};
use crate::shm::rows::SlotHeader;
use crate::shm::state::{SlotState, State, sealed_word};
use crate::sync::{Acquire, Relaxed};

/// Slots between two calls of the progress function.
const PROGRESS_SLOTS: u64 = 4096;

struct Blocks<'a> {
    view: &'a View,
    linked: &'a HashSet<u32>,
    rows_in_use: Vec<bool>,
    names: HashSet<(u32, [u64; 4], Vec<u8>)>,
    /// Member slots of each sealed head, less those that it reaches.
    members: HashMap<u64, i64>,
    segments: HashMap<u32, Option<Mapping>>,
}

pub(super) fn check_blocks(
    view: &View,
    extents: &[Extent],
    linked: &HashSet<u32>,
    checksums: bool,
    report: &mut Report,
    progress: Progress<'_>,
) {
    let rows_in_use = view.control.processes().iter().map(|row| load(row).1 != ProcessState::Free).collect();
    let (names, members, segments) = Default::default();
    let mut blocks = Blocks { view, linked, rows_in_use, names, members, segments };
    let total: u64 = extents.iter().map(|extent| u64::from(extent.slot_count)).sum();
    let mut done = 0;
    for extent in extents.iter().filter(|extent| extent.state == ExtentState::Ready) {
        let Some(facts) = facts(&view.control, extent.namespace) else { continue };
        for slot in extent.slots() {
            blocks.check_slot(slot, extent, &facts, checksums, report);
            done += 1;
            if done % PROGRESS_SLOTS == 0 {
                progress(done, total);
            }
        }
    }
    progress(total, total);
    for (head, count) in &blocks.members {
        if *count != 0 {
            report.problem(format!("block {head:#x} does not reach exactly its member slots ({count} amiss)"));
        }
    }
}

impl Blocks<'_> {
    fn check_slot(&mut self, slot: u32, extent: &Extent, facts: &NamespaceFacts, checksums: bool, report: &mut Report) {
        let Some(header) = self.view.control.slot(slot) else {
            return report.problem(format!("slot {slot} has no header"));
        };
        let Some(state) = SlotState::decode(header.state.load(Acquire)) else {
            return report.problem(format!("slot {slot} has an impossible state"));
        };
        self.check_owners(slot, header, state, report);
        match state.state {
            State::Free => {
                let hints = self.view.control.free_words()[slot as usize / 64].load(Relaxed);
                if hints >> (slot % 64) & 1 == 0 {
                    report.problem(format!("slot {slot} is free but nobody would find it"));
                }
            }
            State::Sealed => self.check_sealed(slot, header, state, extent, facts, checksums, report),
            State::Member => self.check_member(slot, header, report),
            _ => {}
        }
        if matches!(state.state, State::Free | State::Doomed | State::Member) && self.linked.contains(&slot) {
            report.problem(format!("slot {slot} is {:?} but still in the index", state.state));
        }
    }

    /// Leases and ownership of processes that are gone for good.
    fn check_owners(&self, slot: u32, header: &SlotHeader, state: SlotState, report: &mut Report) {
        for row in 0..PROCESSES_MAX {
            let leased = header.leases[row / 64].load(Relaxed) >> (row % 64) & 1 == 1;
            if leased && !self.rows_in_use[row] {
                report.problem(format!("slot {slot} is leased by process row {row}, which nobody uses"));
            }
        }
        let owned = matches!(state.state, State::Reserved | State::Evicting | State::Freeing);
        if owned && !self.rows_in_use.get(state.owner as usize).copied().unwrap_or(false) {
            report
                .problem(format!("slot {slot} is {:?} by process row {}, which nobody uses", state.state, state.owner));
        }
    }

    #[allow(clippy::too_many_arguments, reason = "one slot and all that is known of it")]
    fn check_sealed(
        &mut self,
        slot: u32,
        header: &SlotHeader,
        state: SlotState,
        extent: &Extent,
        facts: &NamespaceFacts,
        checksums: bool,
        report: &mut Report,
    ) {
        report.blocks_checked += 1;
        let Some((identity, key)) = name_of(header) else {
            return report.problem(format!("sealed slot {slot} has no possible key"));
        };
        if identity.id != extent.namespace {
            report.problem(format!("sealed slot {slot} names namespace {}, not {}", identity.id, extent.namespace));
        }
        if identity.fingerprint[..3] != facts.fingerprint[..3]
            || identity.fingerprint[3] ^ facts.fingerprint[3] > facts.epoch
        {
            report.problem(format!("sealed slot {slot} has the fingerprint of another namespace"));
        }
        if !self.linked.contains(&slot) {
            report.problem(format!("sealed slot {slot} is not in the index"));
        }
        if !self.names.insert((identity.id, identity.fingerprint, key.to_bytes())) {
            report.problem(format!("slot {slot} is the second sealed one of its key"));
        }
        if header.parts_written.load(Acquire) != u64::MAX >> (64 - facts.part_bytes.len()) {
            report.problem(format!("sealed slot {slot} lacks parts"));
        }
        let stamp = self.view.control.stamp(slot).load(Relaxed);
        let current = identity.fingerprint[3] ^ facts.fingerprint[3] == facts.epoch;
        let parent = BlockRef(header.parent.load(Relaxed));
        if current && parent.0 != 0 {
            let head = self.view.control.slot(parent.slot());
            if head.is_none_or(|head| head.state.load(Acquire) != sealed_word(parent.generation())) {
                report.problem(format!("sealed slot {slot} has lost the block before it"));
            } else if tick_of(self.view.control.stamp(parent.slot()).load(Relaxed)) <= tick_of(stamp) {
                report.problem(format!("sealed slot {slot} would outlive the block before it"));
            }
        }
        if stamp == 0 {
            report.problem(format!("sealed slot {slot} can never be evicted"));
        }
        if let Some(row) = owner_of(stamp)
            && !self.rows_in_use.get(row as usize).copied().unwrap_or(false)
        {
            report.problem(format!("sealed slot {slot} is on the account of process row {row}, which nobody uses"));
        }
        self.count_members(state.block(slot), header);
        if checksums {
            self.check_checksum(slot, header, extent, facts, report);
        }
    }

    fn check_member(&mut self, slot: u32, header: &SlotHeader, report: &mut Report) {
        let head = BlockRef(header.parent.load(Relaxed));
        let state = self.view.control.slot(head.slot()).and_then(|h| SlotState::decode(h.state.load(Acquire)));
        if state.is_none_or(|state| state.generation != head.generation() || state.state == State::Free) {
            return report.problem(format!("member slot {slot} belongs to a block that is gone"));
        }
        if state.is_some_and(|state| state.state == State::Sealed) {
            *self.members.entry(head.0).or_default() += 1;
        }
    }

    /// Take the members that are reachable from a head off the account.
    fn count_members(&mut self, head: BlockRef, header: &SlotHeader) {
        let mut link = header.member_next.load(Acquire);
        let mut reachable = 0i64;
        while let Some(member) = link.checked_sub(1).and_then(|slot| self.view.control.slot(slot)) {
            if member.parent.load(Relaxed) != head.0 || reachable > self.view.control.geometry().slots_max as i64 {
                break;
            }
            reachable += 1;
            link = member.member_next.load(Acquire);
        }
        if reachable > 0 {
            *self.members.entry(head.0).or_default() -= reachable;
        }
    }

    fn check_checksum(
        &mut self,
        slot: u32,
        header: &SlotHeader,
        extent: &Extent,
        facts: &NamespaceFacts,
        report: &mut Report,
    ) {
        let Some(expected) = Core::checksum_of(header) else { return };
        let used = header.used_bytes.load(Relaxed) as usize;
        let actual = if used == 0 && header.member_next.load(Acquire) == 0 {
            self.checksum_of_parts(slot, extent, facts)
        } else {
            self.checksum_of_chain(slot, used)
        };
        match actual {
            Some(actual) if actual == expected => report.checksums_checked += 1,
            Some(_) => report.problem(format!("the bytes of slot {slot} do not match their checksum")),
            None => report.problem(format!("the bytes of slot {slot} cannot be read")),
        }
    }

    fn checksum_of_parts(&mut self, slot: u32, extent: &Extent, facts: &NamespaceFacts) -> Option<u64> {
        let mut sum = 0u64;
        for part in 0..facts.part_bytes.len() {
            let bytes = self.bytes_of(slot, extent, part, facts.part_bytes[part])?;
            sum = sum.wrapping_add(part_checksum(part as u32, bytes));
        }
        Some(sum)
    }

    /// Checksum of the bytes in use of a block of one part, in one or several slots.
    fn checksum_of_chain(&mut self, head: u32, used: usize) -> Option<u64> {
        let mut checksum = ChainChecksum::default();
        let (mut left, mut slot) = (used, head);
        loop {
            let extent = Extent::load(&self.view.control, self.view.control.extent_of(slot)?).ok()??;
            let part_bytes = facts(&self.view.control, extent.namespace)?.part_bytes[0];
            let bytes = self.bytes_of(slot, &extent, 0, part_bytes)?;
            let taken = left.min(bytes.len());
            checksum.add(part_checksum(0, &bytes[..taken]));
            left -= taken;
            if left == 0 {
                return checksum.finish();
            }
            slot = self.view.control.slot(slot)?.member_next.load(Acquire).checked_sub(1)?;
        }
    }

    fn bytes_of(&mut self, slot: u32, extent: &Extent, part: usize, part_bytes: u64) -> Option<&[u8]> {
        let segment = *extent.segments.get(part)?;
        let mapping = self.segments.entry(segment).or_insert_with(|| {
            let file = self.view.home.place.open(&segment_file(segment)).ok()?;
            let bytes = file.metadata().ok()?.len();
            Mapping::new(&file, bytes as usize).ok()
        });
        let offset = u64::from(slot.checked_sub(extent.first_slot)?).checked_mul(slot_stride(part_bytes))?;
        mapping.as_ref()?.sealed_bytes(offset as usize, part_bytes as usize)
    }
}
