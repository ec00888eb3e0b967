//! Workloads that pass each crash point: arm it, do what leads there, end well if it was not reached. They get along
//! with whatever is in the pool already, dead and stopped siblings included.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pegaflow_engine::limits::OBJECT_POOL_BYTES_MIN;
use pegaflow_engine::objects::{ObjectStore, ObjectStoreOptions, ValueKind};
use pegaflow_engine::traffic::{KeyHash, Prompt};
use pegaflow_engine::{BlockRef, ErrorKind, Key, Member, Namespace, Pool, admin, crash_point};

use crate::blocks::{
    MAIN, PART_BYTES, POOL_NAME, check_chain, fingerprint_of, keys, open, open_lru, store_chain, value_of,
};
use crate::forge::Forge;
use crate::{lost_lock, reaper};

/// Longest try to get to a point. Only who is in the way of it for good makes it so long, and then all tries are.
const TRY_MAX: Duration = Duration::from_secs(5);
/// Passes over two chains until a pool that does not grow any more is as full of them as it gets.
const FILLS_MAX: usize = 20;
/// Namespaces beside the main one: with it more than the pool has extents.
const SPACES: u64 = 5;

/// One try to get to one point.
pub struct Try {
    pub dir: PathBuf,
    name: String,
    action: String,
    /// Makes the keys of this try different from those of all others.
    pub seed: u64,
    /// It loses its lock on the way there, without knowing.
    pub loses_lock: bool,
    started: Instant,
}

/// Get to the point `name`, and be killed or stopped there.
pub fn run(dir: &Path, name: &str, action: &str, seed: u64) {
    Try::new(dir, name, action, seed).run();
}

/// Lose the lock, get to the point `name`, and be stopped there.
pub fn run_without_lock(dir: &Path, name: &str, seed: u64) {
    Try { loses_lock: true, ..Try::new(dir, name, "stop", seed) }.run();
}

impl Try {
    fn new(dir: &Path, name: &str, action: &str, seed: u64) -> Self {
        let (name, action) = (name.to_owned(), action.to_owned());
        Self { dir: dir.to_owned(), name, action, seed, loses_lock: false, started: Instant::now() }
    }

    pub fn arm(&self) {
        if self.loses_lock {
            // Who reaps holds the locks of the dead too, and growing needs the file.
            let reaps = self.name.starts_with("reap.") || self.name == "retire.reopened";
            if reaps { lost_lock::lose_all_locks() } else { lost_lock::lose_only_the_lock() }
        }
        crash_point::arm(&self.name, &self.action).unwrap();
    }

    fn is_late(&self) -> bool {
        self.started.elapsed() > TRY_MAX
    }

    /// Keys of this try alone.
    fn keys(&self, count: u64) -> Vec<Key> {
        let first = (1 << 41) + (self.seed << 10);
        keys(first..first + count)
    }

    fn run(&self) {
        let (family, step) = self.name.split_once('.').unwrap();
        match family {
            "create" | "gone" => self.register(),
            "remove" => self.remove(),
            "process" if matches!(step, "reclaimed" | "inherited") => self.inherit(),
            "process" if matches!(step, "locked" | "filled" | "registered") => self.register(),
            "takeover" | "reap" => reaper::run(self, step),
            "retire" if step == "reopened" => reaper::run(self, step),
            "orphans" if step != "dropped" => reaper::run(self, step),
            "quarantine" if step != "given_up" => self.leave_quarantine(step),
            "chain" | "replace" | "doom" => self.replace(),
            "ssd" => crate::tier::point(self, step),
            "traffic" if matches!(step, "file_made" | "linked") => self.make_statistics(),
            // By the default policy new blocks are older than what was used: the turn of the leased one would not come,
            // and the block that is stored again would not survive.
            "evict" if step == "restored" => self.evict(&open_lru(&self.dir), true),
            "rebuild" if step == "renamed" => self.rebuild(&open_lru(&self.dir), true),
            _ => self.run_in(&open(&self.dir), family, step),
        }
    }

    fn run_in(&self, pool: &Arc<Pool>, family: &str, step: &str) {
        match family {
            "process" if step == "joined" => self.join(pool),
            "process" => {
                self.arm();
                pool.set_device_writes().unwrap();
            }
            "namespace" => {
                self.arm();
                self.new_namespace(pool);
            }
            "retire" if matches!(step, "copied" | "moving" | "linked" | "sealed") => self.move_blocks(pool),
            "grow" | "drop" | "retire" => self.starve(pool),
            "reserve" if matches!(step, "unhinted" | "claimed") => self.take_a_free_slot(pool),
            "reserve" if step == "recycled" => self.evict(pool, false),
            "reserve" | "part" | "publish" => self.publish(pool),
            "lease" | "touch" => self.read(pool),
            "evict" => self.evict(pool, false),
            "free" | "quarantine" => self.give_up_a_slot(pool, family),
            "orphans" => self.drop_an_orphan(pool),
            "traffic" => self.count(pool, step == "emptied"),
            "reset" => self.reset(pool),
            "rebuild" => self.rebuild(pool, step == "doomed"),
            other => panic!("no workload for the crash points of {other}"),
        }
    }

    /// The namespace of fingerprint `byte`, unless a stopped sibling is in the way for too long.
    fn space(&self, pool: &Pool, byte: u8) -> Namespace {
        loop {
            match pool.namespace(&[byte; 32], 0, &PART_BYTES, "kill tests") {
                Ok(ns) => return ns,
                Err(error) if error.kind() == ErrorKind::Busy && !self.is_late() => {}
                Err(error) if error.kind() == ErrorKind::Busy => std::process::exit(0),
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Store blocks without parents, each in its turn; what finds no slot in time is left out.
    fn store(&self, pool: &Pool, ns: Namespace, keys: &[Key], limit: Duration) {
        for key in keys {
            let started = Instant::now();
            while store_chain(pool, ns, &[*key], self.seed) == 0 && !pool.contains(ns, &[*key]).unwrap()[0] {
                if started.elapsed() > limit {
                    return;
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    fn main_with(&self, pool: &Pool, count: u64) -> (Namespace, Vec<Key>) {
        let (ns, keys) = (self.space(pool, MAIN), self.keys(count));
        self.store(pool, ns, &keys[..1], TRY_MAX);
        (ns, keys)
    }

    fn register(&self) {
        self.arm();
        open(&self.dir);
    }

    fn inherit(&self) {
        if Forge::open(&self.dir).is_none() {
            open(&self.dir);
        }
        Forge::open(&self.dir).unwrap().fill_process_table();
        self.register();
    }

    fn join(&self, pool: &Pool) {
        let facts: serde_json::Value = serde_json::from_str(&admin::inspect(pool.path()).unwrap()).unwrap();
        let me = pool.member().unwrap();
        let others = facts["processes"].as_array().unwrap().iter().map(|process| Member {
            row: process["row"].as_u64().unwrap() as u32,
            epoch: process["epoch"].as_u64().unwrap(),
        });
        let nobody = Member { row: (me.row + 1) % 128, epoch: 1 << 40 };
        let leader = others.into_iter().find(|member| *member != me).unwrap_or(nobody);
        self.arm();
        if let Err(error) = pool.join(leader) {
            assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
        }
    }

    fn new_namespace(&self, pool: &Pool) {
        while let Err(error) = pool.namespace(&fingerprint_of(self.seed), 1, &PART_BYTES, "new") {
            assert!(matches!(error.kind(), ErrorKind::Busy | ErrorKind::Full), "{error}");
            if self.is_late() || error.kind() == ErrorKind::Full {
                return;
            }
        }
    }

    /// More namespaces than extents: whoever has none takes one from another.
    fn starve(&self, pool: &Pool) {
        let spaces: Vec<Namespace> = (1..=SPACES).map(|space| self.space(pool, MAIN + space as u8)).collect();
        self.arm();
        for (turn, key) in self.keys(2 * SPACES).iter().enumerate() {
            let ns = spaces[(self.seed + turn as u64) as usize % spaces.len()];
            self.store(pool, ns, &[*key], Duration::from_millis(300));
        }
    }

    /// A namespace has everything, in each extent blocks of two chains; one chain is touched last. When another
    /// namespace gets an extent, blocks of the one chain go, and those of the other move.
    fn move_blocks(&self, pool: &Pool) {
        let (full, keys) = (self.space(pool, MAIN + 20), self.keys(220));
        let (cold, warm) = keys.split_at(110);
        // All of them, unless another namespace has an extent that it need not give back. The thread that makes room
        // may take a while.
        let mut fills = 0;
        while fills < FILLS_MAX && !self.is_late() {
            if check_chain(pool, full, cold) + check_chain(pool, full, warm) == keys.len() {
                break;
            }
            if may_grow(pool) {
                std::thread::sleep(Duration::from_micros(200));
            } else {
                fills += 1;
            }
            for length in (10..=110).step_by(10) {
                store_chain(pool, full, &cold[..length], self.seed);
                store_chain(pool, full, &warm[..length], self.seed);
            }
        }
        let starving = self.space(pool, MAIN + 21);
        self.arm();
        self.store(pool, starving, &keys[..1], TRY_MAX);
    }

    fn take_a_free_slot(&self, pool: &Pool) {
        let (ns, keys) = self.main_with(pool, 3);
        let reserved = pool.reserve(ns, &keys[1..2], None, true).unwrap();
        pool.abort(&blocks_of(&reserved)).unwrap();
        self.arm();
        let reserved = pool.reserve(ns, &keys[2..3], None, true).unwrap();
        pool.abort(&blocks_of(&reserved)).unwrap();
    }

    /// Chains below one block until one gets somewhere: a stopped sibling may hold the lock that the next one needs.
    fn publish(&self, pool: &Pool) {
        let (ns, keys) = self.main_with(pool, 1 + 3 * 32);
        self.arm();
        for below in keys[1..].chunks(3) {
            let chain = [&keys[..1], below].concat();
            if store_chain(pool, ns, &chain, self.seed) > 0 || self.is_late() {
                return;
            }
        }
    }

    fn read(&self, pool: &Pool) {
        let (ns, keys) = self.main_with(pool, 4);
        store_chain(pool, ns, &keys, self.seed);
        self.arm();
        check_chain(pool, ns, &keys);
        pool.touch(ns, &keys).unwrap();
    }

    /// Store until something has to go; with `leased`, until its turn comes to a block that we lease.
    fn evict(&self, pool: &Pool, leased: bool) {
        let (ns, keys) = (self.space(pool, MAIN), self.keys(1000));
        let mut held = Vec::new();
        if leased {
            self.store(pool, ns, &keys[..1], TRY_MAX);
            held = pool.lease(ns, &keys, 0, 1).unwrap();
        }
        self.arm();
        let enough = if leased { 600 } else { 3 };
        for key in &keys {
            if self.is_late() || evicted(pool) > enough {
                break;
            }
            self.store(pool, ns, &[*key], Duration::from_millis(300));
        }
        pool.release(&held).unwrap();
    }

    fn give_up_a_slot(&self, pool: &Pool, how: &str) {
        let (ns, keys) = self.main_with(pool, 2);
        let blocks = blocks_of(&pool.reserve(ns, &keys[1..2], None, true).unwrap());
        self.arm();
        if how == "free" { pool.abort(&blocks) } else { pool.quarantine(&blocks) }.unwrap();
    }

    /// Leave with a slot that a device may still write; come back when nobody does any more.
    fn leave_quarantine(&self, step: &str) {
        let pool = open(&self.dir);
        let (ns, keys) = self.main_with(&pool, 2);
        pool.set_device_writes().unwrap();
        pool.reserve(ns, &keys[1..2], None, true).unwrap();
        if step == "waiting" {
            self.arm();
        }
        drop(pool);
        Forge::open(&self.dir).unwrap().end_grace_periods();
        self.arm();
        let pool = open(&self.dir);
        while pool.stats().iter().all(|(name, count)| *name != "slots_reaped" || *count == 0) && !self.is_late() {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn drop_an_orphan(&self, pool: &Pool) {
        let (ns, keys) = self.main_with(pool, 2);
        store_chain(pool, ns, &keys, self.seed);
        self.arm();
        Forge::open(&self.dir).unwrap().make_orphan(&keys[1]);
        pool.reap().unwrap();
    }

    /// The first namespace that is opened in a pool brings its statistics.
    fn make_statistics(&self) {
        let pool = open(&self.dir);
        self.arm();
        self.space(&pool, MAIN);
    }

    /// Count a prompt; with `often`, so many times that the places of what is followed are used up.
    fn count(&self, pool: &Pool, often: bool) {
        let ns = self.space(pool, MAIN);
        let keys: Vec<_> = self.keys(200).iter().map(KeyHash::from).collect();
        self.arm();
        for _ in 0..if often { 2000 } else { 20 } {
            pool.note_prompt(ns, &keys, &Prompt::default()).unwrap();
            if self.is_late() {
                return;
            }
        }
    }

    fn reset(&self, pool: &Pool) {
        let ns = self.space(pool, MAIN + 1);
        self.store(pool, ns, &self.keys(4), Duration::from_millis(300));
        self.arm();
        pool.reset(ns).unwrap();
    }

    fn rebuild(&self, pool: &Pool, twice: bool) {
        let (ns, keys) = self.main_with(pool, 2);
        store_chain(pool, ns, &keys, self.seed);
        self.arm();
        if twice {
            // Nobody finds the first block, so it is stored again.
            Forge::open(&self.dir).unwrap().empty_index();
            store_chain(pool, ns, &keys[..1], self.seed + 1);
        }
        while let Err(error) = pool.rebuild_index() {
            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
            if self.is_late() {
                return;
            }
        }
    }

    /// A value of several slots in place of another.
    fn replace(&self) {
        let options = ObjectStoreOptions {
            shm_dir: self.dir.clone(),
            pool_bytes: Some(OBJECT_POOL_BYTES_MIN),
            evict: true,
            ..ObjectStoreOptions::default()
        };
        // Opened first for its geometry; the store attaches to the same pool.
        let _pool = open(&self.dir);
        let Some(store) = self.in_time(|| ObjectStore::open(Some(POOL_NAME), &options)) else { return };
        let key = format!("value {}", self.seed % 8);
        let put = || self.in_time(|| store.put(&key, ValueKind::Bytes, &value_of(&key, self.seed)));
        put();
        self.arm();
        put();
        if let Some(value) = self.in_time(|| store.get(&key)).flatten() {
            assert!(crate::blocks::is_value_of(&key, &value.to_vec().unwrap()), "a foreign value");
        }
    }

    /// What it gives, unless others are in the way for too long.
    fn in_time<T>(&self, mut work: impl FnMut() -> pegaflow_engine::Result<T>) -> Option<T> {
        loop {
            match work() {
                Ok(result) => return Some(result),
                Err(error) if matches!(error.kind(), ErrorKind::Busy | ErrorKind::Full) => {
                    if self.is_late() {
                        return None;
                    }
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn remove(&self) {
        let pool = open(&self.dir);
        self.main_with(&pool, 1);
        let path = pool.path().to_owned();
        drop(pool);
        self.arm();
        if let Err(error) = admin::remove(&path, true) {
            assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        }
    }
}

/// Whether there are segments that are not in use yet.
fn may_grow(pool: &Pool) -> bool {
    let facts: serde_json::Value = serde_json::from_str(&admin::inspect(pool.path()).unwrap()).unwrap();
    ["free", "creating"].iter().any(|state| facts["segments"][*state] != 0)
}

fn evicted(pool: &Pool) -> u64 {
    pool.stats().iter().find(|(name, _)| *name == "blocks_evicted").unwrap().1
}

fn blocks_of(reserved: &[(usize, BlockRef)]) -> Vec<BlockRef> {
    reserved.iter().map(|(_, block)| *block).collect()
}
