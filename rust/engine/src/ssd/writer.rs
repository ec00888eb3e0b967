//! Writing: records are copied into chunks, chunks go to the end of a zone, full zones are summed up.

use std::time::Duration;

use super::index::Located;
use super::io::Direction;
use super::member::{Chunk, Filling};
use super::queue::Ended;
use super::reader::ReadTarget;
use super::record::{Header, Part, RecordId, header_bytes};
use super::store::{ChunkSent, Event, Purpose, Store, Ticket};
use super::summary::{Entry, summary_bytes};
use crate::checksum::part_checksum;

/// A block to write.
pub struct Record<'a> {
    /// What it will be looked up by.
    pub id: RecordId,
    /// Its parts, 1 to 64.
    pub parts: &'a [&'a [u8]],
    /// Sum of the parts' checksums as the pool has it; bytes that do not match are not written.
    pub checksum: Option<u64>,
}

/// What became of a record that was to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteStart {
    /// Its bytes were copied and will be written; an event tells when. The source is free.
    Queued(Ticket),
    /// It is there already, or on its way.
    Present,
    /// No buffer or zone is free: poll, and try again.
    Busy,
    /// Larger than a zone, or without parts, or with too many.
    Unfit,
    /// The bytes do not match the given checksum.
    Damaged,
    /// No directory takes writes.
    Off,
}

/// A record whose bytes are not all on disk.
pub(super) struct Pending {
    tag: u64,
    located: Located,
    chunks_left: u32,
    /// All its bytes are in chunks.
    copied: bool,
    failed: bool,
}

impl<T: ReadTarget> Store<T> {
    /// Write a record. Copies its bytes and returns; only a record larger than all buffers of its directory together
    /// waits for the disk.
    pub fn write(&mut self, record: &Record<'_>) -> WriteStart {
        let epoch = self.index.epoch(&record.id.fingerprint);
        let tag = record.id.tag(epoch);
        if self.pending_tags.contains(&tag) || self.index.read().place(tag).is_some() {
            return WriteStart::Present;
        }
        if self.is_forked() {
            return WriteStart::Off;
        }
        if self.is_recovering() {
            return WriteStart::Busy;
        }
        let Some(member) = self.member_for_writing() else { return WriteStart::Off };
        let (parts, at) = (record.parts, usize::from(member));
        let bytes = parts.iter().map(|part| part.len()).sum::<usize>() + header_bytes(parts.len());
        let blocks = self.members[at].geometry().blocks_of(bytes as u64);
        if !(1..=crate::limits::PARTS_MAX).contains(&parts.len()) || blocks > self.members[at].record_blocks_max() {
            return WriteStart::Unfit;
        }
        if !self.has_room(member, blocks) {
            return WriteStart::Busy;
        }
        let parts: Vec<Part> = (0..)
            .zip(parts)
            .map(|(number, part)| Part { bytes: part.len() as u64, checksum: part_checksum(number, part) })
            .collect();
        let sum = parts.iter().fold(0u64, |sum, part| sum.wrapping_add(part.checksum));
        if record.checksum.is_some_and(|expected| expected != sum) {
            self.counters.records_refused += 1;
            return WriteStart::Damaged;
        }
        let Some(filling) = &self.members[at].filling else { return WriteStart::Busy };
        let located = Located { member, zone: filling.zone, start: filling.end, blocks: blocks as u32 };
        let spot = self.members[at].spot(located.zone, located.start);
        let (before, session) = (filling.last, self.session);
        self.append(&Header { spot, before, session, epoch, id: record.id, parts }, record.parts, tag, located)
    }

    /// Start the writes of all that waits for more.
    pub fn flush(&mut self) {
        (0..self.members.len() as u16).for_each(|member| self.send_chunk(member));
    }

    /// Members take turns, a chunk each.
    fn member_for_writing(&mut self) -> Option<u16> {
        let count = self.members.len();
        let next = (0..count).map(|step| (self.turn + step) % count).find(|at| !self.members[*at].writes_off)?;
        self.turn = next;
        Some(next as u16)
    }

    /// Whether a record of so many blocks can be appended now; goes on to the next zone if need be.
    fn has_room(&mut self, member: u16, blocks: u64) -> bool {
        let at = usize::from(member);
        if !self.members[at].takes(blocks, self.options.chunk_bytes) {
            if self.members[at].filling.is_some() && !self.seal(member) {
                return false;
            }
            if !self.open_zone(member) {
                return false;
            }
        }
        let left = self.members[at].filling.as_ref().and_then(|filling| filling.chunk.as_ref());
        let left = left.map_or(0, |chunk| self.options.chunk_bytes - chunk.filled);
        let bytes = blocks as usize * self.members[at].geometry().block_bytes;
        let buffers = bytes.saturating_sub(left).div_ceil(self.options.chunk_bytes);
        let free = usize::from(self.options.write_buffers() - self.members[at].writes_out);
        // One larger than all buffers starts with all but the one that is being filled, and waits for them in turns.
        free >= buffers.min(usize::from(self.options.write_depth))
    }

    /// Copy a record into chunks.
    fn append(&mut self, header: &Header, parts: &[&[u8]], tag: u64, located: Located) -> WriteStart {
        let ticket = self.number();
        self.pending.insert(ticket, Pending { tag, located, chunks_left: 0, copied: false, failed: false });
        self.pending_tags.insert(tag);
        let mut head = [0; super::record::HEADER_BYTES_MAX];
        let last = header.encode(&mut head);
        let geometry = self.members[usize::from(located.member)].geometry();
        let padding = located.blocks as usize * geometry.block_bytes - header.record_bytes() as usize;
        let zeros = [0u8; 4096];
        let whole = self.copy(ticket, located, 0, &head[..header_bytes(parts.len())]).and_then(|mut position| {
            for part in parts {
                position = self.copy(ticket, located, position, part)?;
            }
            let end = position + padding;
            while position < end {
                position = self.copy(ticket, located, position, &zeros[..zeros.len().min(end - position)])?;
            }
            Some(())
        });
        if let Some(pending) = self.pending.get_mut(&ticket) {
            pending.copied = true;
            pending.failed |= whole.is_none();
        }
        if let Some(filling) = &mut self.members[usize::from(located.member)].filling
            && whole.is_some()
        {
            filling.end += located.blocks;
            filling.last = last;
            filling.entries.push(Entry { tag, start: located.start, blocks: located.blocks });
        }
        self.finish_if_done(ticket);
        if whole.is_some() { WriteStart::Queued(ticket) } else { WriteStart::Off }
    }

    /// Copy `bytes` of a record to `position` of it. `None`: the directory went off meanwhile.
    fn copy(&mut self, ticket: Ticket, located: Located, mut position: usize, mut bytes: &[u8]) -> Option<usize> {
        let at = usize::from(located.member);
        while !bytes.is_empty() {
            if self.members[at].filling.as_ref()?.chunk.is_none() {
                let buffer = self.write_buffer(located.member)?;
                let offset = self.members[at].geometry().offset(located.zone, located.start) + position as u64;
                let chunk = Chunk { buffer, offset, filled: 0, records: Vec::new() };
                self.members[at].filling.as_mut()?.chunk = Some(chunk);
            }
            let chunk = self.members[at].filling.as_mut()?.chunk.as_mut()?;
            if chunk.records.last() != Some(&ticket) {
                chunk.records.push(ticket);
                self.pending.get_mut(&ticket)?.chunks_left += 1;
            }
            let (now, later) = bytes.split_at(bytes.len().min(self.options.chunk_bytes - chunk.filled));
            chunk.buffer[chunk.filled..chunk.filled + now.len()].copy_from_slice(now);
            chunk.filled += now.len();
            position += now.len();
            bytes = later;
            if chunk.filled == self.options.chunk_bytes {
                self.send_chunk(located.member);
            }
        }
        Some(position)
    }

    /// A buffer for writing; waits for one while the directory works.
    fn write_buffer(&mut self, member: u16) -> Option<super::Buffer> {
        let at = usize::from(member);
        while self.members[at].writes_out >= self.options.write_buffers() {
            if self.members[at].writes_off {
                return None;
            }
            self.pump(Duration::from_millis(100));
        }
        let buffer = self.queue.buffers().take()?;
        self.members[at].writes_out += 1;
        Some(buffer)
    }

    /// Start the write of what was collected. Whole records only, but for the one that is being copied.
    fn send_chunk(&mut self, member: u16) {
        let number = self.number();
        let at = usize::from(member);
        let Some(filling) = &mut self.members[at].filling else { return };
        let Some(chunk) = filling.chunk.take() else { return };
        let zone = filling.zone;
        self.members[at].zones[zone as usize].writes += 1;
        self.chunks.insert(number, ChunkSent { member, zone, records: chunk.records });
        let extent = super::queue::Extent { file: self.members[at].file, offset: chunk.offset, bytes: chunk.filled };
        self.queue.start(Purpose::Chunk { number }, Direction::Write, extent, chunk.buffer);
        self.turn = at + 1;
    }

    /// Take the next zone for filling, emptying it first.
    fn open_zone(&mut self, member: u16) -> bool {
        let at = usize::from(member);
        let Some(zone) = self.members[at].next_zone() else { return false };
        self.empty(member, zone);
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.members[at].zones[zone as usize].sequence = sequence;
        self.members[at].filling = Some(Filling { zone, end: 0, entries: Vec::new(), chunk: None, last: 0 });
        self.touch(member, zone);
        true
    }

    fn empty(&mut self, member: u16, zone: u32) {
        let emptied = &mut self.members[usize::from(member)].zones[zone as usize];
        if emptied.sequence == 0 {
            return;
        }
        emptied.sequence = 0;
        let tags = std::mem::take(&mut emptied.tags);
        let mut index = self.index.write();
        let here = |place: &Located| place.member == member && place.zone == zone;
        let evicted = tags.iter().filter(|tag| index.remove_if(**tag, here)).count();
        self.counters.records_evicted += evicted as u64;
        self.counters.zones_evicted += 1;
    }

    /// Finish the zone that is being filled with its summary. `false` while no buffer is free.
    fn seal(&mut self, member: u16) -> bool {
        let at = usize::from(member);
        self.send_chunk(member);
        if self.members[at].writes_out >= self.options.write_buffers() {
            return false;
        }
        let Some(filling) = self.members[at].filling.take() else { return false };
        self.members[at].zones[filling.zone as usize].tags = filling.entries.iter().map(|entry| entry.tag).collect();
        let geometry = self.members[at].geometry();
        let bytes = summary_bytes(filling.entries.len(), geometry.block_bytes);
        if bytes > self.options.chunk_bytes {
            // Filled with larger operations than today's; the next start reads it header by header.
            return true;
        }
        let Some(mut buffer) = self.queue.buffers().take() else { return true };
        self.members[at].summary(&filling).encode(&mut buffer[..bytes]);
        let start = geometry.zone_blocks() - geometry.blocks_of(bytes as u64) as u32;
        let extent = self.members[at].extent(filling.zone, start, bytes);
        self.members[at].zones[filling.zone as usize].writes += 1;
        self.members[at].writes_out += 1;
        let purpose = Purpose::Summary { member, zone: filling.zone };
        self.queue.start(purpose, Direction::Write, extent, buffer);
        true
    }

    /// Summary of the zone that is being filled, at a clean stop. Nothing is on its way.
    pub(super) fn seal_for_close(&mut self, member: u16) {
        let at = usize::from(member);
        let worthwhile = self.members[at].filling.as_ref().is_some_and(|filling| !filling.entries.is_empty());
        if worthwhile && !self.members[at].writes_off && !self.seal(member) {
            log::warn!("pegaflow: no summary for {}: its next start reads more", self.members[at].path.display());
        }
    }

    pub(super) fn chunk_ended(&mut self, number: u64, ended: Ended<Purpose>) {
        let Some(sent) = self.chunks.remove(&number) else { return };
        let bytes = ended.extent.bytes as u64;
        let failed = self.write_ended(sent.member, sent.zone, ended);
        if !failed {
            self.counters.bytes_written += bytes;
        }
        for ticket in sent.records {
            if let Some(pending) = self.pending.get_mut(&ticket) {
                pending.chunks_left -= 1;
                pending.failed |= failed;
            }
            self.finish_if_done(ticket);
        }
    }

    pub(super) fn summary_ended(&mut self, member: u16, zone: u32, ended: Ended<Purpose>) {
        self.write_ended(member, zone, ended);
    }

    /// Common to all writes. Whether it failed.
    fn write_ended(&mut self, member: u16, zone: u32, ended: Ended<Purpose>) -> bool {
        let entry = &mut self.members[usize::from(member)];
        if let Some(buffer) = ended.buffer {
            entry.writes_out -= 1;
            self.queue.buffers().give(buffer);
        }
        entry.zones[zone as usize].writes -= 1;
        if let Err(error) = &ended.result {
            self.turn_off(member, error.kind() == std::io::ErrorKind::TimedOut, error);
        }
        ended.result.is_err()
    }

    fn finish_if_done(&mut self, ticket: Ticket) {
        let Some(pending) = self.pending.get(&ticket).filter(|pending| pending.copied && pending.chunks_left == 0)
        else {
            return;
        };
        self.pending_tags.remove(&pending.tag);
        if pending.failed {
            self.counters.records_lost += 1;
            self.events.push(Event::Lost(ticket));
        } else {
            self.counters.records_written += 1;
            self.index.write().insert(pending.tag, pending.located);
            self.events.push(Event::Written(ticket));
        }
        self.pending.remove(&ticket);
    }
}
