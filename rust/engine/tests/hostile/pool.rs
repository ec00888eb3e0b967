//! A pool whose words are damaged before and between the operations of a process that uses all of it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pegaflow_engine::{BlockRef, Key, Member, Namespace, OpenOptions, Pool, admin};

use super::bytes::Bytes;
use super::files::Files;

const PART_BYTES: [u64; 2] = [512, 1024];
const SEGMENT_BYTES: u64 = 64 << 10;
const SUPERBLOCK_BYTES: u64 = 128;
const STEPS_MAX: usize = 48;
const HELD_MAX: usize = 64;

pub fn options(dir: &Path) -> OpenOptions {
    let (pool_bytes, segment_bytes) = (Some(8 * SEGMENT_BYTES), Some(SEGMENT_BYTES));
    OpenOptions { shm_dir: dir.to_owned(), pool_bytes, segment_bytes, ..OpenOptions::default() }
}

fn keys(first: usize, count: usize) -> Vec<Key> {
    let key = |number: usize| Key::new(&[&[7; 24], &number.to_le_bytes()[..]].concat()).unwrap();
    (first..first + count).map(key).collect()
}

fn namespace(pool: &Pool, byte: u8) -> pegaflow_engine::Result<Namespace> {
    pool.namespace(&[byte; 32], 0, &PART_BYTES, "hostile")
}

pub struct Target {
    dir: PathBuf,
    files: Files,
    control: PathBuf,
    words: u64,
    /// Offsets of words that are not zero.
    used: Vec<u64>,
}

/// A process at work.
struct Session {
    pool: Arc<Pool>,
    ns: Namespace,
    leased: Vec<BlockRef>,
    reserved: Vec<BlockRef>,
}

impl Target {
    pub fn new(dir: &Path) -> Self {
        let pool = Pool::open("p", &options(dir)).unwrap();
        let mut session = Session::new(Arc::clone(&pool)).unwrap();
        for (space, first, count) in [(9, 0, 30), (9, 100, 50), (10, 0, 10)] {
            session.ns = namespace(&pool, space).unwrap();
            session.store_for_sure(&keys(first, count));
        }
        // The files say that a process uses them, which is gone: one with leases and reservations.
        session.ns = namespace(&pool, 9).unwrap();
        session.leased = pool.lease(session.ns, &keys(0, 5), 0, 5).unwrap();
        session.reserve(&keys(200, 5), false);
        assert_eq!((session.leased.len(), session.reserved.len()), (5, 5));
        let (files, control) = (Files::of(pool.path()), pool.path().join("control"));
        let contents = files.contents(&control);
        let words = contents.chunks_exact(8).enumerate().filter(|(_, word)| **word != [0; 8]);
        let used: Vec<u64> = words.map(|(index, _)| index as u64 * 8).filter(|at| *at >= SUPERBLOCK_BYTES).collect();
        let words = contents.len() as u64 / 8;
        Self { dir: dir.to_owned(), files, control, words, used }
    }

    pub fn run(&mut self, data: &[u8]) {
        let mut bytes = Bytes::new(data);
        self.files.restore();
        for _ in 0..bytes.byte() % 12 {
            self.spoil(&mut bytes);
        }
        if bytes.byte() % 4 == 1 {
            self.files.spoil_length(&mut bytes);
        }
        let mut session = self.attach();
        for _ in 0..STEPS_MAX {
            if bytes.is_empty() {
                break;
            }
            match (bytes.byte() % 24, &mut session) {
                (0..4, _) => self.spoil(&mut bytes),
                (4, _) => self.look_from_outside(&mut bytes),
                (5, _) => {
                    // Closed before it is opened again, else it would be the same one.
                    drop(session);
                    session = self.attach();
                }
                (step, Some(session)) => session.step(step, &mut bytes),
                (_, None) => session = self.attach(),
            }
        }
        drop(session);
        self.look_from_outside(&mut bytes);
    }

    fn attach(&self) -> Option<Session> {
        Session::new(Pool::open("p", &options(&self.dir)).ok()?)
    }

    /// Overwrite one word, mostly one that is in use.
    fn spoil(&self, bytes: &mut Bytes<'_>) {
        let at = if !bytes.one_in(8) {
            self.used[bytes.below(self.used.len())]
        } else {
            SUPERBLOCK_BYTES + bytes.word() % (self.words - SUPERBLOCK_BYTES / 8) * 8
        };
        self.files.spoil(&self.control, at, bytes);
    }

    fn look_from_outside(&self, bytes: &mut Bytes<'_>) {
        match bytes.byte() % 4 {
            0 => drop(admin::verify(&self.files.dir, true, &mut |_, _| {})),
            1 => drop(admin::inspect(&self.files.dir)),
            2 => drop(admin::list_pools(&self.dir)),
            _ => drop(admin::reap(&self.files.dir)),
        }
    }
}

impl Session {
    fn new(pool: Arc<Pool>) -> Option<Self> {
        let ns = namespace(&pool, 9).ok()?;
        Some(Self { pool, ns, leased: Vec::new(), reserved: Vec::new() })
    }

    fn step(&mut self, step: u8, bytes: &mut Bytes<'_>) {
        let (first, count) = (bytes.below(300), 1 + bytes.below(40));
        let keys = keys(first, count);
        match step {
            6 => drop(self.pool.lookup(self.ns, &keys, first % count)),
            7 => drop(self.pool.contains(self.ns, &keys)),
            8 | 9 => self.lease(&keys),
            10 => drop(self.pool.release(&std::mem::take(&mut self.leased))),
            11 | 12 => {
                self.reserve(&keys, bytes.flag());
                self.fill(bytes.byte());
            }
            13 => drop(self.pool.publish(&std::mem::take(&mut self.reserved))),
            14 => drop(self.pool.abort(&std::mem::take(&mut self.reserved))),
            15 => drop(self.pool.quarantine(&std::mem::take(&mut self.reserved))),
            16 => drop(self.pool.touch(self.ns, &keys)),
            17 => drop(self.pool.reap()),
            18 => drop(self.pool.rebuild_index()),
            19 => drop(self.pool.reset(self.ns)),
            20 => self.gauges(),
            21 => self.reference(BlockRef(bytes.word()), bytes.byte()),
            22 => drop(self.pool.join(Member { row: u32::from(bytes.byte()), epoch: bytes.word() >> 48 })),
            _ => {
                if let Ok(ns) = namespace(&self.pool, 9 + bytes.byte() % 3) {
                    self.ns = ns;
                }
                let _any = self.pool.grow_ahead(self.ns);
            }
        }
    }

    fn lease(&mut self, keys: &[Key]) {
        let Ok(leased) = self.pool.lease(self.ns, keys, 0, keys.len()) else { return };
        for block in &leased {
            (0..PART_BYTES.len() as u32).for_each(|part| self.read(*block, part));
        }
        self.leased.extend(leased);
        let more = self.leased.len().saturating_sub(HELD_MAX);
        let _any = self.pool.release(&self.leased.drain(..more).collect::<Vec<_>>());
    }

    /// Every byte, so that an access outside of the mapping is noticed.
    fn read(&self, block: BlockRef, part: u32) {
        if let Some(source) = self.pool.space().read_source(block, part) {
            assert!(source.bytes as u64 <= SEGMENT_BYTES, "no part is larger than a segment");
            // SAFETY: inside a mapping, as far as the pool says; that is what is tested.
            let bytes = unsafe { std::slice::from_raw_parts(source.address, source.bytes) };
            std::hint::black_box(bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>());
        }
    }

    fn reserve(&mut self, keys: &[Key], evict: bool) {
        let Ok(reserved) = self.pool.reserve(self.ns, keys, None, evict) else { return };
        self.reserved.extend(reserved.into_iter().map(|(_, block)| block));
        let more = self.reserved.len().saturating_sub(HELD_MAX);
        let _any = self.pool.abort(&self.reserved.drain(..more).collect::<Vec<_>>());
    }

    fn fill(&self, byte: u8) {
        let space = self.pool.space();
        for (block, part) in self.reserved.iter().flat_map(|block| [(*block, 0), (*block, 1)]) {
            if let Some(target) = space.write_target(block, part) {
                assert!(target.bytes as u64 <= SEGMENT_BYTES, "no part is larger than a segment");
                // SAFETY: inside a mapping, as far as the pool says; that is what is tested.
                unsafe { std::ptr::write_bytes(target.address, byte, target.bytes) };
                space.mark_part(block, part, Some(7));
            }
        }
    }

    fn gauges(&self) {
        let _any = self.pool.namespace_stats(self.ns);
        let _any =
            (self.pool.stats(), self.pool.last_grow_error(), self.pool.member(), self.pool.namespace_info(self.ns));
        (0..3).for_each(|part| drop(self.pool.space().segments(self.ns, part)));
    }

    /// A reference that nobody has given out, or did long ago.
    fn reference(&self, block: BlockRef, part: u8) {
        let (part, space) = (u32::from(part), self.pool.space());
        let block = if part % 2 == 0 { block } else { BlockRef(block.0 & 0x3_0000_01FF) };
        self.read(block, part % 3);
        let _any = (space.write_target(block, part % 3), space.is_readable(block), self.pool.locate(block, part));
        let _any = (space.mark_part(block, part, None), self.pool.release(&[block]), self.pool.publish(&[block]));
    }

    /// Store blocks of one chain, waiting while the pool grows.
    fn store_for_sure(&mut self, keys: &[Key]) {
        let started = Instant::now();
        while self.pool.lookup(self.ns, keys, 0).unwrap() < keys.len() {
            self.reserve(keys, true);
            self.fill(1);
            self.pool.publish(&std::mem::take(&mut self.reserved)).unwrap();
            assert!(started.elapsed() < Duration::from_secs(120), "no slot: {:?}", self.pool.last_grow_error());
        }
    }
}
