//! The statistics of whole pools.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::file::Traffic;
use super::name::{KeyHash, mixed};
use super::note::{Missed, Prompt};
use crate::shm::file::Place;
use crate::shm::grow::Grown;
use crate::sync::Relaxed;
use crate::{Key, Member, Namespace, OpenOptions, Pool};

const BLOCK_BYTES: u64 = 1024;

fn pool(segments: u64) -> Arc<Pool> {
    let (segment_bytes, private) = (Some(64 << 10), true);
    let options = OpenOptions { pool_bytes: Some(segments << 16), segment_bytes, private, ..OpenOptions::default() };
    Pool::open("p", &options).unwrap()
}

fn space(pool: &Pool, fingerprint: u8) -> Namespace {
    pool.namespace(&[fingerprint; 32], 0, &[BLOCK_BYTES], "test").unwrap()
}

fn keys(numbers: impl IntoIterator<Item = u64>) -> Vec<Key> {
    numbers.into_iter().map(|number| Key::new(&mixed(number).to_le_bytes()).unwrap()).collect()
}

/// Store a chain, waiting for room; what finds none in a full pool is left out.
fn store(pool: &Pool, ns: Namespace, keys: &[Key]) -> usize {
    // A thread of the pool may be making the room that is wanted.
    while pool.core().grow(ns).is_ok_and(|grown| grown == Grown::InProgress) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let blocks: Vec<_> = pool.reserve(ns, keys, None, true).unwrap().iter().map(|(_, block)| *block).collect();
    pool.mark_written(0, &blocks, None).unwrap();
    pool.publish(&blocks).unwrap()
}

/// Count a prompt.
fn note(pool: &Pool, ns: Namespace, keys: &[Key], prompt: &Prompt) -> crate::Result<Option<Missed>> {
    pool.note_prompt(ns, &keys.iter().map(KeyHash::from).collect::<Vec<_>>(), prompt)
}

/// A prompt of which only this much is in memory.
fn in_memory(blocks: usize) -> Prompt {
    Prompt { start: 0, ram: blocks, ssd: blocks, peer: blocks, late: blocks }
}

fn counts(pool: &Pool, ns: Namespace) -> HashMap<&'static str, u64> {
    pool.core().traffic().unwrap().namespaces()[ns.id() as usize].counts().collect()
}

#[test]
fn reasons_of_misses_are_told_apart() {
    let pool = pool(1);
    let ns = space(&pool, 1);
    let first = keys(0..40);
    assert_eq!(store(&pool, ns, &first), 40);
    // 64 blocks fit: the second chain takes the room of the first one's tail.
    assert_eq!(store(&pool, ns, &keys(100..150)), 50);
    let left = pool.lookup(ns, &first, 0).unwrap();
    assert!((1..40).contains(&left), "{left}");
    let prompt = keys((0..40).chain(1000..1007));
    let missed = note(&pool, ns, &prompt, &in_memory(left)).unwrap().unwrap();
    assert_eq!(missed, Missed { never_stored: 7, evicted: 40 - left as u64, ..Missed::default() });
    pool.reset(ns).unwrap();
    let missed = note(&pool, ns, &prompt, &in_memory(0)).unwrap().unwrap();
    assert_eq!(missed, Missed { never_stored: 7, reset: 40, ..Missed::default() });
    let late = Prompt { start: 5, ram: 10, ssd: 20, peer: 30, late: 45 };
    let missed = note(&pool, ns, &prompt, &late).unwrap().unwrap();
    assert_eq!(missed, Missed { never_stored: 2, late: 15, ..Missed::default() });
    pool.note_loaded(ns, 3).unwrap();
    let counts = counts(&pool, ns);
    let of = |name: &str| counts[name];
    assert_eq!([of("prompts"), of("blocks_asked")], [3, 47 + 47 + 42]);
    assert_eq!([of("hit_ram"), of("hit_ssd"), of("hit_peer")], [left as u64 + 5, 10, 10]);
    let misses = ["miss_never_stored", "miss_evicted", "miss_reset", "miss_late", "miss_tier_off"];
    assert_eq!(misses.map(of), [16, 40 - left as u64, 40, 15, 0]);
    assert_eq!([of("stored_blocks"), of("stored_bytes"), of("loaded_bytes")], [90, 90 * 1024, 3 * 1024]);
    let hits: u64 = ["hit_ram", "hit_ssd", "hit_peer"].map(of).iter().sum();
    assert_eq!(hits + misses.map(of).iter().sum::<u64>(), of("blocks_asked"), "each block has one fate");
}

#[test]
fn blocks_of_another_fingerprint_are_called_so() {
    let pool = pool(4);
    let (one, other) = (space(&pool, 1), space(&pool, 2));
    assert_eq!(store(&pool, one, &keys(0..10)), 10);
    let missed = note(&pool, other, &keys(0..12), &in_memory(0)).unwrap().unwrap();
    assert_eq!(missed, Missed { never_stored: 2, reset: 10, ..Missed::default() });
}

#[test]
fn a_prompt_whose_positions_go_backwards_is_refused() {
    let pool = pool(1);
    let ns = space(&pool, 1);
    for prompt in [Prompt { start: 3, ..Prompt::default() }, in_memory(6), Prompt { late: 6, ..in_memory(2) }] {
        assert!(note(&pool, ns, &keys(0..5), &prompt).is_err(), "{prompt:?}");
    }
    assert_eq!(counts(&pool, ns)["prompts"], 0);
}

/// Blocks of each prompt that a cache of so many would find that lets go what was used longest ago, tails first.
fn exact_hits(prompts: &[Vec<u64>], blocks_max: usize) -> Vec<usize> {
    let (mut used, mut order, mut now, mut hits) = (HashMap::new(), std::collections::BTreeMap::new(), 0u64, vec![]);
    for prompt in prompts {
        hits.push(prompt.iter().take_while(|block| used.contains_key(*block)).count());
        for block in prompt.iter().rev() {
            now += 1;
            if let Some(before) = used.insert(*block, now) {
                order.remove(&before);
            }
            order.insert(now, *block);
            if used.len() > blocks_max
                && let Some((_, oldest)) = order.pop_first()
            {
                used.remove(&oldest);
            }
        }
    }
    hits
}

/// Conversations that take turns; some begin alike, some go on soon, and most never.
fn conversations(count: u64) -> Vec<Vec<u64>> {
    let mut seed = 1;
    let mut below = |bound: u64| {
        seed += 1;
        mixed(seed) % bound
    };
    let (mut open, mut prompts) = (Vec::new(), Vec::new());
    for number in 0..count {
        open.push(vec![below(4)]);
        for turn in 0..=below(6) {
            let talk = below(open.len() as u64) as usize;
            let more = 1 + below(12);
            open[talk].extend((0..more).map(|block| number << 16 | turn << 8 | block | 1 << 60));
            prompts.push(open[talk].clone());
        }
        if open.len() > 200 {
            open.remove(below(200) as usize);
        }
    }
    prompts
}

#[test]
fn the_curve_is_within_two_points_of_exact_simulation() {
    let prompts = conversations(4_000);
    let asked: usize = prompts.iter().map(Vec::len).sum();
    let distinct = prompts.iter().flatten().collect::<std::collections::HashSet<_>>().len();
    let pool = pool(1);
    let ns = space(&pool, 1);
    // A pool with room for a tenth of them.
    for (prompt, hits) in prompts.iter().zip(exact_hits(&prompts, distinct / 10)) {
        note(&pool, ns, &keys(prompt.iter().copied()), &in_memory(hits)).unwrap();
    }
    let traffic = pool.core().traffic().unwrap();
    assert!(distinct > 8 * crate::limits::TRAFFIC_SAMPLES_MAX, "{distinct}: a fraction of them is followed");
    let curve = traffic.curve();
    for percent in [1, 2, 5, 10, 25, 50, 100] {
        let blocks = distinct * percent / 100;
        let exact = 100.0 * exact_hits(&prompts, blocks).iter().sum::<usize>() as f64 / asked as f64;
        let told = curve.hit_ppm(blocks as u64 * BLOCK_BYTES).unwrap() as f64 / 1e4;
        assert!((told - exact).abs() <= 2.0, "{percent} %: {told:.2} is told, {exact:.2} is so");
    }
}

#[test]
fn a_death_in_the_middle_of_a_change_costs_no_more_than_the_change() {
    let pool = pool(1);
    let ns = space(&pool, 1);
    let prompt = keys(0..100);
    note(&pool, ns, &prompt, &in_memory(0)).unwrap();
    let traffic = pool.core().traffic().unwrap();
    // As who dies leaves it: locked, and the tree halfway.
    let dead = Member { row: 7, epoch: 3 }.encode();
    traffic.header().curve_lock.store(dead, Relaxed);
    traffic.header().curve_busy.store(1, Relaxed);
    traffic.tree()[1 << 6].fetch_add(1 << 40, Relaxed);
    note(&pool, ns, &prompt, &in_memory(0)).unwrap();
    assert_eq!(traffic.header().curve_skipped.load(Relaxed), 0);
    let curve = traffic.curve();
    let half = curve.hit_ppm(50 * BLOCK_BYTES).unwrap();
    assert!((240_000..260_000).contains(&half), "{half}: the first half of the second prompt");
    assert_eq!(curve.hit_ppm(1 << 20), Some(500_000));
}

#[test]
fn who_is_alive_and_at_the_curve_is_not_waited_for() {
    let pool = pool(1);
    let ns = space(&pool, 1);
    let traffic = pool.core().traffic().unwrap();
    traffic.header().curve_lock.store(pool.member().unwrap().encode(), Relaxed);
    note(&pool, ns, &keys(0..10), &in_memory(0)).unwrap();
    assert_eq!(traffic.header().curve_skipped.load(Relaxed), 1);
    assert_eq!(traffic.curve().references(), 0);
    assert_eq!(counts(&pool, ns)["blocks_asked"], 10, "all else is counted");
}

#[test]
fn prompts_with_and_without_followed_blocks_are_left_out_alike_while_somebody_is_at_the_curve() {
    let pool = pool(1);
    let ns = space(&pool, 1);
    let header = pool.core().traffic().unwrap().header();
    header.threshold.store(1, Relaxed); // so that none of these blocks is followed
    note(&pool, ns, &keys(0..10), &in_memory(0)).unwrap();
    let references = || pool.core().traffic().unwrap().curve().references();
    assert_eq!((references(), header.curve_skipped.load(Relaxed)), (10, 0));
    header.curve_lock.store(pool.member().unwrap().encode(), Relaxed);
    note(&pool, ns, &keys(0..10), &in_memory(0)).unwrap();
    assert_eq!((references(), header.curve_skipped.load(Relaxed)), (10, 1));
    // Whoever comes next takes over from the dead, whatever he asks for.
    header.curve_lock.store(Member { row: 7, epoch: 3 }.encode(), Relaxed);
    note(&pool, ns, &keys(0..10), &in_memory(0)).unwrap();
    assert_eq!((references(), header.curve_skipped.load(Relaxed)), (20, 1));
    assert_eq!(header.curve_lock.load(Relaxed), 0);
}

#[test]
fn evicted_and_refused_blocks_are_those_that_are_not_there() {
    let pool = pool(1);
    let (one, other) = (space(&pool, 1), space(&pool, 2));
    assert_eq!(store(&pool, one, &keys(0..40)), 40);
    assert_eq!(store(&pool, one, &keys(100..150)), 50);
    assert_eq!(pool.contains(one, &keys((0..40).chain(100..150))).unwrap().iter().filter(|there| **there).count(), 64);
    assert_eq!(counts(&pool, one)["evicted_blocks"], 40 + 50 - 64);
    assert_eq!(counts(&pool, one)["refused_blocks"], 0);
    assert_eq!(pool.reserve(one, &keys(200..207), None, false).unwrap(), [], "all is full, and nothing may go");
    assert_eq!(counts(&pool, one)["refused_blocks"], 7);
    let evicted = |ns| counts(&pool, ns)["evicted_blocks"];
    assert_eq!((evicted(one), evicted(other)), (26, 0), "each namespace has its own");
    // The whole extent is taken from one namespace.
    let [extent] = &pool.core().all_extents()[..] else { panic!("one segment, one extent") };
    assert!(pool.core().retire(extent, true));
    assert_eq!((evicted(one), evicted(other)), (90, 0));
}

#[test]
fn what_waits_for_the_pool_to_grow_is_not_refused() {
    let pool = pool(1);
    let ns = space(&pool, 1);
    let mut tries = 0;
    while pool.reserve(ns, &keys(0..3), None, true).unwrap().is_empty() {
        tries += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(tries > 0, "a new pool has no segment yet");
    assert_eq!(counts(&pool, ns)["refused_blocks"], 0);
}

#[test]
fn locks_and_rebuilds_are_counted_once_also_those_before_the_first_namespace() {
    let pool = pool(1);
    let core = pool.core();
    core.count_lock_wait(Duration::from_micros(700), true);
    core.count_lock_wait(Duration::from_micros(900), false);
    core.count_rebuild();
    assert!(core.traffic().is_none());
    space(&pool, 1);
    let traffic = core.traffic().unwrap();
    let told = |alive: &[Member]| {
        let told = traffic.pressure(alive);
        (told.lock_timeouts, told.index_rebuilds, told.lock_wait_us_max)
    };
    assert_eq!(told(&[core.me]), (1, 1, 900));
    core.count_lock_wait(Duration::from_micros(800), true);
    space(&pool, 2);
    assert_eq!(told(&[core.me]), (2, 1, 900));
    core.count_lock_wait(Duration::from_millis(20), true);
    pool.rebuild_index().unwrap();
    assert_eq!(told(&[core.me]), (3, 2, 20_000));
    let heir = Member { epoch: core.me.epoch + 1, ..core.me };
    assert_eq!(told(&[heir]), (3, 2, 0), "whoever has the row next has not waited");
    assert_eq!(told(&[]), (3, 2, 0));
}

/// Write words that nobody would, everywhere behind the superblock.
fn damage(traffic: &Traffic, seed: u64) {
    let mut number = seed << 32;
    let mut next = || {
        number += 1;
        match mixed(number) % 4 {
            0 => 0,
            1 => u64::MAX,
            2 => mixed(number) >> 40,
            _ => mixed(!number),
        }
    };
    let header = traffic.header();
    let words = [
        &header.curve_busy,
        &header.threshold,
        &header.last_place,
        &header.samples,
        &header.curve_skipped,
        &header.filter,
        &header.filter_filled,
        &header.curve_lock,
        &header.lock_timeouts,
        &header.index_rebuilds,
    ]; // all but the superblock
    let words = words.into_iter().chain(&header.lock_waits);
    let parts = header.references.iter().chain(&header.sampled_weight).chain(header.buckets.iter().flatten());
    words.chain(parts).chain(traffic.tree()).for_each(|word| word.store(next(), Relaxed));
    for sample in traffic.samples() {
        sample.hash.store(next(), Relaxed);
        sample.place.store(next() as u32, Relaxed);
        sample.kib.store(next() as u32, Relaxed);
    }
    for span in traffic.spans() {
        span.state.store(next(), Relaxed);
        span.asked.store(next(), Relaxed);
        span.registers.iter().for_each(|word| word.store(next(), Relaxed));
    }
    traffic.lines().iter().flat_map(|line| &line.words).for_each(|word| word.store(next(), Relaxed));
    traffic.namespaces().iter().flat_map(|row| &row.counters).for_each(|word| word.store(next(), Relaxed));
}

#[test]
fn whatever_the_words_are_the_pool_works_and_the_numbers_are_numbers() {
    let pool = pool(4);
    let ns = space(&pool, 1);
    let traffic = pool.core().traffic().unwrap();
    for seed in 0..20 {
        damage(traffic, seed);
        let chain = keys(seed * 1000..seed * 1000 + 60);
        assert_eq!(store(&pool, ns, &chain), 60);
        assert_eq!(pool.lookup(ns, &chain, 0).unwrap(), 60);
        for _ in 0..3 {
            note(&pool, ns, &chain, &in_memory(50)).unwrap().unwrap();
        }
        assert!(pool.windows().unwrap().iter().all(|window| window.hit_ppm().is_none_or(|ppm| ppm <= 1_000_000)));
        let alive: Vec<_> =
            (0..=u32::MAX).step_by(1 << 20).chain(0..200).map(|row| Member { row, epoch: seed }).collect();
        assert!(traffic.pressure(&alive).lock_wait_us_max <= u64::from(u32::MAX));
        pool.core().count_lock_wait(Duration::from_secs(u64::MAX), true);
        let curve = traffic.curve();
        assert!([0, 1, 1 << 20, u64::MAX].iter().all(|bytes| curve.hit_ppm(*bytes).is_none_or(|ppm| ppm <= 1_000_000)));
    }
}

#[test]
fn a_damaged_file_is_replaced_and_a_foreign_one_left_alone() {
    let dir = std::env::temp_dir().join(format!("pegaflow-traffic-{}", std::process::id()));
    crate::shm::file::make_dir(&dir).unwrap();
    let place = Place::directory(&dir).unwrap();
    let file = dir.join(crate::shm::names::TRAFFIC);
    Traffic::open_or_create(&place, 1).unwrap().header().references[0].store(7, Relaxed);
    assert_eq!(Traffic::open_or_create(&place, 1).unwrap().header().references[0].load(Relaxed), 7);
    std::fs::write(&file, b"not ours").unwrap();
    assert!(Traffic::open(&place).is_err());
    assert_eq!(Traffic::open_or_create(&place, 1).unwrap().header().references[0].load(Relaxed), 0);
    std::fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink("/dev/null", &file).unwrap();
    assert!(Traffic::open_or_create(&place, 1).is_err());
    assert!(file.is_symlink());
    std::fs::remove_dir_all(&dir).unwrap();
}
