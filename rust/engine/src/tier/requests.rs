//! The leader's side of requests: blocks are read once however many ask for them, published in the order of their
//! chain, and held until their askers have taken leases of their own.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::board::{Asking, Step, Taken, Wish};
use super::counters::Counter;
use super::resets::{Known, KnownNamespaces, Served};
use super::segment::Segment;
use super::slots::SlotTarget;
use crate::key::{BlockRef, Key};
use crate::limits::{SSD_HELD_BYTES_MAX, SSD_HELD_MAX, SSD_READS_MAX, SSD_SLOT_PAUSE, SSD_SLOT_WAIT_MAX};
use crate::shm::core::Core;
use crate::shm::namespace::Namespace;
use crate::shm::process::Member;
use crate::shm::rows::load4;
use crate::ssd::{ReadOutcome, ReadStart, RecordId, Store, Ticket};
use crate::sync::{Acquire, SeqCst};

/// How often the board is looked at although nobody said that he asked: for entries of the dead.
const LOOK_PAUSE: Duration = Duration::from_millis(100);

/// A block that is being read, or that was and waits for its turn to be published.
struct Job {
    block: BlockRef,
    ticket: Ticket,
    loaded: bool,
    /// Requests that wait for it.
    wanted: usize,
    bytes: u64,
}

/// One request that is not over.
struct Request {
    asking: Asking,
    wish: Wish,
    /// Row of the instance on whose account its blocks are.
    account: u32,
    known: Known,
    since: Instant,
    /// Since when no slot was to be had for it.
    without_slot: Option<Instant>,
    /// Keys before this are held or left out.
    cursor: usize,
    /// Keys before this were looked at, and are in memory or being read, or were not to be had.
    looked: usize,
    held: Vec<BlockRef>,
    /// Keys for which it has taken room, in order: those it holds, then those it is about to.
    claimed: Vec<Key>,
    /// Jobs it waits for.
    attached: Vec<(Key, Ticket)>,
    /// Nothing more will be found.
    answered: bool,
}

/// How a look at one key ended.
enum Look {
    Next,
    /// Try again in another round.
    Wait,
    /// The key is nowhere.
    Absent,
}

/// All requests that the leader is at.
pub(crate) struct Requests {
    open: VecDeque<Request>,
    jobs: HashMap<(Namespace, Key), Job>,
    tickets: HashMap<Ticket, (Namespace, Key)>,
    /// Blocks that are being read, held or about to be, each with how often.
    claims: HashMap<(Namespace, Key), usize>,
    /// Their bytes.
    held_bytes: u64,
    held_bytes_max: u64,
    /// Until when no slot is looked for, by namespace and account: looking again at once finds no more, and costs all
    /// others.
    no_slot_until: HashMap<(Namespace, u32), Instant>,
    asked: u64,
    /// What a dead leader had taken is taken again.
    again: bool,
    looked_at: Instant,
}

/// What the leader works with.
struct Tools<'a> {
    core: &'a Arc<Core>,
    segment: &'a Segment,
    store: &'a mut Store<SlotTarget>,
}

impl Requests {
    pub(crate) fn new(core: &Core) -> Self {
        let held_bytes_max = (core.control.geometry().pool_bytes / 4).min(SSD_HELD_BYTES_MAX);
        Self {
            open: VecDeque::new(),
            jobs: HashMap::new(),
            tickets: HashMap::new(),
            claims: HashMap::new(),
            held_bytes: 0,
            held_bytes_max,
            no_slot_until: HashMap::new(),
            asked: 0,
            again: true,
            looked_at: Instant::now(),
        }
    }

    /// Blocks that are being read.
    pub(crate) fn reads(&self) -> usize {
        self.tickets.len()
    }

    /// Bytes that were asked for and are not in memory yet, as far as is known.
    pub(crate) fn queued_bytes(&self) -> u64 {
        let jobs = self.jobs.values().filter(|job| !job.loaded).map(|job| job.bytes);
        let open =
            self.open.iter().filter(|request| !request.answered).map(|request| {
                request.wish.keys.len().saturating_sub(request.looked) as u64 * request.known.block_bytes
            });
        jobs.chain(open).sum()
    }

    /// Take what is new on the board, and go on with what is open. Whether there was anything to do.
    pub(crate) fn round(
        &mut self,
        core: &Arc<Core>,
        segment: &Segment,
        known: &mut KnownNamespaces,
        store: &mut Store<SlotTarget>,
    ) -> bool {
        let mut busy = self.take_new(core, segment, known);
        let mut tools = Tools { core, segment, store };
        self.no_slot_until.retain(|_, until| Instant::now() < *until);
        // One at a time, so that a defect loses no more than one.
        for _ in 0..self.open.len() {
            let Some(mut request) = self.open.pop_front() else { break };
            let before = (request.cursor, request.looked, request.answered);
            let stays = self.step(&mut request, &mut tools);
            busy |= !stays || before != (request.cursor, request.looked, request.answered);
            if stays {
                self.open.push_back(request);
            }
        }
        busy
    }

    fn take_new(&mut self, core: &Core, segment: &Segment, known: &mut KnownNamespaces) -> bool {
        let asked = segment.header().asked.load(Acquire);
        if self.looked_at.elapsed() >= LOOK_PAUSE {
            self.looked_at = Instant::now();
            segment.free_entries_of_dead(core);
        } else if asked == self.asked && !self.again {
            return false;
        }
        self.asked = asked;
        let taken = segment.take_asked(std::mem::take(&mut self.again));
        let busy = !taken.is_empty();
        for Taken { asking, owner, wish } in taken {
            segment.header().add(Counter::Requests, 1);
            let Some(known) = known.get(core, wish.namespace).cloned() else {
                segment.answer(asking, 0);
                continue;
            };
            let mut wish = wish;
            // One request alone may not take all that may be held.
            let keys_max = (self.held_bytes_max / 2 / known.block_bytes.max(1)).max(1);
            wish.keys.truncate(usize::try_from(keys_max).unwrap_or(usize::MAX));
            let (held, claimed, attached) = (Vec::new(), Vec::new(), Vec::new());
            let account = Member::decode(owner).filter(|_| !core.is_dead(owner)).unwrap_or(core.me).row;
            let (since, without_slot, cursor, looked, answered) = (Instant::now(), None, 0, 0, false);
            self.open.push_back(Request {
                asking,
                wish,
                account,
                known,
                since,
                without_slot,
                cursor,
                looked,
                held,
                claimed,
                attached,
                answered,
            });
        }
        busy
    }

    /// Go on with one request. `false`: it is over.
    fn step(&mut self, request: &mut Request, tools: &mut Tools<'_>) -> bool {
        let step = tools.segment.step_of(request.asking);
        let late = request.since.elapsed() > SSD_HELD_MAX;
        if request.answered {
            let stays = step == Some(Step::Answered) && !late;
            if !stays {
                self.let_go(request, tools);
            }
            return stays;
        }
        if step != Some(Step::Taken) {
            // Nobody waits for it: what is on its way still comes into memory, in order.
            request.wish.keys.truncate(request.looked);
            self.cancel_last(request, tools);
        }
        let served = tools.segment.served(tools.core, request.wish.namespace, &request.known.origin);
        let Some(served) = served.filter(|_| !late) else {
            return self.answer(request, tools);
        };
        let waits = self.look_ahead(request, &served, tools);
        self.advance(request, &served, tools);
        let no_slot = request.without_slot.is_some_and(|since| since.elapsed() > SSD_SLOT_WAIT_MAX);
        let starved = waits && request.attached.is_empty() && !request.held.is_empty();
        let starved = starved && (no_slot || !self.has_room(request));
        if request.cursor >= request.wish.keys.len() || starved {
            return self.answer(request, tools);
        }
        true
    }

    /// Nobody waits for a request: it ends before the last of its reads that have not begun.
    fn cancel_last(&mut self, request: &mut Request, tools: &mut Tools<'_>) {
        while let Some((key, ticket)) = request.attached.last().copied() {
            let name = (request.wish.namespace, key);
            if let Some(job) = self.jobs.get_mut(&name).filter(|job| job.ticket == ticket) {
                if job.wanted > 1 {
                    job.wanted -= 1;
                } else if !self.cancel(&name, ticket, tools) {
                    return;
                }
            }
            request.attached.pop();
            if let Some(place) = request.wish.keys.iter().rposition(|wished| *wished == key) {
                request.wish.keys.truncate(place.max(request.cursor));
            }
        }
    }

    /// End a job that nobody waits for. `false`: its read has begun, and its block stays useful.
    fn cancel(&mut self, name: &(Namespace, Key), ticket: Ticket, tools: &mut Tools<'_>) -> bool {
        if !tools.store.cancel(ticket) {
            return false;
        }
        self.tickets.remove(&ticket);
        if let Some(job) = self.remove_job(name) {
            tools.core.abort(&[job.block]);
        }
        true
    }

    /// `true`: it stays until its blocks are leased by who asked.
    fn answer(&mut self, request: &mut Request, tools: &mut Tools<'_>) -> bool {
        let waited = request.since.elapsed().as_millis() as u64;
        tools.segment.header().raise(Counter::ReadWaitMsMax, waited);
        request.answered = true;
        // The rest was not found.
        self.give_room_back(request, request.held.len());
        let wanted = tools.segment.answer(request.asking, request.held.len());
        if !wanted {
            self.let_go(request, tools);
        }
        wanted
    }

    /// Whether there is room for the next block of a request.
    fn has_room(&self, request: &Request) -> bool {
        let next = request.wish.keys.get(request.looked).map(|key| (request.wish.namespace, *key));
        next.is_some_and(|name| self.claims.contains_key(&name))
            || self.held_bytes == 0
            || self.held_bytes + request.known.block_bytes <= self.held_bytes_max
    }

    fn claim(&mut self, name: (Namespace, Key), bytes: u64) {
        let claims = self.claims.entry(name).or_default();
        *claims += 1;
        if *claims == 1 {
            self.held_bytes += bytes;
        }
    }

    fn unclaim(&mut self, name: &(Namespace, Key), bytes: u64) {
        let Some(claims) = self.claims.get_mut(name) else { return };
        *claims -= 1;
        if *claims == 0 {
            self.claims.remove(name);
            self.held_bytes = self.held_bytes.saturating_sub(bytes);
        }
    }

    /// Give back what a request has beyond `left` blocks.
    fn give_room_back(&mut self, request: &mut Request, left: usize) {
        for key in request.claimed.drain(left.min(request.claimed.len())..) {
            self.unclaim(&(request.wish.namespace, key), request.known.block_bytes);
        }
    }

    /// Start reads of keys that are not in memory. Whether some key has to wait for room.
    fn look_ahead(&mut self, request: &mut Request, served: &Served, tools: &mut Tools<'_>) -> bool {
        while let Some(key) = request.wish.keys.get(request.looked).copied() {
            match self.look(request, &key, served, tools) {
                Look::Next => {
                    request.looked += 1;
                    request.claimed.push(key);
                    self.claim((request.wish.namespace, key), request.known.block_bytes);
                }
                Look::Wait => return true,
                // A chain ends at its first gap.
                Look::Absent if request.wish.chained => request.wish.keys.truncate(request.looked),
                Look::Absent => request.looked += 1,
            }
        }
        false
    }

    fn look(&mut self, request: &mut Request, key: &Key, served: &Served, tools: &mut Tools<'_>) -> Look {
        // Before anything is held for it: what it waits for in turn could be what fills all room.
        if !self.has_room(request) {
            return Look::Wait;
        }
        if let Some(job) = self.jobs.get_mut(&(request.wish.namespace, *key)) {
            job.wanted += 1;
            request.attached.push((*key, job.ticket));
            tools.segment.header().add(Counter::ReadJoined, 1);
            return Look::Next;
        }
        if tools.core.find(&served.identity, key).is_some() {
            return Look::Next;
        }
        let (fingerprint, group) = (request.known.fingerprint, request.known.origin.group);
        let id = RecordId { fingerprint, group, key: *key };
        if !tools.store.view().contains(&id) {
            return Look::Absent;
        }
        let customer = (request.wish.namespace, request.account);
        if self.no_slot_until.contains_key(&customer) {
            request.without_slot.get_or_insert_with(Instant::now);
            return Look::Wait;
        }
        if self.tickets.len() >= SSD_READS_MAX {
            return Look::Wait;
        }
        let before = request.looked.checked_sub(1).and_then(|before| request.wish.keys.get(before).copied());
        let parent = if request.wish.chained { before.or(request.wish.parent) } else { None };
        let reserved = tools.core.reserve_for(request.account, customer.0, &[*key], Some(&[parent]), true);
        let Ok(Some((_, block))) = reserved.map(|reserved| reserved.first().copied()) else {
            request.without_slot.get_or_insert_with(Instant::now);
            self.no_slot_until.insert(customer, Instant::now() + SSD_SLOT_PAUSE);
            return Look::Wait;
        };
        request.without_slot = None;
        if !is_of(tools.core, block, served) {
            // Reset meanwhile: the files have not forgotten yet.
            tools.core.abort(&[block]);
            return Look::Wait;
        }
        self.read(request, id, block, tools)
    }

    fn read(&mut self, request: &mut Request, id: RecordId, block: BlockRef, tools: &mut Tools<'_>) -> Look {
        let target = SlotTarget { core: Arc::clone(tools.core), block };
        let look = match tools.store.read(&id, &request.known.part_bytes, target) {
            ReadStart::Started(ticket) => {
                let bytes = request.known.block_bytes;
                let name = (request.wish.namespace, id.key);
                self.jobs.insert(name, Job { block, ticket, loaded: false, wanted: 1, bytes });
                self.tickets.insert(ticket, name);
                self.claim(name, bytes);
                request.attached.push((id.key, ticket));
                crate::crash_point::pass("ssd.reading");
                return Look::Next;
            }
            ReadStart::Busy(_) | ReadStart::Already(..) => Look::Wait,
            ReadStart::Miss(_) => {
                // Of a directory that is off, or with other sizes: no more hints of it.
                tools.segment.unhint(id.tag(tools.store.view().epoch(&id.fingerprint)));
                tools.segment.header().add(Counter::ReadMissed, 1);
                Look::Absent
            }
        };
        tools.core.abort(&[block]);
        look
    }

    /// Hold what is in memory, in order, publishing what was read when its turn comes.
    fn advance(&mut self, request: &mut Request, served: &Served, tools: &mut Tools<'_>) {
        while request.cursor < request.looked.min(request.wish.keys.len()) {
            let key = request.wish.keys[request.cursor];
            let name = (request.wish.namespace, key);
            match self.jobs.get(&name) {
                Some(job) if !job.loaded => return,
                Some(_) => self.publish(name, tools.core, tools.segment),
                None => {}
            }
            let found = tools.core.find(&served.identity, &key).filter(|block| tools.core.pin(*block));
            match found {
                Some(block) => {
                    request.held.push(block);
                    tools.segment.note_found(request.asking, request.held.len());
                }
                // Evicted again, or not right on disk.
                None if request.wish.chained => return request.wish.keys.truncate(request.cursor),
                None => {
                    let place = request.held.len();
                    if request.claimed.get(place) == Some(&key) {
                        request.claimed.remove(place);
                        self.unclaim(&name, request.known.block_bytes);
                    }
                }
            }
            request.cursor += 1;
            request.attached.retain(|(attached, _)| *attached != key);
        }
    }

    /// Publish a block that was read.
    fn publish(&mut self, name: (Namespace, Key), core: &Core, segment: &Segment) {
        let Some(job) = self.remove_job(&name) else { return };
        crate::crash_point::pass("ssd.loaded");
        if core.publish(&[job.block]) == 0 {
            segment.header().add(Counter::ReadDropped, 1);
        }
    }

    fn remove_job(&mut self, name: &(Namespace, Key)) -> Option<Job> {
        let job = self.jobs.remove(name)?;
        self.unclaim(name, job.bytes);
        Some(job)
    }

    /// A read has ended.
    pub(crate) fn read_ended(&mut self, core: &Core, segment: &Segment, ticket: Ticket, outcome: ReadOutcome) {
        let Some(name) = self.tickets.remove(&ticket) else { return };
        let Some(job) = self.jobs.get_mut(&name) else { return };
        if outcome == ReadOutcome::Whole {
            job.loaded = true;
            if job.wanted == 0 {
                self.publish(name, core, segment);
            }
            return;
        }
        core.abort(&[job.block]);
        self.remove_job(&name);
    }

    /// Give up what a request holds. What nobody waits for any more is published as it comes, or not read at all if its
    /// read has not begun.
    fn let_go(&mut self, request: &mut Request, tools: &mut Tools<'_>) {
        self.unhold(request, tools.core);
        for (key, ticket) in request.attached.drain(..) {
            let name = (request.wish.namespace, key);
            let Some(job) = self.jobs.get_mut(&name).filter(|job| job.ticket == ticket) else { continue };
            job.wanted = job.wanted.saturating_sub(1);
            match (job.wanted, job.loaded) {
                (0, true) => self.publish(name, tools.core, tools.segment),
                (0, false) => _ = self.cancel(&name, ticket, tools),
                _ => {}
            }
        }
    }

    fn unhold(&mut self, request: &mut Request, core: &Core) {
        for block in request.held.drain(..) {
            if let Err(error) = core.unpin(block) {
                log::error!("pegaflow: {error}");
            }
        }
        self.give_room_back(request, 0);
    }

    /// No store is there any more: answer everything with what is held, give back what was reserved. What a successor
    /// has taken is its own.
    pub(crate) fn end_all(&mut self, core: &Core, segment: &Segment) {
        for job in std::mem::take(&mut self.jobs).into_values() {
            core.abort(&[job.block]);
        }
        self.tickets.clear();
        let leads = segment.header().leader.load(SeqCst) == core.me.encode();
        for mut request in std::mem::take(&mut self.open) {
            if leads {
                segment.answer(request.asking, request.held.len());
            }
            self.unhold(&mut request, core);
        }
    }
}

/// Whether a reserved block is of the epoch that is served.
fn is_of(core: &Core, block: BlockRef, served: &Served) -> bool {
    core.control.slot(block.slot()).is_some_and(|header| load4(&header.fingerprint) == served.identity.fingerprint)
}
