//! A process that damages a control file and then does everything with the pool.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pegaflow_engine::{BlockRef, Key, Pool, admin};

use crate::blocks::{MAIN, PART_BYTES, POOL_NAME, content, keys, namespace, open, options, store_all, store_chain};
use crate::random::Random;
use crate::say;

const SUPERBLOCK_BYTES: u64 = 128;

struct Damage {
    random: Random,
    path: PathBuf,
    control: PathBuf,
    /// Contents of all files before any damage.
    whole: Vec<(PathBuf, Vec<u8>)>,
    /// Offsets of words that are not zero.
    used: Vec<u64>,
}

pub fn run(dir: &Path, how: &str, seed: u64, cases: u64) {
    std::panic::set_hook(Box::new(|info| {
        eprintln!("{info}\n{}", std::backtrace::Backtrace::force_capture());
        // Also in a thread of the pool: nothing may panic, wherever it is.
        std::process::abort();
    }));
    let path = make_pool(dir);
    let whole: Vec<_> = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()).collect();
    let whole: Vec<_> = whole.into_iter().map(|file| (file.clone(), fs::read(file).unwrap())).collect();
    let control = path.join("control");
    let bytes = &whole.iter().find(|(file, _)| *file == control).unwrap().1;
    let words = bytes.chunks_exact(8).enumerate().filter(|(_, word)| **word != [0; 8]);
    let used: Vec<u64> = words.map(|(index, _)| index as u64 * 8).filter(|at| *at >= SUPERBLOCK_BYTES).collect();
    let mut damage = Damage { random: Random::new(seed), path, control, whole, used };
    for case in 0..cases {
        damage.random = Random::new(seed ^ case << 32);
        say(&format!("case {case} of seed {seed}"));
        damage.restore();
        if how == "before" {
            let words = 1 + damage.random.below(12);
            (0..words).for_each(|_| damage.spoil_one());
        }
        damage.use_all(dir, how == "while");
    }
    say("done");
}

/// A pool with chains, leases of a dead process, a reservation of it, and free slots.
fn make_pool(dir: &Path) -> PathBuf {
    let pool = open(dir);
    let ns = namespace(&pool, MAIN);
    store_all(&pool, ns, &keys(0..1), 1);
    store_chain(&pool, ns, &keys(0..30), 1);
    store_all(&pool, ns, &keys(100..150), 1);
    let other = namespace(&pool, MAIN + 1);
    store_all(&pool, other, &keys(0..10), 1);
    pool.path().to_owned()
}

impl Damage {
    fn restore(&self) {
        for entry in fs::read_dir(&self.path).unwrap() {
            let file = entry.unwrap().path();
            if !self.whole.iter().any(|(known, _)| *known == file) {
                fs::remove_file(file).unwrap();
            }
        }
        for (file, bytes) in &self.whole {
            let open = File::options().write(true).create(true).truncate(false).mode(0o600).open(file).unwrap();
            open.set_len(bytes.len() as u64).unwrap();
            open.write_all_at(bytes, 0).unwrap();
        }
    }

    /// Overwrite one word, mostly one that is in use.
    fn spoil_one(&mut self) {
        let file = File::options().read(true).write(true).open(&self.control).unwrap();
        let words = file.metadata().unwrap().len() / 8;
        let at = if self.random.chance(85) {
            self.used[self.random.below(self.used.len() as u64) as usize]
        } else {
            SUPERBLOCK_BYTES + self.random.below(words - SUPERBLOCK_BYTES / 8) * 8
        };
        let mut word = [0u8; 8];
        file.read_exact_at(&mut word, at).unwrap();
        let before = u64::from_le_bytes(word);
        let value = match self.random.below(9) {
            0 => 0,
            1 => u64::MAX,
            2 => self.random.next(),
            3 => before ^ 1 << self.random.below(64),
            4 => before.wrapping_add(1),
            5 => before.wrapping_sub(1),
            6 => self.random.below(300),
            7 => before << 32 | self.random.below(5000),
            _ => before & 0xFFFF_FFFF | self.random.next() << 32,
        };
        file.write_all_at(&value.to_le_bytes(), at).unwrap();
    }

    fn maybe_spoil(&mut self, live: bool) {
        if live && self.random.chance(60) {
            self.spoil_one();
        }
    }

    /// Everything that a process does with a pool; errors are fine.
    fn use_all(&mut self, dir: &Path, live: bool) {
        let _any = admin::list_pools(dir);
        let _any = admin::inspect(&self.path);
        let _any = admin::verify(&self.path, true, &mut |_, _| {});
        let Ok(pool) = Pool::open(POOL_NAME, &options(dir)) else { return };
        for round in 0..3 {
            for space in [MAIN, MAIN + 1, MAIN + 2] {
                self.maybe_spoil(live);
                let Ok(ns) = pool.namespace(&[space; 32], 0, &PART_BYTES, "damaged") else { continue };
                let _any = pool.grow_ahead(ns);
                self.read(&pool, ns, live);
                self.write(&pool, ns, &keys(round * 40..round * 40 + 50), live);
                self.write(&pool, ns, &keys(5000 + round * 300..5000 + round * 300 + 60), live);
                let _any = pool.namespace_stats(ns);
                if round == 1 {
                    let _any = pool.reset(ns);
                }
                self.maybe_spoil(live);
                let _any = pool.touch(ns, &keys(0..30));
            }
            self.maybe_spoil(live);
            let _any = pool.reap();
            self.maybe_spoil(live);
            let _any = pool.rebuild_index();
            let _any = (pool.stats(), pool.last_grow_error());
        }
        let _any = admin::verify(&self.path, true, &mut |_, _| {});
        let _any = admin::inspect(&self.path);
        drop(pool);
        let _any = admin::reap(&self.path);
    }

    fn read(&mut self, pool: &Arc<Pool>, ns: pegaflow_engine::Namespace, live: bool) {
        let chain: Vec<Key> = keys(0..30);
        let _any = pool.lookup(ns, &chain, 0);
        let _any = pool.contains(ns, &keys(90..160));
        self.maybe_spoil(live);
        let Ok(leased) = pool.lease(ns, &chain, 0, 30) else { return };
        let space = pool.space();
        for (block, part) in leased.iter().flat_map(|block| [(*block, 0), (*block, 1), (*block, 63)]) {
            let _any = pool.locate(block, part);
            if let Some(source) = space.read_source(block, part) {
                // SAFETY: inside a mapping, as far as the pool says; that is what is tested.
                let bytes = unsafe { std::slice::from_raw_parts(source.address, source.bytes) };
                std::hint::black_box(bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>());
            }
        }
        self.maybe_spoil(live);
        let _any = pool.release(&leased);
    }

    fn write(&mut self, pool: &Arc<Pool>, ns: pegaflow_engine::Namespace, keys: &[Key], live: bool) {
        let Ok(reserved) = pool.reserve(ns, keys, None, true) else { return };
        let blocks: Vec<BlockRef> = reserved.iter().map(|(_, block)| *block).collect();
        self.maybe_spoil(live);
        let space = pool.space();
        for (index, block) in &reserved {
            for part in 0..PART_BYTES.len() as u32 {
                if let Some(target) = space.write_target(*block, part) {
                    let bytes = content(&keys[*index], part, 1, target.bytes.clamp(32, 1 << 20));
                    let count = bytes.len().min(target.bytes);
                    // SAFETY: inside a mapping, as far as the pool says; that is what is tested.
                    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.address, count) };
                    space.mark_part(*block, part, Some(7));
                }
            }
        }
        self.maybe_spoil(live);
        let third = blocks.len() / 3;
        let _any = pool.publish(&blocks[..2 * third]);
        let _any = pool.abort(&blocks[2 * third..blocks.len() - third / 2]);
        let _any = pool.quarantine(&blocks[blocks.len() - third / 2..]);
    }
}
