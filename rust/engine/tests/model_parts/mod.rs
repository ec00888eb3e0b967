//! The model: a map, the leases and the reservations that a pool with several members should have.

#![allow(unreachable_pub, reason = "a test module")]

use std::collections::HashMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use pegaflow_engine::checksum::part_checksum;
use pegaflow_engine::{BlockRef, ErrorKind, Key, Namespace, OpenOptions, Pool};

use crate::common::ShmDir;
use crate::kill::blocks::{MAIN, PART_BYTES, POOL_NAME, content, key, namespace, open, options, store_all};
use crate::kill::patience::PATIENCE;
use crate::kill::random::Random;
use crate::kill::settled::{assert_nothing_lost, assert_settled, stat};

pub const MEMBERS: usize = 3;
const GROUP: u64 = 4;
const SHARED_LENGTH: u64 = 4;

/// Keys of one chain of `length` blocks; chains of one group begin alike.
pub fn chain(number: u64, length: u64) -> Vec<Key> {
    let name = |position| if position < SHARED_LENGTH { 1_000_000 + number / GROUP * 100 } else { number * 100 };
    (0..length).map(|position| key(name(position) + position)).collect()
}

struct Lease {
    block: BlockRef,
    key: Key,
    nonce: u64,
}

struct Reservation {
    space: usize,
    block: BlockRef,
    key: Key,
    parent: Option<Key>,
    nonce: u64,
    written: usize,
    epoch: u64,
}

struct Member {
    dir: PathBuf,
    pool: Option<Arc<Pool>>,
    leases: Vec<Lease>,
    reservations: Vec<Reservation>,
}

#[derive(Default)]
struct Space {
    /// What was published of this epoch, with its nonce and its parent. Under pressure some of it is gone.
    known: HashMap<Key, (u64, Option<Key>)>,
    epoch: u64,
}

/// How much there is of everything.
#[derive(Clone, Copy)]
pub struct Shape {
    pub chains: u64,
    pub length: u64,
    /// Leases, and reservations, of one member at a time.
    pub held_max: usize,
    /// All this fits, so nothing of the present epoch is ever evicted.
    pub fits: bool,
    /// Namespaces. With more than one, nobody has a share to speak of: background threads would move extents between
    /// them in a time of their own.
    pub spaces: usize,
    /// Eviction policy of each member.
    pub policies: [&'static str; MEMBERS],
}

fn open_with(dir: &Path, policy: &str) -> Arc<Pool> {
    Pool::open(POOL_NAME, &OpenOptions { policy: Some(policy.to_owned()), ..options(dir) }).unwrap()
}

pub struct Model {
    dir: ShmDir,
    random: Random,
    shape: Shape,
    members: Vec<Member>,
    spaces: Vec<Space>,
    ids: Vec<Namespace>,
    heavy: Option<Arc<Pool>>,
    /// Blocks that members evicted before they were opened anew.
    evicted_before: u64,
    pub published: u64,
    pub resets: u64,
}

impl Model {
    pub fn new(test: &str, seed: u64, shape: Shape) -> Self {
        let dir = ShmDir::new(test);
        let members: Vec<Member> = (0..MEMBERS)
            .map(|number| {
                // The same directory by another name gives this process another row, as another process would have.
                let alias = dir.0.join(format!("member-{number}"));
                symlink(&dir.0, &alias).unwrap();
                let pool = Some(open_with(&alias, shape.policies[number]));
                Member { dir: alias, pool, leases: Vec::new(), reservations: Vec::new() }
            })
            .collect();
        let pool = members[0].pool.as_ref().unwrap();
        let ids: Vec<Namespace> = (0..shape.spaces).map(|space| namespace(pool, MAIN + space as u8)).collect();
        // Both have their extents before the steps begin, since growth takes a time of its own.
        ids.iter().for_each(|ns| {
            let fillers: Vec<Key> = (0..100).map(|number| key(9_000_000 + number)).collect();
            store_all(pool, *ns, &fillers, 1);
            pool.reset(*ns).unwrap();
        });
        let heavy = (shape.spaces > 1).then(|| {
            let alias = dir.0.join("heavy");
            symlink(&dir.0, &alias).unwrap();
            let heavy = Pool::open(POOL_NAME, &OpenOptions { weight: Some(1e6), ..options(&alias) }).unwrap();
            namespace(&heavy, MAIN);
            heavy
        });
        let spaces = (0..shape.spaces).map(|_| Space::default()).collect();
        let random = Random::new(seed);
        Self { dir, random, shape, members, spaces, ids, heavy, evicted_before: 0, published: 0, resets: 0 }
    }

    fn pool(&self, member: usize) -> &Pool {
        self.members[member].pool.as_ref().expect("open between steps")
    }

    /// Blocks evicted by all members, stale ones included.
    pub fn evicted(&self) -> u64 {
        let now: u64 = (0..MEMBERS).map(|member| stat(&self.pool(member).stats(), "blocks_evicted")).sum();
        self.evicted_before + now
    }

    fn below(&mut self, count: usize) -> usize {
        self.random.below(count as u64) as usize
    }

    pub fn step(&mut self) {
        let (member, space) = (self.below(MEMBERS), self.below(self.shape.spaces));
        let length = 1 + self.random.below(self.shape.length);
        let keys = chain(self.random.below(self.shape.chains), length);
        match self.random.below(1000) {
            0..150 => self.look(member, space, &keys),
            150..330 => self.lease(member, space, &keys),
            330..480 => self.release(member),
            480..620 => self.reserve(member, space, &keys),
            620..760 => self.write(member),
            760..900 => self.publish(member),
            900..930 => self.abort(member),
            930..970 => drop(self.pool(member).touch(self.ids[space], &keys).unwrap()),
            970..985 => self.check_reservations(),
            985..990 => self.reopen(member),
            990..995 => self.rebuild(member),
            995..997 => drop(self.pool(member).reap().unwrap()),
            _ => self.reset(member, space),
        }
    }

    fn rebuild(&self, member: usize) {
        // A thread of a pool that grows may have no CPU for longer than anybody waits for it.
        let started = Instant::now();
        while let Err(error) = self.pool(member).rebuild_index() {
            assert!(error.kind() == ErrorKind::Busy && started.elapsed() < PATIENCE, "{error}");
        }
    }

    /// Which of `keys` are there; whatever is there must be known.
    fn present(&self, space: usize, keys: &[Key]) -> Vec<bool> {
        let present = self.pool(0).contains(self.ids[space], keys).unwrap();
        for (key, present) in keys.iter().zip(&present) {
            assert!(!present || self.spaces[space].known.contains_key(key), "a block that nobody published");
        }
        present
    }

    fn look(&mut self, member: usize, space: usize, keys: &[Key]) {
        let present = self.present(space, keys);
        let run = present.iter().take_while(|present| **present).count();
        assert_eq!(self.pool(member).lookup(self.ids[space], keys, 0).unwrap(), run);
        assert_eq!(present.iter().filter(|present| **present).count(), run, "a tail without its head");
        if self.shape.fits {
            let known = keys.iter().filter(|key| self.spaces[space].known.contains_key(key)).count();
            assert_eq!(run, known, "there is room, and something is gone");
        }
    }

    fn lease(&mut self, member: usize, space: usize, keys: &[Key]) {
        let start = self.below(keys.len());
        let stop = start + self.below(keys.len() - start + 1);
        let present = self.present(space, keys);
        let run = present[start..stop].iter().take_while(|present| **present).count();
        let leased = self.pool(member).lease(self.ids[space], keys, start, stop).unwrap();
        assert_eq!(leased.len(), run);
        for (block, key) in leased.into_iter().zip(&keys[start..]) {
            let nonce = self.spaces[space].known[key].0;
            self.members[member].leases.push(Lease { block, key: *key, nonce });
        }
        // A pool whose every block is leased has nothing to evict.
        while self.members[member].leases.len() > self.shape.held_max {
            self.release(member);
        }
    }

    fn release(&mut self, member: usize) {
        if self.members[member].leases.is_empty() {
            return;
        }
        let which = self.below(self.members[member].leases.len());
        let lease = self.members[member].leases.swap_remove(which);
        let space = self.pool(member).space();
        for part in 0..PART_BYTES.len() as u32 {
            let source = space.read_source(lease.block, part).expect("a leased block is readable");
            // SAFETY: leased by this member until a line further down; address and length come from the pool.
            let bytes = unsafe { std::slice::from_raw_parts(source.address, source.bytes) };
            assert_eq!(bytes, content(&lease.key, part, lease.nonce, source.bytes), "not what was stored last");
        }
        self.pool(member).release(&[lease.block]).unwrap();
    }

    fn reserve(&mut self, member: usize, space: usize, keys: &[Key]) {
        if self.members[member].reservations.len() > self.shape.held_max {
            return;
        }
        let before = self.present(space, keys);
        let evict = self.random.chance(80);
        let evicted = self.evicted();
        let reserved = self.pool(member).reserve(self.ids[space], keys, None, evict).unwrap();
        assert!(evict || self.evicted() == evicted);
        let absent: Vec<usize> = (0..keys.len()).filter(|index| !before[*index]).collect();
        let indices: Vec<usize> = reserved.iter().map(|(index, _)| *index).collect();
        assert_eq!(indices, absent[..indices.len()], "absent keys, in order, from the first on");
        for (index, block) in reserved {
            let parent = index.checked_sub(1).map(|before| keys[before]);
            let (nonce, epoch) = (self.random.next(), self.spaces[space].epoch);
            let reservation = Reservation { space, block, key: keys[index], parent, nonce, written: 0, epoch };
            self.members[member].reservations.push(reservation);
        }
        self.check_heads();
    }

    /// Write one more part of the oldest reservations; by any member, as workers do for their leader.
    fn write(&mut self, member: usize) {
        let writer = self.below(MEMBERS);
        let space = self.pool(writer).space();
        for reservation in &mut self.members[member].reservations {
            if reservation.written == PART_BYTES.len() || self.random.chance(10) {
                continue;
            }
            let part = reservation.written as u32;
            let target = space.write_target(reservation.block, part).expect("a reserved block is writable");
            let bytes = content(&reservation.key, part, reservation.nonce, target.bytes);
            // SAFETY: reserved and written by nobody else; address and length come from the pool.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.address, bytes.len()) };
            assert!(space.mark_part(reservation.block, part, Some(part_checksum(part, &bytes))));
            reservation.written += 1;
        }
    }

    fn publish(&mut self, member: usize) {
        let count = self.below(self.members[member].reservations.len() + 1);
        let batch: Vec<Reservation> = self.members[member].reservations.drain(..count).collect();
        for reservation in batch {
            let Reservation { space, block, key, parent, nonce, written, epoch } = reservation;
            let there = |key: &Key| self.pool(0).contains(self.ids[space], &[*key]).unwrap()[0];
            let expected = written == PART_BYTES.len()
                && epoch == self.spaces[space].epoch
                && parent.is_none_or(|parent| there(&parent))
                && !there(&key);
            let published = self.pool(member).publish(&[block]).unwrap();
            assert_eq!(published, usize::from(expected));
            if expected {
                self.spaces[space].known.insert(key, (nonce, parent));
                self.published += 1;
            }
            assert!(self.pool(member).space().write_target(block, 0).is_none(), "published or freed");
        }
    }

    fn abort(&mut self, member: usize) {
        let count = self.below(self.members[member].reservations.len() + 1);
        let batch: Vec<BlockRef> = self.members[member].reservations.drain(..count).map(|r| r.block).collect();
        self.pool(member).abort(&batch).unwrap();
        assert_eq!(self.pool(member).publish(&batch).unwrap(), 0);
    }

    fn reset(&mut self, member: usize, space: usize) {
        let before = self.spaces[space].epoch;
        self.pool(member).reset(self.ids[space]).unwrap();
        self.spaces[space] = Space { known: HashMap::new(), epoch: before + 1 };
        self.resets += 1;
    }

    /// Leave and come back: what the member leased and reserved is given up.
    fn reopen(&mut self, member: usize) {
        self.evicted_before += stat(&self.pool(member).stats(), "blocks_evicted");
        let policy = self.shape.policies[member];
        let member = &mut self.members[member];
        member.leases.clear();
        member.reservations.clear();
        member.pool = None;
        member.pool = Some(open_with(&member.dir, policy));
    }

    fn check_reservations(&self) {
        let expected: usize = self.members.iter().map(|member| member.reservations.len()).sum();
        let counted: u64 =
            self.ids.iter().map(|ns| stat(&self.pool(0).namespace_stats(*ns).unwrap(), "blocks_reserved")).sum();
        assert_eq!(counted, expected as u64);
    }

    /// No block is there whose parent is gone.
    fn check_heads(&self) {
        let uncertain = || stat(&self.pool(0).stats(), "lookups_uncertain");
        let before = uncertain();
        for (space, id) in self.spaces.iter().zip(&self.ids) {
            let keys: Vec<Key> = space.known.keys().copied().collect();
            let present = self.pool(0).contains(*id, &keys).unwrap();
            let there: HashMap<Key, bool> = keys.iter().copied().zip(present).collect();
            if uncertain() != before {
                return; // a background thread rebuilds the index, and this one waited no longer
            }
            for (key, (_, parent)) in &space.known {
                let whole = parent.is_none_or(|parent| there[&parent]);
                assert!(!there[key] || whole, "a block is there whose parent is gone");
            }
        }
    }

    /// Give everything up, and see whether anything is lost.
    pub fn finish(mut self) {
        self.check_heads();
        self.check_reservations();
        assert_settled(self.pool(0));
        for member in 0..MEMBERS {
            while !self.members[member].leases.is_empty() {
                self.release(member);
            }
        }
        self.members.clear();
        self.heavy = None;
        let pool = open(&self.dir.0);
        assert_nothing_lost(&pool, &self.ids);
    }
}
