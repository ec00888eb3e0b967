//! The board: entries that whoever wants blocks from SSD claims and fills, and that the leader takes.
//!
//! `owner` says whose an entry is, `state` what it is at. Every asking has a sequence number, so nobody takes one for
//! another: the leader's copy of an entry counts only if the state was still the same afterwards.

use super::counters::Counter;
use super::rows::{KEY_WORDS, RequestRow};
use super::segment::Segment;
use crate::key::Key;
use crate::limits::SSD_REQUEST_KEYS_MAX;
use crate::shm::core::Core;
use crate::shm::namespace::Namespace;
use crate::sync::{AcqRel, Acquire, AtomicU64, Relaxed, Release, SeqCst};

/// What an entry is at, in the low byte of its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Step {
    /// Nobody asks.
    Idle = 0,
    /// Asked, and not taken.
    Asked = 1,
    /// The leader is at it.
    Taken = 2,
    /// The leader has found what there is, and holds it.
    Answered = 3,
}

const CHAINED: u64 = 1;

/// One asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asking {
    pub(crate) entry: usize,
    pub(crate) sequence: u64,
}

impl Asking {
    fn at(self, step: Step) -> u64 {
        self.sequence << 8 | step as u64
    }
}

/// What is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wish {
    pub(crate) namespace: Namespace,
    pub(crate) keys: Vec<Key>,
    /// Before the first key.
    pub(crate) parent: Option<Key>,
    /// Each key is the child of the one before it; else none has a parent.
    pub(crate) chained: bool,
}

/// An asking that the leader has taken.
pub(crate) struct Taken {
    pub(crate) asking: Asking,
    /// Member word of who asks.
    pub(crate) owner: u64,
    pub(crate) wish: Wish,
}

fn store_key(words: &[AtomicU64; KEY_WORDS], key: Option<&Key>) {
    let (bytes, length) = key.map_or(([0; 4], 0), |key| (key.words(), key.len_bytes()));
    words.iter().zip(bytes).for_each(|(word, value)| word.store(value, Relaxed));
    words[KEY_WORDS - 1].store(u64::from(length), Relaxed);
}

fn load_key(words: &[AtomicU64; KEY_WORDS]) -> Option<Key> {
    let length = u8::try_from(words[KEY_WORDS - 1].load(Relaxed)).ok()?;
    Key::from_parts(std::array::from_fn(|position| words[position].load(Relaxed)), length)
}

impl Segment {
    fn row(&self, asking: Asking) -> Option<&RequestRow> {
        self.requests().get(asking.entry)
    }

    /// Put a wish on the board, as far as an entry has room for its keys. `None` if no entry is free.
    pub(crate) fn ask(&self, core: &Core, wish: &Wish) -> Option<Asking> {
        let me = core.me.encode();
        let free = |row: &RequestRow| {
            row.owner.load(Relaxed) == 0 && row.owner.compare_exchange(0, me, AcqRel, Relaxed).is_ok()
        };
        let Some(entry) = self.requests().iter().position(free) else {
            self.header().add(Counter::RequestsRefused, 1);
            return None;
        };
        crate::crash_point::pass("ssd.claimed");
        let row = &self.requests()[entry];
        let keys = &wish.keys[..wish.keys.len().min(SSD_REQUEST_KEYS_MAX)];
        row.namespace.store(u64::from(wish.namespace.id()), Relaxed);
        row.flags.store(if wish.chained { CHAINED } else { 0 }, Relaxed);
        row.count.store(keys.len() as u64, Relaxed);
        row.found.store(0, Relaxed);
        store_key(&row.parent, wish.parent.as_ref());
        row.keys.iter().zip(keys).for_each(|(words, key)| store_key(words, Some(key)));
        // 56 bits do not come round while somebody still remembers.
        let sequence = ((row.state.load(Relaxed) >> 8) + 1) & (u64::MAX >> 8);
        let asking = Asking { entry, sequence };
        row.state.store(asking.at(Step::Asked), Release);
        crate::crash_point::pass("ssd.asked");
        self.header().asked.fetch_add(1, Release);
        Some(asking)
    }

    /// What became of it; `None` if it is not on the board any more.
    pub(crate) fn step_of(&self, asking: Asking) -> Option<Step> {
        let word = self.row(asking)?.state.load(Acquire);
        [Step::Asked, Step::Taken, Step::Answered].into_iter().find(|step| asking.at(*step) == word)
    }

    /// Keys that were found so far.
    pub(crate) fn found(&self, asking: Asking) -> usize {
        self.row(asking).map_or(0, |row| row.found.load(Acquire) as usize)
    }

    /// Its owner has what it wanted, or wants nothing any more.
    pub(crate) fn withdraw(&self, core: &Core, asking: Asking) {
        if !self.end(asking) {
            return;
        }
        crate::crash_point::pass("ssd.given_back");
        if let Some(row) = self.row(asking) {
            let _gone_if_reaped = row.owner.compare_exchange(core.me.encode(), 0, AcqRel, Relaxed);
        }
    }

    /// To idle from wherever it is. `false` if it is another asking's entry by now.
    fn end(&self, asking: Asking) -> bool {
        let Some(row) = self.row(asking) else { return false };
        let from = |step| row.state.compare_exchange(asking.at(step), asking.at(Step::Idle), AcqRel, Relaxed).is_ok();
        // It moves on at most twice meanwhile, in this order.
        [Step::Asked, Step::Taken, Step::Answered].into_iter().any(from)
    }

    /// Take everything that is asked; `again`: also what a leader that is no more had taken.
    pub(crate) fn take_asked(&self, again: bool) -> Vec<Taken> {
        (0..self.requests().len()).filter_map(|entry| self.take(entry, again)).collect()
    }

    fn take(&self, entry: usize, again: bool) -> Option<Taken> {
        let row = self.requests().get(entry)?;
        let word = row.state.load(Acquire);
        let asking = Asking { entry, sequence: word >> 8 };
        if word != asking.at(Step::Asked) && !(again && word == asking.at(Step::Taken)) {
            return None;
        }
        let owner = row.owner.load(Relaxed);
        let count = (row.count.load(Relaxed) as usize).min(SSD_REQUEST_KEYS_MAX);
        // What is no key ends it.
        let keys = row.keys[..count].iter().map_while(load_key).collect();
        let namespace = Namespace(u32::try_from(row.namespace.load(Relaxed)).unwrap_or(u32::MAX));
        let chained = row.flags.load(Relaxed) & CHAINED != 0;
        let wish = Wish { namespace, keys, parent: load_key(&row.parent), chained };
        row.state.compare_exchange(word, asking.at(Step::Taken), AcqRel, Relaxed).ok()?;
        crate::crash_point::pass("ssd.taken");
        Some(Taken { asking, owner, wish })
    }

    /// Say how many keys were found so far.
    pub(crate) fn note_found(&self, asking: Asking, found: usize) {
        if let Some(row) = self.row(asking).filter(|_| self.step_of(asking) == Some(Step::Taken)) {
            row.found.store(found as u64, Release);
        }
    }

    /// Nothing more will be found. `false` if nobody waits for it.
    pub(crate) fn answer(&self, asking: Asking, found: usize) -> bool {
        self.note_found(asking, found);
        let Some(row) = self.row(asking) else { return false };
        let answered =
            row.state.compare_exchange(asking.at(Step::Taken), asking.at(Step::Answered), AcqRel, Relaxed).is_ok();
        crate::crash_point::pass("ssd.answered");
        answered
    }

    /// Free the entries of dead processes.
    pub(crate) fn free_entries_of_dead(&self, core: &Core) {
        for row in self.requests() {
            // In this order: if the owner is the dead one, so is the state his.
            let word = row.state.load(SeqCst);
            let owner = row.owner.load(SeqCst);
            if owner == 0 || !core.is_dead(owner) {
                continue;
            }
            let idle = word & !0xFF | Step::Idle as u64;
            if row.state.compare_exchange(word, idle, AcqRel, Relaxed).is_ok() {
                let _another_leader_was_faster = row.owner.compare_exchange(owner, 0, AcqRel, Relaxed);
            }
        }
    }
}
