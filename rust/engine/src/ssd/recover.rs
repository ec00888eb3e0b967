//! Recovery: from each zone its summary, and header by header what no summary speaks of. Section 7 of
//! `docs/ssd-format.md`.

use std::collections::VecDeque;
use std::io::ErrorKind as IoKind;
use std::time::Duration;

use super::index::Located;
use super::io::Direction;
use super::member::Filling;
use super::queue::Ended;
use super::reader::ReadTarget;
use super::record::{HEADER_BYTES_MAX, Header, Spot};
use super::store::{Purpose, Store};
use super::summary::{Entry, Summary, count_of, summary_bytes};

/// Bytes of a header and what belongs to it, in whole blocks of any size up to it.
pub(super) const HEAD_BYTES: usize = 4096;

const _: () = assert!(HEADER_BYTES_MAX <= HEAD_BYTES);

/// How far recovery is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Zones that were looked at.
    pub zones_done: usize,
    /// All zones.
    pub zones: usize,
}

/// First bytes and trailer of a zone, as far as they could be read.
#[derive(Default)]
pub(super) struct Probed {
    /// Reads that have not ended.
    missing: u32,
    head: Option<Vec<u8>>,
    trailer: Option<Vec<u8>>,
}

impl<T: ReadTarget> Store<T> {
    /// Recover all zones. Blocks.
    pub fn recover(&mut self) {
        while self.is_recovering() {
            self.recover_some(Duration::from_millis(100));
        }
    }

    /// Go on with recovery: look at zones for which there are buffers, of all directories side by side. Waits up to
    /// `wait` for the first answer. Lookups and reads are served between the calls; writes are
    /// [`super::WriteStart::Busy`] until the last.
    pub fn recover_some(&mut self, wait: Duration) -> Progress {
        if self.is_recovering() {
            (0..self.members.len() as u16).for_each(|member| self.probe_some(member));
            self.pump(wait);
            let seen = self.probed.iter().filter(|(_, probed)| probed.missing == 0);
            let seen: Vec<_> = seen.map(|(at, _)| *at).collect();
            for (member, zone) in seen {
                if let Some(probed) = self.probed.remove(&(member, zone)) {
                    self.recover_zone(member, zone, &probed);
                }
            }
            if !self.is_recovering() {
                self.resume_filling();
            }
        }
        self.progress()
    }

    /// Whether zones are left that were not looked at.
    pub(super) fn is_recovering(&self) -> bool {
        !self.probed.is_empty() || self.unknown.iter().any(|zones| !zones.is_empty())
    }

    /// How far recovery is.
    pub fn progress(&self) -> Progress {
        let zones = self.members.iter().map(|member| member.zones.len()).sum::<usize>();
        let unknown = self.unknown.iter().map(VecDeque::len).sum::<usize>() + self.probed.len();
        Progress { zones_done: zones - unknown, zones }
    }

    /// Start to look at zones of a directory, as far as its own buffers reach: others have theirs if it hangs.
    fn probe_some(&mut self, member: u16) {
        let at = usize::from(member);
        if self.members[at].reads_off {
            self.unknown[at].clear();
        }
        while self.members[at].writes_out + 2 <= self.options.write_buffers()
            && let Some(zone) = self.unknown[at].pop_front()
        {
            let missing = self.probe(member, zone);
            self.probed.insert((member, zone), Probed { missing, ..Probed::default() });
        }
    }

    /// Start to read the two ends of a zone. Returns how many reads were started.
    fn probe(&mut self, member: u16, zone: u32) -> u32 {
        let geometry = self.member(member).geometry();
        let head = HEAD_BYTES.max(geometry.block_bytes);
        let last = geometry.zone_blocks() - 1;
        let ends = [(false, 0, head), (true, last, geometry.block_bytes)];
        let mut started = 0;
        for (trailer, block, bytes) in ends {
            let Some(buffer) = self.queue.buffers().take() else { break };
            let extent = self.member(member).extent(zone, block, bytes);
            self.members[usize::from(member)].writes_out += 1;
            self.queue.start(Purpose::Probe { member, zone, trailer }, Direction::Read, extent, buffer);
            started += 1;
        }
        started
    }

    pub(super) fn probe_ended(&mut self, member: u16, zone: u32, trailer: bool, ended: Ended<Purpose>) {
        self.note_read(member, &ended.result);
        if let Some(probed) = self.probed.get_mut(&(member, zone)) {
            probed.missing -= 1;
            let bytes = ended.buffer.as_ref().filter(|_| ended.result.is_ok());
            let bytes = bytes.map(|buffer| buffer[..ended.extent.bytes].to_vec());
            *(if trailer { &mut probed.trailer } else { &mut probed.head }) = bytes;
        }
        if let Some(buffer) = ended.buffer {
            self.members[usize::from(member)].writes_out -= 1;
            self.queue.buffers().give(buffer);
        }
    }

    pub(super) fn note_read(&mut self, member: u16, result: &std::io::Result<()>) {
        let kind = result.as_ref().err().map(|error| error.kind());
        let failed = kind.is_some_and(|kind| kind != IoKind::UnexpectedEof);
        if self.members[usize::from(member)].note_read(failed, kind == Some(IoKind::TimedOut))
            && let Err(error) = result
        {
            self.turn_off(member, true, error);
        }
    }

    fn recover_zone(&mut self, member: u16, zone: u32, probed: &Probed) {
        let at = usize::from(member);
        let ours =
            |spot: &Spot| spot.cache_id == self.members[at].superblock.cache_id && spot.zone == zone && spot.start == 0;
        let head = probed.head.as_deref().and_then(Header::decode).filter(|header| ours(&header.spot));
        let summary = probed.trailer.as_deref().and_then(|trailer| self.summary_of(member, zone, trailer));
        let summary = match (head, summary) {
            (Some(head), Some(summary)) if summary.sequence == head.spot.sequence => summary,
            (Some(Header { spot: Spot { cache_id, sequence, .. }, .. }), _) => {
                Summary { cache_id, sequence, zone, end: 0, last: 0, entries: Vec::new() }
            }
            (None, Some(summary)) => summary,
            (None, None) => return,
        };
        let sequence = summary.sequence;
        self.members[at].zones[zone as usize].sequence = sequence;
        self.members[at].zones[zone as usize].touched = sequence;
        let filling = self.scan(member, summary);
        let mut index = self.index.write();
        for entry in &filling.entries {
            let located = Located { member, zone, start: entry.start, blocks: entry.blocks };
            let newer = index.place(entry.tag).is_none_or(|other| {
                self.members[usize::from(other.member)].zones[other.zone as usize].sequence <= sequence
            });
            if newer {
                index.insert(entry.tag, located);
            }
        }
        drop(index);
        self.members[at].zones[zone as usize].tags = filling.entries.iter().map(|entry| entry.tag).collect();
        self.clock = self.clock.max(sequence);
        let newest = self.newest[at].as_ref().map(|newest| self.members[at].zones[newest.zone as usize].sequence);
        if newest.is_none_or(|newest| newest < sequence) {
            self.newest[at] = Some(filling);
        }
    }

    /// The summary that ends with `trailer`; it may begin many blocks before.
    fn summary_of(&mut self, member: u16, zone: u32, trailer: &[u8]) -> Option<Summary> {
        let geometry = self.members[usize::from(member)].geometry();
        let count = count_of(trailer).filter(|count| *count <= geometry.zone_blocks() as usize)?;
        let bytes = summary_bytes(count, geometry.block_bytes);
        let summary = if bytes <= trailer.len() {
            Summary::decode(trailer)
        } else {
            let first = geometry.zone_blocks().checked_sub(geometry.blocks_of(bytes as u64) as u32)?;
            Summary::decode(&self.read_now(member, zone, first, bytes)?)
        }?;
        let fits = |entry: &Entry| {
            entry.blocks > 0 && u64::from(entry.start) + u64::from(entry.blocks) <= u64::from(summary.end)
        };
        let ours = summary.cache_id == self.members[usize::from(member)].superblock.cache_id && summary.zone == zone;
        let sound = summary.end <= geometry.zone_blocks() && summary.sequence > 0 && summary.entries.iter().all(fits);
        (ours && sound).then_some(summary)
    }

    /// Follow headers from where a summary ends, as long as each names the one before. What is left of an earlier crash
    /// behind the end of a zone, whole or not, does not.
    fn scan(&mut self, member: u16, summary: Summary) -> Filling {
        let Summary { zone, end: mut start, mut last, mut entries, .. } = summary;
        let geometry = self.members[usize::from(member)].geometry();
        let block = geometry.block_bytes;
        let (mut bytes, mut first, mut last_blocks) = (Vec::new(), start, 0u32);
        while start < geometry.zone_blocks() {
            let skip = (start - first) as usize * block;
            let left = (geometry.zone_blocks() - start) as usize * block;
            if bytes.len() < skip + HEAD_BYTES.min(left) {
                // Large records are stepped over; of small ones many come with one read.
                let large = last_blocks as usize * block * 4 > self.options.chunk_bytes;
                let want = if large { HEAD_BYTES.max(block) } else { self.options.chunk_bytes };
                let Some(read) = self.read_now(member, zone, start, want.min(left)) else { break };
                (bytes, first) = (read, start);
                continue;
            }
            let spot = self.members[usize::from(member)].spot(zone, start);
            let next = |header: &Header| header.spot == spot && header.before == last;
            let Some(header) = Header::decode(&bytes[skip..]).filter(next) else { break };
            let blocks = geometry.blocks_of(header.record_bytes());
            if u64::from(start) + blocks > u64::from(geometry.zone_blocks()) {
                break;
            }
            last_blocks = blocks as u32;
            last = Header::checksum_in(&bytes[skip..]);
            entries.push(Entry { tag: header.id.tag(header.epoch), start, blocks: last_blocks });
            start += last_blocks;
        }
        Filling { zone, end: start, entries, chunk: None, last }
    }

    /// Read and wait. `None` if that failed.
    fn read_now(&mut self, member: u16, zone: u32, block: u32, bytes: usize) -> Option<Vec<u8>> {
        let mut read = Vec::with_capacity(bytes);
        while read.len() < bytes && !self.member(member).reads_off {
            let buffer = self.queue.buffers().take()?;
            let step = (bytes - read.len()).min(self.options.chunk_bytes);
            let mut extent = self.members[usize::from(member)].extent(zone, block, step);
            extent.offset += read.len() as u64;
            let (result, buffer) = self.queue.run(Purpose::Alone, Direction::Read, extent, buffer);
            self.note_read(member, &result);
            let buffer = buffer?;
            read.extend_from_slice(&buffer[..step]);
            self.queue.buffers().give(buffer);
            result.ok()?;
        }
        (read.len() == bytes).then_some(read)
    }

    /// Go on where the newest zone of each directory ends.
    fn resume_filling(&mut self) {
        for at in 0..self.members.len() {
            if let Some(filling) = self.newest[at].take() {
                self.members[at].filling = Some(filling);
            }
        }
    }
}
