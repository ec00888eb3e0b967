//! The model: what may be found under each key, given what was stored, what was reset and who died at what.

#![allow(unreachable_pub, reason = "a test module")]

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pegaflow_engine::{Key, Namespace, Pool, admin, crash_point};

use crate::common::ShmDir;
use crate::kill::blocks::{MAIN, key, namespace, open, store_all};
use crate::kill::chains::chain;
use crate::kill::child::Worker;
use crate::kill::patience::PATIENCE;
use crate::kill::random::Random;
use crate::kill::settled::{assert_nothing_lost, assert_settled};

const PROCESSES: usize = 4;
/// Steps between two checks of every invariant.
const STEPS_PER_CHECK: u64 = 500;
/// Where a death leaves an index that is not whole.
const REBUILD: &str = "rebuild.cleared";
/// Orders that are printed if the model fails.
const HISTORY_MAX: usize = 200;

/// How much there is of everything.
#[derive(Clone, Copy)]
pub struct Shape {
    pub chains: u64,
    pub length: u64,
    /// All this fits: nothing of the present epoch is ever evicted. Not with several namespaces, which take extents
    /// from each other.
    pub fits: bool,
    pub spaces: usize,
}

/// Blocks that a process has reserved.
struct Begun {
    space: usize,
    epoch: u64,
    keys: Vec<Key>,
    nonce: u64,
}

struct Process {
    worker: Worker,
    armed: &'static str,
    begun: Option<Begun>,
}

#[derive(Default)]
struct Space {
    epoch: u64,
    /// Who may have stored what is there under a key: one nonce, unless its store was cut short by a death.
    known: HashMap<Key, Vec<u64>>,
}

pub struct Model {
    dir: ShmDir,
    /// The survivor of every death.
    pool: Arc<Pool>,
    ids: Vec<Namespace>,
    random: Random,
    shape: Shape,
    processes: Vec<Process>,
    spaces: Vec<Space>,
    deaths: BTreeMap<&'static str, u64>,
    stored: u64,
    resets: u64,
    /// A rebuild of the index may have been cut short since the last check: until it is done again, what is there may
    /// be stored once more, and the more recently used of the two stays.
    rebuilding: bool,
    history: History,
}

/// The last orders with their answers; printed if the model fails.
#[derive(Default)]
struct History(VecDeque<String>);

impl History {
    fn add(&mut self, line: String) {
        self.0.push_back(line);
        if self.0.len() > HISTORY_MAX {
            self.0.pop_front();
        }
    }
}

impl Drop for History {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.iter().for_each(|line| println!("{line}"));
        }
    }
}

fn start(dir: &ShmDir) -> Process {
    let mut worker = Worker::start("model", &dir.0, &[]);
    worker.expect("ready");
    Process { worker, armed: "", begun: None }
}

impl Model {
    pub fn new(test: &str, seed: u64, shape: Shape) -> Self {
        let dir = ShmDir::new(&test.replace(' ', "-"));
        let pool = open(&dir.0);
        let ids: Vec<Namespace> = (0..shape.spaces).map(|space| namespace(&pool, MAIN + space as u8)).collect();
        // Both have their extents before the steps begin, since growth takes a time of its own.
        for ns in &ids {
            let fillers: Vec<Key> = (0..100).map(|number| key(9_000_000 + number)).collect();
            store_all(&pool, *ns, &fillers, 1);
            pool.reset(*ns).unwrap();
        }
        let processes = (0..PROCESSES).map(|_| start(&dir)).collect();
        let spaces = (0..shape.spaces).map(|_| Space::default()).collect();
        let (random, deaths) = (Random::new(seed), BTreeMap::new());
        let mut model = Self {
            dir,
            pool,
            ids,
            random,
            shape,
            processes,
            spaces,
            deaths,
            stored: 0,
            resets: 0,
            rebuilding: false,
            history: History::default(),
        };
        (0..shape.spaces).for_each(|space| model.spaces[space].epoch = model.epoch_in_the_pool(space));
        model
    }

    pub fn deaths(&self) -> u64 {
        self.deaths.values().sum()
    }

    pub fn stored(&self) -> u64 {
        self.stored
    }

    pub fn resets(&self) -> u64 {
        self.resets
    }

    pub fn summary(&self) -> String {
        format!("{} blocks stored, {} resets, {} deaths: {:?}", self.stored, self.resets, self.deaths(), self.deaths)
    }

    fn below(&mut self, count: usize) -> usize {
        self.random.below(count as u64) as usize
    }

    pub fn step(&mut self, step: u64) {
        let (process, space) = (self.below(PROCESSES), self.below(self.shape.spaces));
        let (number, length) = (self.random.below(self.shape.chains), 1 + self.random.below(self.shape.length));
        let place = format!("{space} {number} {length}");
        let keys = chain(number, length);
        match self.random.below(1000) {
            0..300 => self.look(process, space, &keys, &format!("look {place}")),
            300..400 => self.look(process, space, &keys, &format!("hold {place}")),
            400..520 => drop(self.order(process, "let_go", "")),
            520..720 => self.store(process, space, keys, &place, "store"),
            720..780 => self.store(process, space, keys, &place, "begin"),
            780..840 => self.finish_begun(process),
            840..860 => self.abandon(process),
            860..900 => drop(self.order(process, "touch", &place)),
            900..910 => self.reset(process, space),
            910..915 => drop(self.order(process, "rebuild", "")),
            915..930 => drop(self.order(process, "reap", "")),
            930..940 => drop(self.order(process, "grow", &place)),
            940..950 => self.reopen(process),
            950..990 => self.arm(process),
            _ => self.kill(process),
        }
        if step % STEPS_PER_CHECK == STEPS_PER_CHECK - 1 {
            assert_settled(&self.pool);
            self.rebuilding = self.processes.iter().any(|process| process.armed == REBUILD);
        }
    }

    /// Give an order. `None` if the process has died of it, or before it; another one is there then.
    fn order(&mut self, process: usize, what: &str, arguments: &str) -> Option<Vec<u64>> {
        let line = format!("{what} {arguments}");
        let worker = &mut self.processes[process].worker;
        if worker.try_tell(line.trim_end()) {
            let answer = worker.line_in_time(&line);
            let said = format!("process {process}: {line}: {answer}");
            if self.history.0.back() != Some(&said) {
                self.history.add(said);
            }
            if let Some(numbers) = answer.strip_prefix("done") {
                return Some(numbers.split_whitespace().map(|number| number.parse().unwrap()).collect());
            }
            assert_eq!(answer, "", "an answer to {line}");
        }
        self.bury(process);
        None
    }

    /// A process is dead, of its crash point or it is a failure. What it had reserved and leased is nobody's.
    fn bury(&mut self, process: usize) {
        let armed = self.processes[process].armed;
        assert!(self.processes[process].worker.died_of_a_kill(), "a process failed (it was to die at '{armed}')");
        *self.deaths.entry(armed).or_default() += 1;
        self.history.add(format!("process {process} died at '{armed}'"));
        self.processes[process] = start(&self.dir);
        if self.shape.fits {
            // Else what the dead have reserved would take the room.
            self.pool.reap().unwrap();
        }
    }

    /// What a process finds must be what was stored last; with room, all that was stored is found.
    fn look(&mut self, process: usize, space: usize, keys: &[Key], order: &str) {
        let (what, arguments) = order.split_once(' ').unwrap();
        let started = Instant::now();
        let certain = |model: &Self, key: &Key| model.spaces[space].known.get(key).is_some_and(|all| all.len() == 1);
        loop {
            let Some(nonces) = self.order(process, what, arguments) else { return };
            for (key, nonce) in keys.iter().zip(&nonces) {
                let known = self.spaces[space].known.get_mut(key).expect("a block that nobody stored in this epoch");
                assert!(known.contains(nonce), "{nonce} is there, and {known:?} was stored");
                *known = vec![*nonce];
            }
            let expected = keys.iter().take_while(|key| certain(self, key)).count();
            if !self.shape.fits || nonces.len() >= expected {
                return;
            }
            // A rebuild that a death cut short is done again by whoever is alive.
            assert!(started.elapsed() < PATIENCE, "{} of {expected} blocks are there", nonces.len());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn store(&mut self, process: usize, space: usize, keys: Vec<Key>, place: &str, what: &str) {
        if self.processes[process].begun.is_some() {
            return;
        }
        let nonce = self.random.next();
        let epoch = self.spaces[space].epoch;
        let begun = Begun { space, epoch, keys, nonce };
        match (self.order(process, what, &format!("{place} {nonce}")), what) {
            (Some(visible), "store") => self.became_visible(&begun, &visible),
            (Some(_), _) => self.processes[process].begun = Some(begun),
            (None, _) => self.may_be_visible(&begun),
        }
    }

    fn finish_begun(&mut self, process: usize) {
        let Some(begun) = self.processes[process].begun.take() else { return };
        match self.order(process, "finish", "") {
            Some(visible) => self.became_visible(&begun, &visible),
            None => self.may_be_visible(&begun),
        }
    }

    fn abandon(&mut self, process: usize) {
        self.processes[process].begun = None;
        self.order(process, "abandon", "");
    }

    fn became_visible(&mut self, begun: &Begun, visible: &[u64]) {
        let space = &mut self.spaces[begun.space];
        assert!(visible.is_empty() || space.epoch == begun.epoch, "a block that was begun before a reset is visible");
        for index in visible {
            let known = space.known.entry(begun.keys[*index as usize]).or_default();
            if !self.rebuilding {
                known.clear();
            }
            known.push(begun.nonce);
            self.stored += 1;
        }
    }

    /// A death cut a store short: any of its blocks may be there, or what was there before.
    fn may_be_visible(&mut self, begun: &Begun) {
        let space = &mut self.spaces[begun.space];
        if space.epoch == begun.epoch {
            begun.keys.iter().for_each(|key| space.known.entry(*key).or_insert_with(|| vec![0]).push(begun.nonce));
        }
    }

    fn reset(&mut self, process: usize, space: usize) {
        let done = self.order(process, "reset", &space.to_string()).is_some();
        let epoch = self.epoch_in_the_pool(space);
        assert!(!done || epoch > self.spaces[space].epoch);
        if epoch > self.spaces[space].epoch {
            self.spaces[space] = Space { epoch, known: HashMap::new() };
            self.resets += 1;
        }
    }

    fn epoch_in_the_pool(&self, space: usize) -> u64 {
        let facts: serde_json::Value = serde_json::from_str(&admin::inspect(self.pool.path()).unwrap()).unwrap();
        facts["namespaces"][self.ids[space].id() as usize]["epoch"].as_u64().unwrap()
    }

    /// Leave and come back: what the process had is given up.
    fn reopen(&mut self, process: usize) {
        self.processes[process].begun = None;
        self.order(process, "reopen", "");
    }

    fn arm(&mut self, process: usize) {
        let name = crash_point::names()[self.below(crash_point::names().len())];
        if self.order(process, "arm", name).is_some() {
            self.processes[process].armed = name;
            self.rebuilding |= name == REBUILD;
        }
    }

    fn kill(&mut self, process: usize) {
        self.processes[process].armed = "between two steps";
        self.processes[process].worker.signal(nix::sys::signal::Signal::SIGKILL);
        self.bury(process);
    }

    /// Give everything up, and see whether anything is lost.
    pub fn finish(self) {
        assert_settled(&self.pool);
        let Self { dir, pool, ids, processes, .. } = self;
        processes.into_iter().for_each(|process| process.worker.kill());
        assert_nothing_lost(&pool, &ids);
        drop((pool, dir));
    }
}
