//! Registers a pool's blocks: a thread that looks for what is new and what is gone, and writes the differences.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pegaflow_engine::{Error, ErrorKind, Result, Sight};

use super::heartbeat::{self, Post};
use super::inventory::{Inventory, Walk};
use super::ledger::Ledger;
use super::names::{Layout, OwnerRecord, is_address, member};
use super::repair::Repair;
use super::store::{Batch, Store};
use super::url::DirectoryUrl;
use super::{DirectoryTuning, OwnerFacts};
use crate::limits::{
    DIRECTORY_BACKOFF_MAX, DIRECTORY_BACKOFF_MIN, DIRECTORY_BATCH_MAX, DIRECTORY_BUCKET_LIFE, DIRECTORY_GONE_MAX,
    DIRECTORY_PASS_PAUSE, DIRECTORY_PASS_REST, DIRECTORY_PATIENCE, DIRECTORY_SAMPLES, DIRECTORY_SCAN_SLOTS_MAX,
};

/// How often the thread looks whether there is something to do.
const TICK: Duration = Duration::from_millis(50);

/// A change to be written.
#[derive(Clone, Copy)]
pub(super) enum Change {
    Add(u64),
    Remove(u64),
}

/// What thread and handle share.
#[derive(Default)]
struct Desk {
    facts: Mutex<OwnerFacts>,
    stop: Mutex<bool>,
    bell: Condvar,
}

impl Desk {
    fn facts(&self) -> MutexGuard<'_, OwnerFacts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wait, at most until somebody says stop; returns whether somebody has.
    fn rest(&self, time: Duration) -> bool {
        let stop = self.stop.lock().unwrap_or_else(PoisonError::into_inner);
        *self.bell.wait_timeout_while(stop, time, |stop| !*stop).unwrap_or_else(PoisonError::into_inner).0
    }
}

/// A pool that is being registered. Dropped, the thread takes its leave from the store and ends.
pub(super) struct Owner {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
}

impl Owner {
    /// Register all blocks of `inventory` as those of whoever answers at `address`.
    pub(super) fn start(
        inventory: Arc<dyn Inventory>,
        url: DirectoryUrl,
        address: &str,
        tuning: DirectoryTuning,
    ) -> Result<Self> {
        if !is_address(address) {
            let sentence =
                format!("{address:?} is no address that peers could ask: give HOST:PORT of the server of peers");
            return Err(Error::new(ErrorKind::InvalidArgument, sentence));
        }
        let desk = Arc::new(Desk::default());
        let record = OwnerRecord { pool_id: inventory.pool_id(), address: address.to_owned() };
        let work = Work {
            ledger: Ledger::new(inventory.slots_max()),
            walk: inventory.walk(),
            inventory,
            url,
            record,
            tuning,
            desk: Arc::clone(&desk),
            post: None,
            unsent: VecDeque::new(),
            gone: Vec::new(),
            next_pass: Instant::now(),
            spent: Duration::ZERO,
            repair: Repair::default(),
        };
        let thread = std::thread::Builder::new().name("pega-directory".into()).spawn(move || work.run());
        let thread =
            thread.map_err(|error| Error::new(ErrorKind::Device, format!("cannot start a thread: {error}")))?;
        Ok(Self { desk, thread: Some(thread) })
    }

    pub(super) fn facts(&self) -> OwnerFacts {
        self.desk.facts().clone()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        *self.desk.stop.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.desk.bell.notify_all();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("pegaflow: the thread that registers blocks had panicked");
        }
    }
}

struct Work {
    inventory: Arc<dyn Inventory>,
    url: DirectoryUrl,
    record: OwnerRecord,
    tuning: DirectoryTuning,
    desk: Arc<Desk>,
    ledger: Ledger,
    /// What is agreed with the store.
    post: Option<Post>,
    walk: Box<dyn Walk>,
    /// In the ledger, and not surely in the store.
    unsent: VecDeque<Change>,
    /// Hashes of blocks whose slots have something else now.
    gone: Vec<u64>,
    next_pass: Instant,
    spent: Duration,
    repair: Repair,
}

impl Work {
    fn run(mut self) {
        let mut pause = DIRECTORY_BACKOFF_MIN;
        loop {
            let began = Instant::now();
            let Err(error) = self.session() else { return };
            if began.elapsed() > 2 * self.tuning.refresh {
                pause = DIRECTORY_BACKOFF_MIN;
            }
            self.note_failure(&error);
            if self.desk.rest(pause) {
                return;
            }
            pause = (2 * pause).min(DIRECTORY_BACKOFF_MAX);
        }
    }

    fn note_failure(&self, error: &Error) {
        let mut facts = self.desk.facts();
        if facts.problem.is_none() {
            log::warn!("pegaflow: blocks are not registered: {error}; trying again until it works");
        }
        (facts.up, facts.problem) = (false, Some(error.to_string()));
    }

    /// Until somebody says stop, or something fails.
    fn session(&mut self) -> Result<()> {
        let mut store = Store::connect(&mut self.url, DIRECTORY_PATIENCE)?;
        let mut next_beat = Instant::now();
        loop {
            if Instant::now() >= next_beat {
                self.beat(&mut store)?;
                next_beat = Instant::now() + self.tuning.refresh;
            }
            let pause = if self.step(&mut store)? { Duration::ZERO } else { TICK };
            if self.desk.rest(pause) {
                if let Some(Err(error)) = self.post.take().map(|post| post.leave(&mut store, &self.record)) {
                    log::debug!("pegaflow: the directory was left without a word: {error}");
                }
                return Ok(());
            }
        }
    }

    fn beat(&mut self, store: &mut Store) -> Result<()> {
        let samples = self.samples();
        let blocks = if self.post.is_none() { self.count_blocks()? } else { self.ledger.blocks() as u64 };
        let post = heartbeat::beat(store, &self.record, blocks, &samples, self.post.as_ref(), &self.tuning)?;
        let is_new = self.post.as_ref() != Some(&post);
        if is_new {
            // Whatever was there is lost, or is to be elsewhere.
            self.ledger.clear();
            self.unsent.clear();
            self.gone.clear();
            (self.walk, self.next_pass, self.spent) = (self.inventory.walk(), Instant::now(), Duration::ZERO);
            self.repair = Repair::default();
        }
        let mut facts = self.desk.facts();
        if facts.problem.take().is_some() {
            log::info!("pegaflow: blocks are registered again");
        }
        (facts.up, facts.number) = (true, post.number);
        facts.anew += u64::from(is_new);
        facts.complete &= !is_new;
        drop(facts);
        self.post = Some(post);
        Ok(())
    }

    /// How many blocks there are to register.
    fn count_blocks(&self) -> Result<u64> {
        let (mut walk, mut blocks) = (self.inventory.walk(), 0);
        while !walk.go_on(DIRECTORY_SCAN_SLOTS_MAX, &mut |sight| {
            blocks += u64::from(matches!(sight, Sight::Block(_)));
            true
        })? {}
        Ok(blocks)
    }

    /// Some registered blocks, by which to see how full buckets are.
    fn samples(&self) -> Vec<u64> {
        let (end, mut samples) = (u64::from(self.ledger.end()), Vec::new());
        for step in 0..4 * DIRECTORY_SAMPLES as u64 {
            let slot = heartbeat::random().wrapping_add(step).checked_rem(end).unwrap_or(0) as u32;
            samples.extend(self.ledger.hash_at(slot));
            if samples.len() == DIRECTORY_SAMPLES {
                break;
            }
        }
        samples
    }

    /// Do a bounded part of what there is to do; returns whether there may be more just now.
    fn step(&mut self, store: &mut Store) -> Result<bool> {
        let Some((layout, number)) = self.post.as_ref().map(|post| (post.layout, post.number)) else {
            return Ok(false);
        };
        self.send(store)?;
        if Instant::now() < self.next_pass {
            let (ledger, rate) = (&self.ledger, self.tuning.repairs_per_second);
            let removed = self.repair.step(store, ledger, layout, number, rate, self.tuning.dead_after)?;
            self.desk.facts().repaired += removed;
            return Ok(false);
        }
        let began = Instant::now();
        let over = self.look()?;
        self.spent += began.elapsed();
        self.send(store)?;
        if over || self.gone.len() >= DIRECTORY_GONE_MAX {
            self.remove_gone(layout);
            self.send(store)?;
        }
        if over {
            if let Some(post) = &mut self.post {
                post.former = None;
            }
            self.next_pass = Instant::now() + DIRECTORY_PASS_PAUSE.max(self.spent * DIRECTORY_PASS_REST);
            self.spent = Duration::ZERO;
        }
        let mut facts = self.desk.facts();
        facts.complete |= over;
        facts.blocks = self.ledger.blocks() as u64;
        Ok(true)
    }

    /// Go on over the slots, until so much is new that it is time to write.
    fn look(&mut self) -> Result<bool> {
        let Self { inventory, walk, ledger, unsent, gone, .. } = self;
        walk.go_on(DIRECTORY_SCAN_SLOTS_MAX, &mut |sight| {
            match sight {
                Sight::Nothing(slots) => ledger.drop_all(slots, |hash| gone.push(hash)),
                Sight::Block(block) if ledger.knows(block) => {}
                Sight::Block(block) => {
                    let hash = inventory.hash_of(block);
                    gone.extend(ledger.set(block, hash));
                    unsent.extend(hash.map(Change::Add));
                }
            }
            unsent.len() < DIRECTORY_BATCH_MAX && gone.len() < DIRECTORY_GONE_MAX
        })
    }

    /// What is gone from one slot may be in another by now. If it comes there later, it is written later, too.
    fn remove_gone(&mut self, layout: Layout) {
        let mut hashes: HashSet<u64> = self.gone.drain(..).map(|hash| layout.visible(hash)).collect();
        self.ledger.retain_absent(layout, &mut hashes);
        self.unsent.extend(hashes.into_iter().map(Change::Remove));
    }

    fn send(&mut self, store: &mut Store) -> Result<()> {
        let Some(post) = &self.post else { return Ok(()) };
        while !self.unsent.is_empty() {
            let count = self.unsent.len().min(DIRECTORY_BATCH_MAX);
            let mut batch = Batch::default();
            let mut added = 0;
            for change in self.unsent.iter().take(count) {
                match *change {
                    Change::Add(hash) => {
                        added += 1;
                        add_to(&mut batch, post.layout, hash, post.number);
                        if let Some(former) = post.former {
                            // Nobody looks there any more.
                            let key = former.bucket_key(hash);
                            batch.add(&key, &[b"UNLINK", key.as_bytes()]);
                        }
                    }
                    Change::Remove(hash) => remove_from(&mut batch, post.layout, hash, &member(hash, post.number)),
                }
            }
            store.demand(&batch)?;
            self.unsent.drain(..count);
            let mut facts = self.desk.facts();
            facts.written += added;
            facts.removed += count as u64 - added;
        }
        Ok(())
    }
}

/// Write a block into its bucket.
pub(super) fn add_to(batch: &mut Batch, layout: Layout, hash: u64, owner: u32) {
    let key = layout.bucket_key(hash);
    batch.add(&key, &[b"ZADD", key.as_bytes(), b"0", &member(hash, owner)]);
    let life = DIRECTORY_BUCKET_LIFE.as_secs().to_string();
    batch.add(&key, &[b"EXPIRE", key.as_bytes(), life.as_bytes()]);
}

/// Take a member out of the bucket of a block.
pub(super) fn remove_from(batch: &mut Batch, layout: Layout, hash: u64, member: &[u8]) {
    let key = layout.bucket_key(hash);
    batch.add(&key, &[b"ZREM", key.as_bytes(), member]);
}
