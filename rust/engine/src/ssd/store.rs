//! The store: records written to and read from the files of several directories.
//!
//! One thread drives it: it starts reads and writes, which return at once, and polls for what has ended. Any thread
//! looks records up through [`Store::view`]. Nothing blocks but what says so. A store that is dropped without
//! [`Store::close`] is one whose process died: everything written is found again.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use super::counters::Counters;
use super::index::IndexView;
use super::member::{Filling, Member};
use super::options::StoreOptions;
use super::queue::{Ended, Queue};
use super::reader::{ReadOutcome, ReadState, ReadTarget};
use super::recover::Probed;
use super::writer::Pending;
use crate::error::{Error, Result};

/// Names a read or write until its event.
pub type Ticket = u64;

/// What has ended.
pub enum Event<T> {
    /// A record was written, and lookups find it.
    Written(Ticket),
    /// A record that was queued is not there: a write failed.
    Lost(Ticket),
    /// A read has ended; the target comes back.
    Read(Ticket, T, ReadOutcome),
}

/// What an operation of the queue is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    /// Waited for where it was started.
    Alone,
    /// The first header or the trailer of a zone that is being recovered.
    Probe { member: u16, zone: u32, trailer: bool },
    /// Bytes of a record, from `position` on.
    Piece { ticket: Ticket, position: usize },
    /// Bytes of several records that are read with one operation.
    Joined { number: u64 },
    /// Bytes of several records that are written.
    Chunk { number: u64 },
    /// Header of a record that is being checked.
    Look { number: usize },
    /// Summary of a zone.
    Summary { member: u16, zone: u32 },
}

/// Bytes of records that are on their way.
pub(super) struct ChunkSent {
    pub(super) member: u16,
    pub(super) zone: u32,
    pub(super) records: Vec<Ticket>,
}

/// A cache on SSD. `T` takes what is read.
pub struct Store<T: ReadTarget> {
    pub(super) options: StoreOptions,
    pub(super) queue: Queue<Purpose>,
    pub(super) members: Vec<Member>,
    pub(super) index: IndexView,
    /// Of each member: zones that recovery has not looked at.
    pub(super) unknown: Vec<VecDeque<u32>>,
    /// Zones whose ends are being read: member, zone.
    pub(super) probed: HashMap<(u16, u32), Probed>,
    /// Of each member: the zone to go on filling.
    pub(super) newest: Vec<Option<Filling>>,
    pub(super) reads: HashMap<Ticket, ReadState<T>>,
    pub(super) reading: HashMap<u64, Ticket>,
    /// Reads that are on their way together, each with its bytes.
    pub(super) joined: HashMap<u64, Vec<(Ticket, usize)>>,
    /// Reads of each member whose pieces are not all started.
    pub(super) waiting: Vec<VecDeque<Ticket>>,
    pub(super) pending: HashMap<Ticket, Pending>,
    pub(super) pending_tags: HashSet<u64>,
    pub(super) chunks: HashMap<u64, ChunkSent>,
    pub(super) counters: Counters,
    pub(super) events: Vec<Event<T>>,
    /// Tickets, and numbers of chunks and of joined reads.
    pub(super) next: u64,
    /// The generation of the superblocks when this process had opened them: never that of another.
    pub(super) session: u64,
    /// Of the next zone that is filled; above all that any earlier process used.
    pub(super) next_sequence: u64,
    /// Raised whenever a zone is touched.
    pub(super) clock: u64,
    /// Member that takes the next zone's worth of records.
    pub(super) turn: usize,
}

impl<T: ReadTarget> Store<T> {
    /// For lookups from any thread.
    pub fn view(&self) -> IndexView {
        self.index.clone()
    }

    /// Which files these are: what was forgotten in others was not in them.
    pub(crate) fn identity(&self) -> u64 {
        let open = self.members.iter().filter(|member| !member.reads_off);
        let ids: Vec<u8> = open.flat_map(|member| member.superblock.cache_id.to_le_bytes()).collect();
        xxhash_rust::xxh3::xxh3_64(&ids)
    }

    /// What was done so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Reads, writes and their operations that have not ended.
    pub fn is_busy(&self) -> bool {
        !self.reads.is_empty() || !self.chunks.is_empty() || self.queue.in_flight() > 0
    }

    /// Whether no directory takes reads any more.
    pub fn is_off(&self) -> bool {
        self.members.iter().all(|member| member.reads_off)
    }

    /// Whether no directory takes writes any more.
    pub fn is_read_only(&self) -> bool {
        self.members.iter().all(|member| member.writes_off)
    }

    /// A child of the process that opened it shares its locks and its ring, and must use neither.
    pub(super) fn is_forked(&self) -> bool {
        self.members.iter().find_map(|member| member.lock.as_ref()).is_some_and(|lock| lock.forked())
    }

    /// What has ended since; waits up to `wait` for the first of it while anything is on its way.
    pub fn poll(&mut self, wait: Duration) -> Vec<Event<T>> {
        if self.is_forked() {
            return Vec::new();
        }
        let wait = if self.events.is_empty() { wait } else { Duration::ZERO };
        self.pump(wait);
        std::mem::take(&mut self.events)
    }

    /// Take in what the queue has ended, and start what had to wait.
    pub(super) fn pump(&mut self, wait: Duration) {
        for ended in self.queue.poll(wait) {
            self.settle(ended);
        }
        self.start_pieces();
    }

    pub(super) fn settle(&mut self, ended: Ended<Purpose>) {
        match ended.purpose {
            Purpose::Piece { ticket, position } => self.piece_ended(ticket, position, ended),
            Purpose::Joined { number } => self.joined_ended(number, ended),
            Purpose::Chunk { number } => self.chunk_ended(number, ended),
            Purpose::Summary { member, zone } => self.summary_ended(member, zone, ended),
            Purpose::Probe { member, zone, trailer } => self.probe_ended(member, zone, trailer, ended),
            Purpose::Alone | Purpose::Look { .. } => {
                if let Some(buffer) = ended.buffer {
                    self.queue.buffers().give(buffer);
                }
            }
        }
    }

    /// The directory writes no more, and reads no more if `altogether`; said once.
    pub(super) fn turn_off(&mut self, member: u16, altogether: bool, why: &std::io::Error) {
        let member = &mut self.members[usize::from(member)];
        member.hung |= why.kind() == std::io::ErrorKind::TimedOut;
        if member.writes_off && (member.reads_off || !altogether) {
            return;
        }
        member.writes_off = true;
        member.reads_off |= altogether;
        self.counters.turned_off += 1;
        let what = if altogether { "is off" } else { "takes no more writes" };
        log::warn!("pegaflow: the SSD cache {} {what}, serving goes on without it: {why}", member.path.display());
    }

    /// Forget all records of a namespace, for good: when this returns, no crash brings them back. Blocks on the disks,
    /// each of which is given up like in any operation. Directories that could not be read at the start or have hung
    /// are left out, and those that are read no more may fail, as long as one takes it: what they have is forgotten
    /// wherever they are opened with that one.
    pub fn forget(&mut self, fingerprint: &super::Fingerprint) -> Result<()> {
        self.index.write().epochs.raise(fingerprint);
        let known: Vec<u16> = (0..self.members.len() as u16).filter(|at| !self.member(*at).zones.is_empty()).collect();
        let (mut written, mut failed, mut needed) = (0, None, None);
        for (at, result) in self.write_superblocks(&known) {
            match result {
                Ok(()) => written += 1,
                // Without this one nothing is forgotten that it has.
                Err(error) if !self.member(at).reads_off => needed = Some(error),
                Err(error) => failed = Some(error),
            }
        }
        needed.or(failed.filter(|_| written == 0)).map_or(Ok(()), Err)
    }

    /// Write what was queued, summaries of the zones being filled included. Blocks until it is on disk, or failed.
    pub fn close(mut self) -> Result<()> {
        self.waiting.iter_mut().for_each(VecDeque::clear);
        self.flush();
        self.settle_writes();
        for member in 0..self.members.len() as u16 {
            self.seal_for_close(member);
        }
        self.settle_writes();
        let written: Vec<u16> = (0..self.members.len() as u16).filter(|at| !self.member(*at).writes_off).collect();
        for (at, result) in self.sync(&written) {
            result.map_err(|error| {
                let text = format!("cannot write the end of {}: {error}", self.member(at).path.display());
                Error::new(crate::ErrorKind::Device, text)
            })?;
        }
        Ok(())
    }

    /// Until no write is on its way; bounded, since an operation without an answer is given up.
    fn settle_writes(&mut self) {
        while !self.chunks.is_empty() || self.members.iter().flat_map(|member| &member.zones).any(|z| z.writes > 0) {
            self.pump(Duration::from_millis(100));
        }
    }

    pub(super) fn member(&self, at: u16) -> &Member {
        &self.members[usize::from(at)]
    }

    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn touch(&mut self, member: u16, zone: u32) {
        self.clock += 1;
        if let Some(zone) = self.members[usize::from(member)].zones.get_mut(zone as usize) {
            zone.touched = self.clock;
        }
    }
}
