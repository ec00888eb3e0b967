//! Reading: pieces of a record arrive in any order, are taken in order, and count only if all of them were right.

use std::collections::BTreeMap;

use super::buffer::Buffer;
use super::index::Located;
use super::io::Direction;
use super::queue::Ended;
use super::record::{Header, RecordId, Spot, header_bytes};
use super::store::{Event, Purpose, Store, Ticket};
use crate::checksum::PartHasher;
use crate::limits::SSD_READS_MAX;

/// Bytes that are summed and copied while they are in the processor's cache.
const STEP_BYTES: usize = 32 << 10;

/// Where the bytes of a record go, such as a reserved slot.
pub trait ReadTarget: Send {
    /// Take `bytes` of part `part` from `offset` on. Called in order. They may be wrong: they count only once the read
    /// has ended with [`ReadOutcome::Whole`].
    fn put(&mut self, part: usize, offset: usize, bytes: &[u8]);

    /// All bytes of a part were put, and have this checksum, as they should.
    fn end_part(&mut self, part: usize, checksum: u64) {
        let _unused = (part, checksum);
    }
}

/// What became of a read that was to be started.
pub enum ReadStart<T> {
    /// An event tells of its end.
    Started(Ticket),
    /// The record is being read already, under this ticket; here is the target again.
    Already(Ticket, T),
    /// It is not there.
    Miss(T),
    /// Too many reads wait: poll, and try again.
    Busy(T),
}

/// How a read ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadOutcome {
    /// The target has the right bytes.
    Whole,
    /// A miss: its zone was emptied meanwhile.
    Evicted,
    /// A miss: header or bytes are not right; the record is no longer found.
    Damaged,
    /// A miss: the disk failed or did not answer in time.
    Failed,
}

/// A read on its way.
pub(super) struct ReadState<T> {
    tag: u64,
    id: RecordId,
    sizes: Vec<u64>,
    epoch: u64,
    located: Located,
    spot: Spot,
    target: T,
    /// Bytes of the record, and how many of them were asked for and taken.
    bytes: usize,
    asked: usize,
    taken: usize,
    arrived: BTreeMap<usize, (Buffer, usize)>,
    payload: Option<Payload>,
}

impl<T> ReadState<T> {
    fn is_whole(&self) -> bool {
        self.payload.as_ref().is_some_and(Payload::is_whole)
    }
}

/// Behind the header: where in the parts, and the sum so far.
struct Payload {
    header: Header,
    part: usize,
    offset: usize,
    hasher: PartHasher,
}

impl Payload {
    /// Take the next bytes. `false` if a part was not right.
    fn take<T: ReadTarget>(&mut self, mut bytes: &[u8], target: &mut T) -> bool {
        while let Some(part) = self.header.parts.get(self.part) {
            let left = part.bytes as usize - self.offset;
            let (now, later) = bytes.split_at(bytes.len().min(left));
            for step in now.chunks(STEP_BYTES) {
                self.hasher.update(step);
                target.put(self.part, self.offset, step);
                self.offset += step.len();
            }
            bytes = later;
            if self.offset < part.bytes as usize {
                return true;
            }
            if self.hasher.finish() != part.checksum {
                return false;
            }
            target.end_part(self.part, part.checksum);
            self.part += 1;
            self.offset = 0;
            self.hasher = PartHasher::new(self.part as u32);
        }
        true
    }

    fn is_whole(&self) -> bool {
        self.part == self.header.parts.len()
    }
}

impl<T: ReadTarget> Store<T> {
    /// Read a record whose parts have `parts` bytes into `target`.
    pub fn read(&mut self, id: &RecordId, parts: &[u64], target: T) -> ReadStart<T> {
        let index = self.index.read();
        let epoch = index.epochs.of(&id.fingerprint);
        let tag = id.tag(epoch);
        let Some(located) = index.place(tag) else { return ReadStart::Miss(target) };
        drop(index);
        let member = &self.members[usize::from(located.member)];
        if member.reads_off || self.is_forked() {
            return ReadStart::Miss(target);
        }
        if let Some(ticket) = self.reading.get(&tag) {
            return ReadStart::Already(*ticket, target);
        }
        let waiting = self.reads.len();
        if waiting >= SSD_READS_MAX {
            return ReadStart::Busy(target);
        }
        let geometry = member.geometry();
        let bytes = located.blocks as usize * geometry.block_bytes;
        let head = header_bytes(parts.len()) as u64;
        let expected = parts.iter().fold(head, |sum, part| sum.saturating_add(*part));
        if geometry.blocks_of(expected) != u64::from(located.blocks) {
            self.counters.reads_damaged += 1;
            self.index.write().remove(tag, &located);
            return ReadStart::Miss(target);
        }
        let spot = member.spot(located.zone, located.start);
        let ticket = self.number();
        let (asked, taken, arrived, payload) = (0, 0, BTreeMap::new(), None);
        let (id, sizes) = (*id, parts.to_vec());
        let state = ReadState { tag, id, sizes, epoch, located, spot, target, bytes, asked, taken, arrived, payload };
        self.reads.insert(ticket, state);
        self.reading.insert(tag, ticket);
        self.waiting[usize::from(located.member)].push_back(ticket);
        self.touch(located.member, located.zone);
        self.start_pieces();
        ReadStart::Started(ticket)
    }

    /// Nobody wants this read any more. It is over, without an event, if nothing of it was asked for; else it goes on,
    /// and `false` says so.
    pub fn cancel(&mut self, ticket: Ticket) -> bool {
        let Some(read) = self.reads.get(&ticket).filter(|read| read.asked == 0) else { return false };
        let waiting = &mut self.waiting[usize::from(read.located.member)];
        // What came last is given up first.
        if let Some(place) = waiting.iter().rposition(|waits| *waits == ticket) {
            waiting.remove(place);
        }
        self.reading.remove(&read.tag);
        self.reads.remove(&ticket);
        true
    }

    /// Ask for as many pieces as there are buffers.
    pub(super) fn start_pieces(&mut self) {
        for at in 0..self.members.len() {
            if self.members[at].reads_off {
                for ticket in std::mem::take(&mut self.waiting[at]) {
                    self.end_read(ticket, ReadOutcome::Failed);
                }
            }
            while self.members[at].reads_out < self.options.read_depth {
                let Some(&ticket) = self.waiting[at].front() else { break };
                let joined = self.joined(at);
                let Some(read) = self.reads.get_mut(&ticket).filter(|read| read.asked < read.bytes) else {
                    self.waiting[at].pop_front();
                    continue;
                };
                let Some(buffer) = self.queue.buffers().take() else { return };
                let position = read.asked;
                let mut extent = self.members[at].extent(read.located.zone, read.located.start, 0);
                let purpose = if joined.len() > 1 {
                    let number = self.number();
                    extent.bytes = joined.iter().map(|(_, bytes)| bytes).sum();
                    self.start_joined(at, number, joined);
                    Purpose::Joined { number }
                } else {
                    extent.bytes = (read.bytes - position).min(self.options.chunk_bytes);
                    extent.offset += position as u64;
                    read.asked += extent.bytes;
                    Purpose::Piece { ticket, position }
                };
                self.members[at].reads_out += 1;
                self.queue.start(purpose, Direction::Read, extent, buffer);
            }
        }
    }

    /// Reads that are next, of whole records that lie one behind the other and fit into one operation.
    fn joined(&self, at: usize) -> Vec<(Ticket, usize)> {
        let (mut joined, mut bytes, mut end) = (Vec::new(), 0, None);
        for ticket in &self.waiting[at] {
            let Some(read) = self.reads.get(ticket) else { break };
            let place = (read.located.zone, read.located.start);
            bytes += read.bytes;
            if read.asked > 0 || bytes > self.options.chunk_bytes || end.is_some_and(|end| end != place) {
                break;
            }
            joined.push((*ticket, read.bytes));
            end = Some((place.0, place.1 + read.located.blocks));
        }
        joined
    }

    fn start_joined(&mut self, at: usize, number: u64, joined: Vec<(Ticket, usize)>) {
        self.waiting[at].drain(..joined.len());
        for (ticket, bytes) in &joined {
            if let Some(read) = self.reads.get_mut(ticket) {
                read.asked = *bytes;
            }
        }
        self.joined.insert(number, joined);
    }

    pub(super) fn joined_ended(&mut self, number: u64, ended: Ended<Purpose>) {
        let at = ended.extent.file as usize;
        let failure = self.note_ended(at, &ended.result);
        let mut position = 0;
        for (ticket, bytes) in self.joined.remove(&number).unwrap_or_default() {
            let mine = position..position + bytes;
            position = mine.end;
            let Some(read) = self.reads.get_mut(&ticket) else { continue };
            let whole = match (&ended.buffer, failure) {
                (Some(buffer), None) => take_piece(read, &buffer[mine]) && read.is_whole(),
                _ => false,
            };
            self.end_read(ticket, if whole { ReadOutcome::Whole } else { failure.unwrap_or(ReadOutcome::Damaged) });
        }
        if let Some(buffer) = ended.buffer {
            self.give_read_buffer(at, buffer);
        }
    }

    /// What the end of an operation says about its directory, and about the reads that it was for if it failed.
    fn note_ended(&mut self, at: usize, result: &std::io::Result<()>) -> Option<ReadOutcome> {
        self.note_read(at as u16, result);
        let error = result.as_ref().err()?;
        // A file that was cut short lost that record, and is not a failing disk.
        let cut = error.kind() == std::io::ErrorKind::UnexpectedEof;
        Some(if cut { ReadOutcome::Damaged } else { ReadOutcome::Failed })
    }

    pub(super) fn piece_ended(&mut self, ticket: Ticket, position: usize, ended: Ended<Purpose>) {
        // Files are numbered as members are.
        let at = ended.extent.file as usize;
        let failure = self.note_ended(at, &ended.result);
        let Some(buffer) = ended.buffer else {
            return self.end_read(ticket, ReadOutcome::Failed);
        };
        match (failure, self.reads.get_mut(&ticket)) {
            (None, Some(read)) => {
                read.arrived.insert(position, (buffer, ended.extent.bytes));
                self.take_pieces(ticket, at);
            }
            (failure, _) => {
                self.give_read_buffer(at, buffer);
                self.end_read(ticket, failure.unwrap_or(ReadOutcome::Failed));
            }
        }
    }

    /// Take all pieces that are next in order.
    fn take_pieces(&mut self, ticket: Ticket, at: usize) {
        while let Some(read) = self.reads.get_mut(&ticket) {
            let Some((buffer, bytes)) = read.arrived.remove(&read.taken) else { return };
            let right = take_piece(read, &buffer[..bytes]);
            read.taken += bytes;
            let ended = read.taken == read.bytes;
            let whole = right && read.is_whole();
            self.give_read_buffer(at, buffer);
            if !right || ended {
                self.end_read(ticket, if whole && ended { ReadOutcome::Whole } else { ReadOutcome::Damaged });
            }
        }
    }

    fn give_read_buffer(&mut self, at: usize, buffer: Buffer) {
        self.members[at].reads_out -= 1;
        self.queue.buffers().give(buffer);
    }

    fn end_read(&mut self, ticket: Ticket, outcome: ReadOutcome) {
        let Some(mut read) = self.reads.remove(&ticket) else { return };
        self.reading.remove(&read.tag);
        let at = usize::from(read.located.member);
        for (buffer, _) in std::mem::take(&mut read.arrived).into_values() {
            self.give_read_buffer(at, buffer);
        }
        let overwritten = self.members[at].zones[read.located.zone as usize].sequence != read.spot.sequence;
        let outcome = match outcome {
            ReadOutcome::Damaged if overwritten => ReadOutcome::Evicted,
            other => other,
        };
        match outcome {
            ReadOutcome::Whole => {
                self.counters.records_read += 1;
                self.counters.bytes_read += read.bytes as u64;
            }
            ReadOutcome::Evicted => self.counters.reads_evicted += 1,
            ReadOutcome::Damaged => self.counters.reads_damaged += 1,
            ReadOutcome::Failed => self.counters.reads_failed += 1,
        }
        if matches!(outcome, ReadOutcome::Damaged | ReadOutcome::Failed) {
            self.index.write().remove(read.tag, &read.located);
        }
        self.events.push(Event::Read(ticket, read.target, outcome));
    }
}

/// Take the next bytes of a record, its header first. `false` if they are not those that were asked for.
fn take_piece<T: ReadTarget>(read: &mut ReadState<T>, bytes: &[u8]) -> bool {
    if let Some(payload) = &mut read.payload {
        return payload.take(bytes, &mut read.target);
    }
    let Some(header) = Header::decode(bytes) else { return false };
    let asked_for = header.spot == read.spot && header.id == read.id && header.epoch == read.epoch;
    let skip = header_bytes(header.parts.len());
    let same_sizes = header.parts.iter().map(|part| part.bytes).eq(read.sizes.iter().copied());
    if !asked_for || !same_sizes || header.record_bytes() > read.bytes as u64 {
        return false;
    }
    let payload = Payload { header, part: 0, offset: 0, hasher: PartHasher::new(0) };
    read.payload.insert(payload).take(&bytes[skip..], &mut read.target)
}
