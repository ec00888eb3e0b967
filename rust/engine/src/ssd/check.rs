//! Checking every record that lookups would find, the way a reader would.

use std::collections::BTreeMap;
use std::time::Duration;

use super::epochs::Fingerprint;
use super::index::Located;
use super::io::Direction;
use super::reader::{ReadOutcome, ReadStart, ReadTarget};
use super::record::Header;
use super::recover::HEAD_BYTES;
use super::store::{Event, Purpose, Store};
use crate::limits::SSD_PROBLEMS_MAX;

/// Takes bytes that are only to be checked.
pub struct Nowhere;

impl ReadTarget for Nowhere {
    fn put(&mut self, _part: usize, _offset: usize, _bytes: &[u8]) {}
}

/// Records of one namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Whole ones.
    pub records: u64,
    /// Their bytes, headers and padding included.
    pub bytes: u64,
}

/// Outcome of a check.
#[derive(Debug, Default)]
pub struct Checked {
    /// Whole records by fingerprint and group.
    pub namespaces: BTreeMap<(Fingerprint, u32), Held>,
    /// Records of namespaces that were reset meanwhile: never found again, and no damage.
    pub forgotten: u64,
    /// Records with a wrong header or wrong bytes.
    pub damaged: u64,
    /// Records that the disk did not give.
    pub unreadable: u64,
    /// One sentence each, of the first [`SSD_PROBLEMS_MAX`].
    pub problems: Vec<String>,
}

/// What recovery found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Zones that hold records.
    pub zones_used: u64,
    /// Records that lookups find.
    pub records: u64,
    /// Their bytes, headers and padding included.
    pub bytes: u64,
}

enum Head {
    Right(Header),
    Forgotten,
    Damaged,
    Unreadable,
}

impl Store<Nowhere> {
    /// Read all records. `report` is told the bytes that were looked at and their total now and then, and says whether
    /// to go on; `None` if it did not. Blocks; recovery is over.
    pub fn check(&mut self, report: &mut dyn FnMut(u64, u64) -> bool) -> Option<Checked> {
        let mut places: Vec<(u64, Located)> = self.index.read().all().collect();
        places.sort_unstable_by_key(|(_, located)| (located.zone, located.start, located.member));
        let total = places.iter().map(|(_, located)| self.bytes_of(located)).sum();
        let (mut checked, mut done) = (Checked::default(), 0);
        for batch in places.chunks(usize::from(self.options.read_depth)) {
            if !report(done, total) {
                return None;
            }
            let heads = self.heads(batch);
            self.check_batch(batch, heads, &mut checked);
            done += batch.iter().map(|(_, located)| self.bytes_of(located)).sum::<u64>();
        }
        report(done, total).then_some(checked)
    }

    /// What there is, as far as recovery has come.
    pub fn contents(&self) -> Contents {
        let index = self.index.read();
        let used = self.members.iter().flat_map(|member| &member.zones).filter(|zone| zone.sequence > 0);
        Contents {
            zones_used: used.count() as u64,
            records: index.all().count() as u64,
            bytes: index.all().map(|(_, located)| self.bytes_of(&located)).sum(),
        }
    }

    fn bytes_of(&self, located: &Located) -> u64 {
        u64::from(located.blocks) * self.members[usize::from(located.member)].geometry().block_bytes as u64
    }

    /// The headers of some records.
    fn heads(&mut self, batch: &[(u64, Located)]) -> Vec<Head> {
        let mut heads: Vec<Head> = batch.iter().map(|_| Head::Unreadable).collect();
        let mut missing = 0;
        for (number, (_, located)) in batch.iter().enumerate() {
            let member = &self.members[usize::from(located.member)];
            let bytes = HEAD_BYTES.max(member.geometry().block_bytes).min(self.bytes_of(located) as usize);
            let extent = member.extent(located.zone, located.start, bytes);
            if !member.reads_off
                && let Some(buffer) = self.queue.buffers().take()
            {
                self.queue.start(Purpose::Look { number }, Direction::Read, extent, buffer);
                missing += 1;
            }
        }
        while missing > 0 {
            for ended in self.queue.poll(Duration::from_millis(100)) {
                let Purpose::Look { number } = ended.purpose else {
                    self.settle(ended);
                    continue;
                };
                missing -= 1;
                let (tag, located) = &batch[number];
                self.note_read(located.member, &ended.result);
                let Some(buffer) = ended.buffer else { continue };
                if ended.result.is_ok() {
                    heads[number] = self.head(*tag, located, &buffer[..ended.extent.bytes]);
                }
                self.queue.buffers().give(buffer);
            }
        }
        heads
    }

    fn head(&self, tag: u64, located: &Located, bytes: &[u8]) -> Head {
        let spot = self.members[usize::from(located.member)].spot(located.zone, located.start);
        match Header::decode(bytes) {
            Some(header) if header.spot == spot && header.id.tag(header.epoch) == tag => {
                match header.epoch == self.index.epoch(&header.id.fingerprint) {
                    true => Head::Right(header),
                    false => Head::Forgotten,
                }
            }
            _ => Head::Damaged,
        }
    }

    fn check_batch(&mut self, batch: &[(u64, Located)], heads: Vec<Head>, checked: &mut Checked) {
        let mut reading = BTreeMap::new();
        for ((_, located), head) in batch.iter().zip(heads) {
            match head {
                Head::Right(header) => {
                    let sizes: Vec<u64> = header.parts.iter().map(|part| part.bytes).collect();
                    match self.read(&header.id, &sizes, Nowhere) {
                        ReadStart::Started(ticket) => drop(reading.insert(ticket, (header, *located))),
                        _ => self.note_bad(located, ReadOutcome::Damaged, checked),
                    }
                }
                Head::Forgotten => checked.forgotten += 1,
                Head::Damaged => self.note_bad(located, ReadOutcome::Damaged, checked),
                Head::Unreadable => self.note_bad(located, ReadOutcome::Failed, checked),
            }
        }
        while !reading.is_empty() {
            for event in self.poll(Duration::from_millis(100)) {
                let Event::Read(ticket, _, outcome) = event else { continue };
                let Some((header, located)) = reading.remove(&ticket) else { continue };
                if outcome != ReadOutcome::Whole {
                    self.note_bad(&located, outcome, checked);
                    continue;
                }
                let held = checked.namespaces.entry((header.id.fingerprint, header.id.group)).or_default();
                held.records += 1;
                held.bytes += self.bytes_of(&located);
            }
        }
    }

    fn note_bad(&self, located: &Located, outcome: ReadOutcome, checked: &mut Checked) {
        let what = match outcome {
            ReadOutcome::Failed => {
                checked.unreadable += 1;
                "cannot be read: look at the disk"
            }
            _ => {
                checked.damaged += 1;
                "is not as it was written, and will be a miss"
            }
        };
        if checked.problems.len() < SSD_PROBLEMS_MAX {
            let path = self.members[usize::from(located.member)].path.display();
            let Located { zone, start, .. } = located;
            checked.problems.push(format!("{path}: the record in zone {zone} at block {start} {what}"));
        }
    }
}
