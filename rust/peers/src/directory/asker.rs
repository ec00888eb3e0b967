//! Asks the directory: a thread that looks up what it is handed, and questions whose answers are fetched later.

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pegaflow_engine::{Error, ErrorKind, Result};
use redis::Value;

use super::AskerFacts;
use super::names::{LAYOUT, Layout, OWNERS, member_range, numbers_in, owner_of};
use super::records::Records;
use super::store::{Batch, Store};
use super::url::DirectoryUrl;
use crate::limits::{
    DIRECTORY_BACKOFF_MAX, DIRECTORY_BACKOFF_MIN, DIRECTORY_FIND_KEYS_MAX, DIRECTORY_FIND_TIME_MAX,
    DIRECTORY_FINDS_MAX, DIRECTORY_KEY_OWNERS_MAX,
};

/// Who has which keys.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// Addresses that are named below.
    pub addresses: Vec<Arc<str>>,
    /// Per question, per key: positions in `addresses`. Not all owners of a block that many have.
    pub owners: Vec<Vec<Vec<u16>>>,
}

impl Answer {
    /// Nobody has anything.
    fn empty(questions: &[Vec<u64>]) -> Self {
        let owners = questions.iter().map(|hashes| vec![Vec::new(); hashes.len()]).collect();
        Self { addresses: Vec::new(), owners }
    }

    /// The addresses that have most of the keys, best first, at most `count_max`. Those that have as many come in any
    /// order, so that not everybody asks the same one.
    pub fn best(&self, count_max: usize) -> Vec<Arc<str>> {
        let mut ranks: Vec<(usize, u64, &Arc<str>)> =
            self.addresses.iter().map(|address| (0, super::heartbeat::random(), address)).collect();
        for position in self.owners.iter().flatten().flatten() {
            if let Some((keys, ..)) = ranks.get_mut(usize::from(*position)) {
                *keys += 1;
            }
        }
        ranks.sort_unstable_by_key(|(keys, lot, _)| (std::cmp::Reverse(*keys), *lot));
        ranks.into_iter().take(count_max).map(|(_, _, address)| Arc::clone(address)).collect()
    }
}

/// A question on its way.
pub struct DirectoryQuery {
    answer: Arc<Mutex<Option<Answer>>>,
    deadline: Instant,
    questions: Vec<usize>,
}

impl DirectoryQuery {
    /// The answer, once; `None` while it is awaited. What is not answered in time is answered with nobody.
    pub fn poll(&self) -> Option<Answer> {
        let answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner).take();
        answer.or_else(|| {
            let nobody = || self.questions.iter().map(|keys| vec![Vec::new(); *keys]).collect();
            (Instant::now() >= self.deadline).then(|| Answer { addresses: Vec::new(), owners: nobody() })
        })
    }
}

struct Request {
    questions: Vec<Vec<u64>>,
    deadline: Instant,
    answer: Arc<Mutex<Option<Answer>>>,
}

#[derive(Default)]
struct State {
    facts: AskerFacts,
    /// Nothing is asked before, and nobody looks.
    down_until: Option<Instant>,
    /// Some of those that were there at the last look.
    hosts: Vec<Arc<str>>,
}

/// The handle of the thread, which ends with it.
pub(super) struct Asker {
    requests: SyncSender<Request>,
    state: Arc<Mutex<State>>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Asker {
    pub(super) fn start(url: DirectoryUrl, own_pool: u64, refresh: Duration) -> Result<Self> {
        let (requests, received) = sync_channel(DIRECTORY_FINDS_MAX);
        let state =
            Arc::new(Mutex::new(State { facts: AskerFacts { up: true, ..Default::default() }, ..Default::default() }));
        let work = Work {
            url,
            state: Arc::clone(&state),
            store: None,
            layout: None,
            refresh,
            records: Records::new(own_pool, refresh),
            pause: DIRECTORY_BACKOFF_MIN,
            next_look: Instant::now(),
            looked_in_vain: false,
        };
        let thread = std::thread::Builder::new().name("pega-directory?".into()).spawn(move || work.run(&received));
        thread.map_err(|error| Error::new(ErrorKind::Device, format!("cannot start a thread: {error}")))?;
        Ok(Self { requests, state })
    }

    pub(super) fn find(&self, mut questions: Vec<Vec<u64>>) -> Option<DirectoryQuery> {
        let now = Instant::now();
        let mut state = lock(&self.state);
        let keys: Vec<usize> = questions.iter().map(Vec::len).collect();
        if state.down_until.is_some_and(|until| now < until) {
            state.facts.skipped += 1;
            return None;
        }
        // Of what is too much, the beginnings are asked; nobody is named for the rest.
        let share = DIRECTORY_FIND_KEYS_MAX / questions.len().max(1);
        questions.iter_mut().for_each(|hashes| hashes.truncate(share));
        let (answer, deadline) = (Arc::default(), now + DIRECTORY_FIND_TIME_MAX);
        let request = Request { questions, deadline, answer: Arc::clone(&answer) };
        match self.requests.try_send(request) {
            Ok(()) => {
                state.facts.finds += 1;
                state.facts.keys += keys.iter().sum::<usize>() as u64;
                Some(DirectoryQuery { answer, deadline, questions: keys })
            }
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                state.facts.skipped += 1;
                None
            }
        }
    }

    pub(super) fn hosts(&self) -> Vec<Arc<str>> {
        lock(&self.state).hosts.clone()
    }

    pub(super) fn facts(&self) -> AskerFacts {
        lock(&self.state).facts.clone()
    }
}

struct Work {
    url: DirectoryUrl,
    state: Arc<Mutex<State>>,
    store: Option<Store>,
    /// And when it was read.
    layout: Option<(Layout, Instant)>,
    refresh: Duration,
    records: Records,
    pause: Duration,
    /// When to look who is there.
    next_look: Instant,
    /// It was a look that found the store down, and no question has since.
    looked_in_vain: bool,
}

impl Work {
    fn run(mut self, requests: &Receiver<Request>) {
        loop {
            let pause = self.next_look.saturating_duration_since(Instant::now());
            match requests.recv_timeout(pause) {
                Ok(request) => self.reply(&request),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if Instant::now() >= self.next_look {
                self.look_around();
            }
        }
    }

    fn reply(&mut self, request: &Request) {
        let (began, mut answer) = (Instant::now(), Answer::empty(&request.questions));
        if began < request.deadline && self.down_until().is_none_or(|until| began >= until) {
            match self.with_store(request.deadline, |work| work.look_up(&request.questions)) {
                Ok(found) => {
                    self.note_success(&found, Instant::now() > request.deadline);
                    answer = found;
                }
                Err(error) => {
                    lock(&self.state).facts.failed += 1;
                    self.note_failure(&error);
                    self.looked_in_vain = false;
                }
            }
        } else {
            lock(&self.state).facts.failed += 1;
        }
        *request.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
    }

    fn down_until(&self) -> Option<Instant> {
        lock(&self.state).down_until
    }

    /// Who is there at all, whether anybody asks or not. If that fails, nobody. A store that is down is left alone by
    /// looks as by questions, and what either finds out holds for both.
    fn look_around(&mut self) {
        let now = Instant::now();
        if let Some(until) = self.down_until().filter(|until| now < *until) {
            self.next_look = until;
            return;
        }
        match self.with_store(now + DIRECTORY_FIND_TIME_MAX, Self::hosts) {
            Ok(hosts) => {
                let mut state = lock(&self.state);
                state.hosts = hosts;
                state.facts.answered += 1;
                drop(state);
                // Questions may be refused all the same, so that they alone say when they no longer are.
                if std::mem::take(&mut self.looked_in_vain) {
                    self.note_return();
                }
                self.next_look = Instant::now() + self.refresh;
            }
            Err(error) => {
                self.looked_in_vain |= lock(&self.state).facts.problem.is_none();
                self.note_failure(&error);
                lock(&self.state).hosts = Vec::new();
                self.next_look = Instant::now();
            }
        }
    }

    fn hosts(&mut self) -> Result<Vec<Arc<str>>> {
        let Self { store: Some(store), records, .. } = self else { return Ok(Vec::new()) };
        let mut batch = Batch::default();
        let count = DIRECTORY_KEY_OWNERS_MAX.to_string();
        batch.add(OWNERS, &[b"SRANDMEMBER", OWNERS.as_bytes(), count.as_bytes()]);
        let some = numbers_in(&store.demand(&batch)?[0]);
        records.read(store, &some.iter().copied().collect())?;
        Ok(some.into_iter().filter_map(|owner| records.address(owner)).collect())
    }

    /// Do something with a store that is connected. If that fails on a connection that may have been idle for long,
    /// and its end with it, once more on a new one.
    fn with_store<T>(&mut self, deadline: Instant, work: impl Fn(&mut Self) -> Result<T>) -> Result<T> {
        let mut is_old = self.store.is_some();
        loop {
            if self.store.is_none() {
                self.store = Some(Store::connect(&mut self.url, DIRECTORY_FIND_TIME_MAX)?);
                self.layout = None;
            }
            let done = work(self);
            if done.is_ok() {
                return done;
            }
            self.store = None;
            if !is_old || Instant::now() >= deadline {
                return done;
            }
            is_old = false;
        }
    }

    /// One round trip, and another one if an owner is named that is not known.
    fn look_up(&mut self, questions: &[Vec<u64>]) -> Result<Answer> {
        let Self { store: Some(store), records, .. } = self else { return Ok(Answer::empty(questions)) };
        let count = DIRECTORY_KEY_OWNERS_MAX.to_string();
        loop {
            let Some((layout, read)) = self.layout else {
                let mut batch = Batch::default();
                batch.add(LAYOUT, &[b"GET", LAYOUT.as_bytes()]);
                let Some(layout) = layout_in(&store.demand(&batch)?[0]) else { return Ok(Answer::empty(questions)) };
                self.layout = Some((layout, Instant::now()));
                continue;
            };
            let mut batch = Batch::default();
            for hash in questions.iter().flatten() {
                let (key, [low, high]) = (layout.bucket_key(*hash), member_range(*hash));
                batch.add(&key, &[b"ZRANGEBYLEX", key.as_bytes(), &low, &high, b"LIMIT", b"0", count.as_bytes()]);
            }
            let is_stale = read.elapsed() >= self.refresh;
            if is_stale {
                batch.add(LAYOUT, &[b"GET", LAYOUT.as_bytes()]);
            }
            let mut values = store.demand(&batch)?;
            if is_stale {
                let now = values.pop().and_then(|value| layout_in(&value));
                self.layout = now.map(|layout| (layout, Instant::now()));
                if now != Some(layout) {
                    continue;
                }
            }
            let named: Vec<Vec<u32>> =
                questions.iter().flatten().zip(&values).map(|(hash, value)| owners_in(*hash, value)).collect();
            records.read(store, &named.iter().flatten().copied().collect::<HashSet<u32>>())?;
            return Ok(answer_of(questions, &named, records));
        }
    }

    fn note_success(&mut self, answer: &Answer, is_late: bool) {
        let named = answer.owners.iter().flatten().filter(|owners| !owners.is_empty()).count();
        let mut state = lock(&self.state);
        state.facts.answered += 1;
        state.facts.named += named as u64;
        state.facts.failed += u64::from(is_late);
        drop(state);
        self.note_return();
    }

    fn note_return(&mut self) {
        self.pause = DIRECTORY_BACKOFF_MIN;
        let mut state = lock(&self.state);
        (state.down_until, state.facts.up) = (None, true);
        if state.facts.problem.take().is_some() {
            log::info!("pegaflow: the directory answers again");
        }
    }

    fn note_failure(&mut self, error: &Error) {
        let mut state = lock(&self.state);
        if state.facts.problem.is_none() {
            log::warn!("pegaflow: {error}; only peers that are named in the configuration are asked until it does");
        }
        (state.facts.up, state.facts.problem) = (false, Some(error.to_string()));
        state.down_until = Some(Instant::now() + self.pause);
        self.pause = (2 * self.pause).min(DIRECTORY_BACKOFF_MAX);
    }
}

fn layout_in(value: &Value) -> Option<Layout> {
    match value {
        Value::BulkString(text) => Layout::parse(text),
        _ => None,
    }
}

fn owners_in(hash: u64, value: &Value) -> Vec<u32> {
    let Value::Array(members) = value else { return Vec::new() };
    let owner = |value: &Value| match value {
        Value::BulkString(member) => owner_of(hash, member),
        _ => None,
    };
    members.iter().take(DIRECTORY_KEY_OWNERS_MAX).filter_map(owner).collect()
}

fn answer_of(questions: &[Vec<u64>], named: &[Vec<u32>], records: &Records) -> Answer {
    let (mut answer, mut positions) = (Answer::default(), HashMap::new());
    let mut named = named.iter();
    for hashes in questions {
        let keys = named.by_ref().take(hashes.len()).map(|owners| {
            let place = |owner: &u32| {
                *positions.entry(*owner).or_insert_with(|| {
                    let address = records.address(*owner)?;
                    answer.addresses.push(address);
                    u16::try_from(answer.addresses.len() - 1).ok()
                })
            };
            owners.iter().filter_map(place).collect()
        });
        answer.owners.push(keys.collect());
    }
    answer
}
