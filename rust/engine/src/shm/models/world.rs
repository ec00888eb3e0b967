//! What a model consists of: a small pool with one namespace and one extent, and processes that do things with it.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use loom::cell::UnsafeCell;

use crate::key::{BlockRef, Key};
use crate::model_words::{Died, Fences, be_the_kernel, die_at, set_fences, start_over};
use crate::shm::control::Control;
use crate::shm::core::Core;
use crate::shm::evict::name_of;
use crate::shm::extent::Extent;
use crate::shm::file::Place;
use crate::shm::geometry::Geometry;
use crate::shm::grow::Grown;
use crate::shm::home::Home;
use crate::shm::liveness::{LockFile, Locks};
use crate::shm::models::memory::Memory;
use crate::shm::namespace::{Identity, Namespace};
use crate::shm::process::register;
use crate::shm::publish::Published;
use crate::shm::reserve::Pending;
use crate::shm::rows::load4;
use crate::shm::state::{SlotState, State, sealed_word};
use crate::sync::Relaxed;

const SEGMENT_BYTES: u64 = 64 << 10;

/// Run `model` in every interleaving with at most so many preemptions, `PEGAFLOW_LOOM_PREEMPTIONS` more, and say how
/// many executions that were. What the model returns must be one of `outcomes`, and each without a question mark must
/// happen: so a model in which nothing meets is a failure. `PEGAFLOW_LOOM_EXECUTIONS_MAX` ends a run early.
pub(super) fn explore(name: &str, preemptions: usize, outcomes: &[&'static str], model: fn() -> &'static str) {
    let bound = preemptions + number_from("PEGAFLOW_LOOM_PREEMPTIONS").unwrap_or(0);
    let executions_max = number_from("PEGAFLOW_LOOM_EXECUTIONS_MAX");
    for fences in [Fences::Loads, Fences::Stores] {
        set_fences(fences);
        let started = std::time::Instant::now();
        let seen: Arc<Mutex<BTreeMap<&str, usize>>> = Arc::default();
        let counted = Arc::clone(&seen);
        let mut builder = loom::model::Builder::new();
        builder.max_branches = 100_000;
        builder.preemption_bound = Some(bound);
        builder.max_permutations = executions_max;
        builder.checkpoint_interval = 100;
        builder.check(move || {
            start_over();
            let outcome = model();
            *counted.lock().expect("no model fails while it counts").entry(outcome).or_default() += 1;
        });
        let seen = seen.lock().expect("no model fails while it counts");
        let (executions, seconds) = (seen.values().sum::<usize>(), started.elapsed().as_secs_f32());
        let whole = executions_max.is_none_or(|max| executions + 1 < max);
        let extent = if whole { "all" } else { "the first" };
        println!(
            "loom: {name}: {extent} {executions} executions ({bound} preemptions, {fences:?}), {seconds:.1} s: {seen:?}"
        );
        let known = |outcome: &&str| outcomes.iter().any(|known| known.trim_end_matches('?') == *outcome);
        assert!(seen.keys().all(|outcome| known(outcome)), "{name} ends in none of {outcomes:?}");
        let missing = outcomes.iter().find(|outcome| !outcome.ends_with('?') && !seen.contains_key(*outcome));
        assert!(!whole || missing.is_none(), "{name} never ends in {missing:?}");
    }
}

fn number_from(variable: &str) -> Option<usize> {
    std::env::var(variable).ok().filter(|text| !text.is_empty()).map(|text| text.parse().expect("a number"))
}

/// Files of a pool, and what the kernel knows of its processes.
pub(super) struct World {
    memory: Arc<Memory>,
    locks: Arc<Locks>,
    /// Contents of the slots: loom sees it if one is read or written while another writes it.
    bytes: Arc<Vec<UnsafeCell<u64>>>,
    keys: [Key; 4],
}

/// One process, on a thread of its own. It does not leave the pool when it goes out of scope.
pub(super) struct Process {
    pub(super) core: Core,
    pub(super) ns: Namespace,
    bytes: Arc<Vec<UnsafeCell<u64>>>,
    locks: Arc<Locks>,
    pub(super) keys: [Key; 4],
}

impl World {
    /// A pool of `slots` slots, all of one namespace, and its first process.
    pub(super) fn new(slots: u64) -> (Self, Process) {
        let geometry = Geometry { pool_bytes: 2 * SEGMENT_BYTES, segment_bytes: SEGMENT_BYTES, slots_max: slots };
        let keys = keys_of_one_bucket(&geometry);
        let bytes = (0..slots).map(|_| UnsafeCell::new(0)).collect();
        let world = Self {
            memory: Arc::new(Memory::new(geometry)),
            locks: Arc::new(Locks::new()),
            bytes: Arc::new(bytes),
            keys,
        };
        world.memory.header[0].clock.store(1 << 40, Relaxed);
        let first = world.process();
        // So that there is a middle between the oldest time, that of the namespace, and now.
        world.memory.header[0].clock.store((1 << 40) + 1000, Relaxed);
        assert_eq!(first.core.grow(first.ns).expect("there is room"), Grown::Yes);
        (world, first)
    }

    /// Another process.
    pub(super) fn process(&self) -> Process {
        let control = Control::of(Arc::clone(&self.memory));
        let number = 1 + crate::limits::PROCESSES_MAX as u64 - self.free_rows();
        let lock_file = LockFile::of(&self.locks, number).expect("a file of its own");
        let me = register(&control, &lock_file, "").expect("a free row").me;
        let home = Home::beside(&Place::Anonymous);
        let core = Core::new("model", Place::Anonymous, home, control, lock_file, me);
        let ns = core.namespace(&[7; 32], 0, &[64], "").expect("a free row");
        let (bytes, locks) = (Arc::clone(&self.bytes), Arc::clone(&self.locks));
        Process { core, ns, bytes, locks, keys: self.keys }
    }

    /// The process of description `number` is gone, between two steps: the kernel drops its locks.
    pub(super) fn kill(&self, number: u64) {
        self.locks.drop_all_of(number);
    }

    fn free_rows(&self) -> u64 {
        self.memory.processes.iter().filter(|row| row.state.load(Relaxed) as u8 == 0).count() as u64
    }
}

/// Keys of namespace 0 that share a chain.
fn keys_of_one_bucket(geometry: &Geometry) -> [Key; 4] {
    let bucket = |key: &Key| key.spread(0) as usize & (geometry.buckets() - 1);
    let all = (0u8..).map(|number| Key::new(&[number]).expect("one byte"));
    let mut same = all.filter(|key| bucket(key) == 0);
    std::array::from_fn(|_| same.next().expect("one key in a few has the bucket"))
}

/// Contents of a block: which key, and by whom.
pub(super) fn content(key: &Key, by: u64) -> u64 {
    u64::from(key.to_bytes()[0]) << 8 | by
}

impl Process {
    /// Its description of the control file.
    pub(super) fn number(&self) -> u64 {
        self.core.lock_file.number()
    }

    /// Reserve a slot for `key`, evicting if there is no other way.
    pub(super) fn reserve(&self, key: &Key) -> Option<BlockRef> {
        let taken = self.core.take_slot(self.ns, self.core.me.row, true)?;
        Some(self.core.name_slot(taken, &self.identity(), key))
    }

    /// Write a reserved block.
    pub(super) fn fill(&self, block: BlockRef, content: u64) {
        // SAFETY: loom looks at every access for one that is going on at the same time.
        self.bytes[block.slot() as usize].with_mut(|bytes| unsafe { *bytes = content });
        let marked = self.core.mark_part_written(block, 0, Some(content)).expect("the slot is there");
        assert!(marked, "a reserved slot is its owner's");
    }

    /// Publish a written block; what is not published goes free.
    pub(super) fn publish(&self, block: BlockRef, key: &Key, parent: Option<Key>, replace: bool) -> Published {
        let outcome = self.core.publish_one(
            block,
            &Pending { ns: self.ns, key: *key, parent, account: self.core.me.row, used: false },
            replace,
        );
        if outcome != Published::Visible {
            self.core.give_back(block.slot(), self.core.reserved_state(block));
        }
        outcome
    }

    /// Reserve, write and publish. `None` without a slot.
    pub(super) fn store(&self, key: &Key, parent: Option<Key>, by: u64) -> Option<Published> {
        let block = self.reserve(key)?;
        self.fill(block, content(key, by));
        Some(self.publish(block, key, parent, false))
    }

    pub(super) fn identity(&self) -> Identity {
        self.core.identity(self.ns).expect("the namespace is there")
    }

    /// The sealed block of `key`. A reader that was kept from knowing fails the model.
    pub(super) fn find(&self, key: &Key) -> Option<BlockRef> {
        self.core.find_surely(&self.identity(), key).expect("a walk that nobody stops comes to an end")
    }

    /// Pin `key`, if it is there.
    pub(super) fn lease(&self, key: &Key) -> Option<BlockRef> {
        self.core.lease(self.ns, &[*key], 0, 1).expect("the namespace is there").first().copied()
    }

    /// Bytes of a leased block.
    pub(super) fn read(&self, block: BlockRef) -> u64 {
        // SAFETY: as in `fill`.
        self.bytes[block.slot() as usize].with(|bytes| unsafe { *bytes })
    }

    pub(super) fn release(&self, block: BlockRef) {
        self.core.unpin(block).expect("it is leased");
    }

    /// Lease, compare and release. Returns who stored what is there.
    pub(super) fn check(&self, key: &Key) -> Option<u64> {
        let block = self.lease(key)?;
        let found = self.read(block);
        assert_eq!(found >> 8, content(key, 0) >> 8, "the bytes of another key");
        assert_eq!(found, self.read(block), "leased bytes change");
        self.release(block);
        Some(found & 0xFF)
    }

    /// Store `key` anew, whatever is there.
    pub(super) fn replace(&self, key: &Key, by: u64) -> Published {
        let block = self.reserve(key).expect("a slot is free");
        self.fill(block, content(key, by));
        self.publish(block, key, None, true)
    }

    /// Slots that are free.
    pub(super) fn free_slots(&self) -> usize {
        let state = |slot| self.core.control.slot(slot).map(|header| header.state.load(Relaxed) as u8);
        let extents = self.core.extents(self.ns);
        extents.iter().flat_map(Extent::slots).filter(|slot| state(*slot) == Some(State::Free as u8)).count()
    }

    /// The invariants of `docs/shm-format.md`, while nobody is at work.
    pub(super) fn assert_whole(&self) {
        let control = &self.core.control;
        for stripe in control.stripes() {
            assert_eq!((stripe.lock.load(Relaxed), stripe.version.load(Relaxed) % 2), (0, 0), "a stripe is in use");
        }
        assert_eq!(control.header().structure_lock.load(Relaxed), 0, "the structure lock is held");
        assert_eq!(control.header().rebuild_wanted.load(Relaxed), 0, "the index is damaged");
        let mut linked = Vec::new();
        for head in control.buckets() {
            let mut link = head.load(Relaxed);
            while let Some(slot) = link.checked_sub(1) {
                assert!(!linked.contains(&slot), "slot {slot} is on two chains, or twice on one");
                linked.push(slot);
                link = control.slot(slot).expect("a chain leads to slots").next.load(Relaxed);
            }
        }
        let mut names = Vec::new();
        for slot in self.core.extents(self.ns).iter().flat_map(Extent::slots) {
            let header = control.slot(slot).expect("an extent has headers");
            assert_eq!(header.leases[0].load(Relaxed), 0, "slot {slot} is leased by nobody");
            let state = SlotState::decode(header.state.load(Relaxed)).expect("a possible state");
            let hinted = control.free_words()[0].load(Relaxed) >> slot & 1 == 1;
            match state.state {
                State::Free => assert!(hinted && !linked.contains(&slot), "slot {slot} is free and nobody finds it"),
                State::Sealed => {
                    assert!(linked.contains(&slot), "sealed slot {slot} is not in the index");
                    let name = name_of(header).expect("a possible key");
                    assert!(!names.contains(&name), "two sealed slots of one key");
                    names.push(name);
                    assert_eq!(header.parts_written.load(Relaxed), 1, "a sealed slot is whole");
                    // What a reset made stale is in nobody's way.
                    if load4(&header.fingerprint) == self.identity().fingerprint {
                        self.assert_below_parent(slot, BlockRef(header.parent.load(Relaxed)));
                    }
                }
                other => panic!("slot {slot} stays {other:?}"),
            }
        }
    }

    fn assert_below_parent(&self, slot: u32, parent: BlockRef) {
        let control = &self.core.control;
        let stamp = control.stamp(slot).load(Relaxed);
        assert_ne!(stamp, 0, "sealed slot {slot} can never be evicted");
        if parent.0 != 0 {
            let head = control.slot(parent.slot()).expect("a parent has a slot").state.load(Relaxed);
            assert_eq!(head, sealed_word(parent.generation()), "slot {slot} has lost the block before it");
            assert!(
                control.stamp(parent.slot()).load(Relaxed) > stamp,
                "slot {slot} would outlive the block before it"
            );
        }
    }

    /// Do something and die at the crash point `name`; the kernel drops the locks.
    pub(super) fn dies(self, name: &'static str, what: impl FnOnce(&Self)) {
        die_at(name);
        let outcome = catch_unwind(AssertUnwindSafe(|| what(&self)));
        let payload = outcome.expect_err("the point was never reached");
        assert!(payload.is::<Died>(), "it did not die of the crash point");
        let number = self.number();
        let locks = Arc::clone(&self.locks);
        drop(self);
        be_the_kernel();
        locks.drop_all_of(number);
    }
}
