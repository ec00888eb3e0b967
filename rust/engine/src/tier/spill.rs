//! Writing blocks to the files: from a bounded queue, as fast as the options allow and the store takes them.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use super::counters::Counter;
use super::options::TierOptions;
use super::resets::KnownNamespaces;
use super::scan::Scan;
use super::segment::Segment;
use super::slots::{SlotTarget, with_record};
use crate::key::BlockRef;
use crate::limits::{SSD_FLUSH_PAUSE, SSD_SPILL_QUEUE_MAX, SSD_SPILLS_PER_ROUND_MAX};
use crate::shm::core::Core;
use crate::shm::evict::name_of;
use crate::shm::namespace::Namespace;
use crate::ssd::{RecordId, Store, Ticket, WriteStart};

/// So many seconds' worth of writes may come at once.
const BURST_SECONDS: f64 = 0.1;

/// How a block that was to be written ended.
enum Spilled {
    /// It is over with it: bytes that were queued.
    Over(u64),
    /// It could not be written now, and may be chosen again.
    Not,
    /// The store takes no more now.
    Later,
}

/// A bucket of tokens, one per byte.
struct Tokens {
    bytes_per_second: u64,
    bytes: f64,
    at: Instant,
}

impl Tokens {
    fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second, bytes: 0.0, at: Instant::now() }
    }

    fn refill(&mut self) {
        let most = self.bytes_per_second as f64;
        self.bytes = (self.bytes + self.at.elapsed().as_secs_f64() * most).min(most * BURST_SECONDS);
        self.at = Instant::now();
    }

    /// A debt is paid before anything else is written.
    fn has_some(&self) -> bool {
        self.bytes_per_second == 0 || self.bytes > 0.0
    }

    fn take(&mut self, bytes: u64) {
        self.bytes -= bytes as f64;
    }
}

pub(crate) struct Spill {
    scan: Scan,
    queue: VecDeque<BlockRef>,
    tokens: Tokens,
    on_their_way: HashMap<Ticket, BlockRef>,
    /// Since when something may wait in a buffer.
    unflushed: Option<Instant>,
}

impl Spill {
    pub(crate) fn new(core: &Core, options: &TierOptions) -> Self {
        Self {
            scan: Scan::new(core, options.admission),
            queue: VecDeque::new(),
            tokens: Tokens::new(options.write_bytes_per_second_max),
            on_their_way: HashMap::new(),
            unflushed: None,
        }
    }

    /// Look for blocks, and write some. Whether there was anything to do.
    pub(crate) fn round(
        &mut self,
        core: &Core,
        segment: &Segment,
        known: &mut KnownNamespaces,
        store: &mut Store<SlotTarget>,
    ) -> bool {
        if store.is_read_only() {
            return false;
        }
        let Self { scan, queue, .. } = self;
        if queue.len() < SSD_SPILL_QUEUE_MAX {
            scan.round(core, segment, |block| {
                queue.push_back(block);
                queue.len() < SSD_SPILL_QUEUE_MAX
            });
        }
        self.tokens.refill();
        let mut spills = 0;
        while spills < SSD_SPILLS_PER_ROUND_MAX && self.tokens.has_some() {
            let Some(block) = self.queue.front().copied() else { break };
            match self.spill(core, segment, known, store, block) {
                Spilled::Over(bytes) => self.tokens.take(bytes),
                Spilled::Not => self.scan.unchoose(block),
                Spilled::Later => break,
            }
            self.queue.pop_front();
            spills += 1;
        }
        if self.unflushed.is_some_and(|since| since.elapsed() > SSD_FLUSH_PAUSE) {
            store.flush();
            self.unflushed = None;
        }
        spills > 0
    }

    fn spill(
        &mut self,
        core: &Core,
        segment: &Segment,
        known: &mut KnownNamespaces,
        store: &mut Store<SlotTarget>,
        block: BlockRef,
    ) -> Spilled {
        if !core.pin(block) {
            return Spilled::Not;
        }
        crate::crash_point::pass("ssd.leased");
        let spilled = self.write(core, segment, known, store, block);
        if let Err(error) = core.unpin(block) {
            log::error!("pegaflow: {error}");
        }
        spilled
    }

    /// Write a block that is leased.
    fn write(
        &mut self,
        core: &Core,
        segment: &Segment,
        known: &mut KnownNamespaces,
        store: &mut Store<SlotTarget>,
        block: BlockRef,
    ) -> Spilled {
        let name = core.control.slot(block.slot()).and_then(name_of);
        let Some((identity, key)) = name else { return Spilled::Not };
        let ns = Namespace(identity.id);
        let Some(known) = known.get(core, ns) else { return Spilled::Not };
        let served = segment.served(core, ns, &known.origin);
        if served.is_none_or(|served| served.identity != identity) {
            // Reset meanwhile, or about to be.
            return Spilled::Not;
        }
        let id = RecordId { fingerprint: known.fingerprint, group: known.origin.group, key };
        if store.view().contains(&id) {
            return Spilled::Over(0);
        }
        let bytes = known.block_bytes;
        match with_record(core, block, id, known.part_bytes.len() as u32, |record| store.write(record)) {
            Some(WriteStart::Queued(ticket)) => {
                self.on_their_way.insert(ticket, block);
                self.unflushed.get_or_insert_with(Instant::now);
                Spilled::Over(bytes)
            }
            Some(WriteStart::Busy) => {
                store.flush();
                Spilled::Later
            }
            Some(WriteStart::Present | WriteStart::Unfit | WriteStart::Damaged) => Spilled::Over(0),
            Some(WriteStart::Off) | None => Spilled::Not,
        }
    }

    /// A write has ended, well or not.
    pub(crate) fn written(&mut self, segment: &Segment, ticket: Ticket, well: bool) {
        let Some(block) = self.on_their_way.remove(&ticket) else { return };
        segment.header().add(if well { Counter::SpilledBlocks } else { Counter::SpillLost }, 1);
        if !well {
            self.scan.unchoose(block);
        }
    }
}
