//! Fetching: keys are divided into pieces, each asked of one peer; what has come is published in the order of the keys.

mod piece;
mod plan;
mod slots;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use pegaflow_engine::{BlockRef, Key, Lent, Namespace};

pub(crate) use self::piece::{Attempt, OpenChannel, attempt};
use self::plan::{Offer, Piece, plan};
use crate::client::{Inner, Job, Lane, Peer, Up};
use crate::limits::CHUNK_BYTES_MAX;
use crate::proto;
use crate::sync::{AcqRel, Acquire, AtomicBool, AtomicUsize, Relaxed, Release, lock};

/// A question as it was asked.
pub(crate) struct Asked {
    pub(crate) namespace: Namespace,
    pub(crate) keys: Vec<Key>,
    pub(crate) chained: bool,
    pub(crate) name: proto::NamespaceName,
}

impl Asked {
    pub(crate) fn block_bytes(&self) -> u64 {
        self.name.part_bytes.iter().sum()
    }
}

/// A peer that has some of the keys.
pub(crate) struct Source {
    pub(crate) peer: Arc<Peer>,
    pub(crate) up: Arc<Up>,
    /// A byte per key, as it answered.
    pub(crate) tiers: Vec<u8>,
}

/// A key whose block is there, or will be when it is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ready {
    /// It was in memory already.
    Local,
    /// Whole, in a reserved slot.
    Fetched(BlockRef),
}

struct Progress {
    /// Pieces that are not done.
    open: usize,
    /// By position, what was not published yet.
    ready: BTreeMap<usize, Ready>,
    /// The position that is published next.
    next: usize,
    /// A key of a chain is missing: what is behind it does not count.
    broken: bool,
    /// Held for who asked.
    held: Vec<Lent>,
    /// Bytes that count as being on their way.
    flight_bytes: u64,
}

/// One fetch, as its pieces see it.
pub(crate) struct Fetch {
    pub(crate) inner: Arc<Inner>,
    pub(crate) asked: Arc<Asked>,
    pub(crate) sources: Vec<Source>,
    /// Key of the block before that of `range.start`, if that is to have one.
    pub(crate) parent: Option<Key>,
    range: Range<usize>,
    progress: Mutex<Progress>,
    found: AtomicUsize,
    done: AtomicBool,
    closed: AtomicBool,
}

impl Fetch {
    /// Nobody waits for it any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Acquire)
    }

    /// Key of the block before a position, if that is to have one.
    pub(crate) fn parent_of(&self, position: usize) -> Option<Key> {
        if !self.asked.chained {
            return None;
        }
        let before = || position.checked_sub(1).map(|before| self.asked.keys[before]);
        if position == self.range.start { self.parent.or_else(before) } else { before() }
    }

    /// A piece is done: publish what can be, and ask somebody else for the rest, once.
    pub(crate) fn piece_done(self: &Arc<Self>, source: usize, range: &Range<usize>, is_second_try: bool, got: Attempt) {
        let mut progress = lock(&self.progress);
        let missing = range.clone().filter(|position| !got.ready.contains_key(position));
        let again = if is_second_try || got.is_final || self.is_closed() {
            Vec::new()
        } else {
            self.plan_again(source, missing.collect())
        };
        progress.ready.extend(got.ready);
        progress.open = progress.open + again.len() - 1;
        self.publish(&mut progress);
        let is_done = progress.open == 0;
        if is_done && self.is_closed() {
            self.end_flight(&mut progress);
        }
        drop(progress);
        if is_done {
            self.done.store(true, Release);
            self.inner.give_back_in_time(self);
        }
        for Piece { source, range } in again {
            self.ask(source, range, true);
        }
    }

    /// Pieces for what one source did not give, of the others.
    fn plan_again(&self, source: usize, missing: Vec<usize>) -> Vec<Piece> {
        let Some((first, last)) = missing.first().zip(missing.last()) else { return Vec::new() };
        let mut offers = self.offers();
        offers[source].tiers = Vec::new();
        let mut wanted = vec![false; *last + 1];
        missing.iter().for_each(|position| wanted[*position] = true);
        for offer in &mut offers {
            offer.tiers.truncate(*last + 1);
            offer.tiers.iter_mut().zip(&wanted).filter(|(_, wanted)| !**wanted).for_each(|(tier, _)| *tier = 0);
        }
        // What is behind a key that nobody else has may still be of use if that comes from elsewhere.
        plan(&mut offers, *first..*last + 1, false, self.blocks_per_piece(), self.asked.block_bytes())
    }

    fn offers(&self) -> Vec<Offer> {
        let offer = |source: &Source| {
            let seconds = source.peer.read_seconds(0);
            // Who is not there any more is not asked again.
            let tiers = if seconds.is_some() { source.tiers.clone() } else { Vec::new() };
            let each =
                source.peer.read_seconds(self.asked.block_bytes()).zip(seconds).map_or(0.0, |(one, none)| one - none);
            Offer { tiers, seconds: seconds.unwrap_or(0.0), seconds_per_block: each }
        };
        self.sources.iter().map(offer).collect()
    }

    fn blocks_per_piece(&self) -> usize {
        (CHUNK_BYTES_MAX / self.asked.block_bytes().max(1)).max(1) as usize
    }

    fn ask(self: &Arc<Self>, source: usize, range: Range<usize>, is_second_try: bool) {
        let peer = &self.sources[source].peer;
        peer.queued_bytes.fetch_add(range.len() as u64 * self.asked.block_bytes(), Relaxed);
        peer.counters.chunks.add(1);
        Lane::push(peer, Job { fetch: Arc::clone(self), source, range, is_second_try });
    }

    /// Publish what is ready as far as the order allows; when nothing more comes, all of it.
    fn publish(&self, progress: &mut Progress) {
        let mut batch: Vec<(usize, Ready)> = Vec::new();
        while let Some((position, ready)) =
            progress.ready.first_key_value().map(|(position, ready)| (*position, *ready))
        {
            let in_order = !self.asked.chained || position == progress.next;
            if !in_order && progress.open > 0 {
                break;
            }
            progress.ready.remove(&position);
            progress.next = position + 1;
            batch.push((position, ready));
        }
        if batch.is_empty() {
            return;
        }
        let blocks: Vec<BlockRef> = batch.iter().filter_map(|(_, ready)| ready.block()).collect();
        if let Err(error) = self.inner.pool.publish(&blocks) {
            log::warn!("pegaflow: blocks of peers are not published: {error}");
            progress.broken = true;
            return;
        }
        self.hold(progress, &batch);
    }

    /// Count what is there now, and keep it for who asked.
    fn hold(&self, progress: &mut Progress, batch: &[(usize, Ready)]) {
        let keys: Vec<Key> = batch.iter().map(|(position, _)| self.asked.keys[*position]).collect();
        let lent = self.inner.pool.lend(self.asked.namespace, &keys, false, u64::MAX).unwrap_or_default();
        let is_closed = self.is_closed();
        for (index, lent) in lent {
            let position = batch[index].0;
            let counted = self.found.load(Relaxed);
            progress.broken |= self.asked.chained && position != self.range.start + counted;
            if !progress.broken {
                self.found.store(counted + 1, Release);
            }
            if !is_closed {
                progress.held.push(lent);
            }
        }
    }

    fn end_flight(&self, progress: &mut Progress) {
        self.inner.flight_bytes.fetch_sub(std::mem::take(&mut progress.flight_bytes), Relaxed);
    }

    /// Hold nothing any more.
    pub(crate) fn give_back(&self) {
        let mut progress = lock(&self.progress);
        let held = std::mem::take(&mut progress.held);
        if progress.open == 0 {
            self.end_flight(&mut progress);
        }
        drop(progress);
        drop(held);
    }
}

impl Ready {
    fn block(self) -> Option<BlockRef> {
        match self {
            Self::Local => None,
            Self::Fetched(block) => Some(block),
        }
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        let progress = self.progress.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.inner.flight_bytes.fetch_sub(progress.flight_bytes, Relaxed);
    }
}

/// A fetch, as who asked for it sees it; closed when it is dropped.
pub struct PeerFetch {
    fetch: Arc<Fetch>,
    keys: usize,
}

impl PeerFetch {
    pub(crate) fn begin(
        inner: &Arc<Inner>,
        asked: &Arc<Asked>,
        sources: Vec<Source>,
        range: Range<usize>,
        parent: Option<Key>,
    ) -> Option<Self> {
        let block_bytes = asked.block_bytes();
        let room = (inner.flight_room() / block_bytes.max(1)) as usize;
        let range = range.start..range.end.min(range.start.saturating_add(room));
        let progress = Progress {
            open: 0,
            ready: BTreeMap::new(),
            next: range.start,
            broken: false,
            held: Vec::new(),
            flight_bytes: 0,
        };
        let mut fetch = Fetch {
            inner: Arc::clone(inner),
            asked: Arc::clone(asked),
            sources,
            parent,
            range: range.clone(),
            progress: Mutex::new(progress),
            found: AtomicUsize::new(0),
            done: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        };
        let pieces = plan(&mut fetch.offers(), range.clone(), asked.chained, fetch.blocks_per_piece(), block_bytes);
        let (first, last) = (pieces.first()?, pieces.last()?);
        if asked.chained && first.range.start != range.start {
            return None;
        }
        let keys = last.range.end - range.start;
        let bytes = pieces.iter().map(|piece| piece.range.len() as u64 * block_bytes).sum();
        inner.flight_bytes.fetch_add(bytes, Relaxed);
        let progress = fetch.progress.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        (progress.open, progress.flight_bytes) = (pieces.len(), bytes);
        let fetch = Arc::new(fetch);
        inner.note_fetch(&fetch);
        for Piece { source, range } in pieces {
            fetch.ask(source, range, false);
        }
        Some(Self { fetch, keys })
    }

    /// How many keys it is for.
    pub fn keys(&self) -> usize {
        self.keys
    }

    /// How many are in memory so far: from the first on, if they are chained. They are held for a while.
    pub fn found(&self) -> usize {
        self.fetch.found.load(Acquire)
    }

    /// How many are in memory, when no more will be; `None` while more may come.
    pub fn poll(&self) -> Option<usize> {
        self.fetch.done.load(Acquire).then(|| self.found())
    }

    /// Hold nothing any more, and begin nothing more. What is being read is published all the same.
    pub fn close(&self) {
        if !self.fetch.closed.swap(true, AcqRel) {
            self.fetch.give_back();
        }
    }
}

impl Drop for PeerFetch {
    fn drop(&mut self) {
        self.close();
    }
}
