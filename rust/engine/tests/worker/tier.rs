//! Ways to the crash points of the SSD tier, and a process that serves it and uses it at random.

use std::path::Path;
use std::time::Duration;

use pegaflow_engine::{ErrorKind, Key, Namespace, Pool};

use crate::blocks::{check_chain, keys, namespace, open, open_lru, store_chain};
use crate::kill_tier::{comes_about, count, fetch, on_ssd, serve, state};
use crate::points::Try;
use crate::random::Random;
use crate::{say, wait_for_parent};
use pegaflow_engine::tier::TierState;

/// Longest way to one point.
const WAY_MAX: Duration = Duration::from_secs(20);
/// Namespace of these tests.
const SPACE: u8 = 77;
/// Blocks of one chain.
const CHAIN: u64 = 6;
/// Chains that the processes of one pool have in common.
const CHAINS: u64 = 60;

fn chain(number: u64) -> Vec<Key> {
    let first = (1 << 45) + number * 100;
    keys(first..first + CHAIN)
}

fn serving(pool: &Pool) -> bool {
    comes_about(WAY_MAX, || state(pool) == TierState::Serving)
}

/// Chains that nobody else stores: those of this try.
fn store(pool: &Pool, ns: Namespace, chain: &[Key], nonce: u64) {
    comes_about(WAY_MAX, || {
        store_chain(pool, ns, chain, nonce);
        pool.lookup(ns, chain, 0).unwrap() == chain.len()
    });
}

/// Get to a point of the tier, which is armed once the way there is clear.
pub fn point(this: &Try, step: &str) {
    // What pushes others out stays itself, which the default policy would not have.
    let pool = if matches!(step, "reading" | "loaded") { open_lru(&this.dir) } else { open(&this.dir) };
    let leads = ["file_made", "linked", "led", "cleared", "opened", "serving"];
    if leads.contains(&step) {
        this.arm();
    }
    serve(&pool, &this.dir);
    let ns = namespace(&pool, SPACE);
    pool.use_ssd(ns).unwrap();
    if !serving(&pool) || leads.contains(&step) {
        return;
    }
    let wanted = chain(CHAINS + this.seed);
    if matches!(step, "hinted" | "leased") {
        this.arm();
    }
    // Those who were here before have written, too.
    let before = count(&pool, "spilled_blocks");
    store(&pool, ns, &wanted, this.seed);
    let written = comes_about(WAY_MAX, || count(&pool, "spilled_blocks") >= before + CHAIN);
    if !written || matches!(step, "hinted" | "leased") {
        return;
    }
    if matches!(step, "unserved" | "forgotten" | "noted") {
        this.arm();
        comes_about(WAY_MAX, || match pool.reset(ns) {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
                false
            }
        });
        return;
    }
    if matches!(step, "reading" | "loaded") {
        push_out(&pool, ns, &wanted, this.seed);
    }
    this.arm();
    fetch(&pool, ns, &wanted, WAY_MAX);
    check_chain(&pool, ns, &wanted);
}

/// Store others until a chain is on SSD only.
fn push_out(pool: &Pool, ns: Namespace, chain: &[Key], seed: u64) {
    let mut next = (1 << 46) + (seed << 12);
    comes_about(WAY_MAX, || {
        let more = keys(next..next + 8);
        more.iter().for_each(|key| drop(store_chain(pool, ns, &[*key], seed).to_string()));
        next += 8;
        on_ssd(pool, ns, chain) == chain.len()
    });
}

/// Serve and use the tier until told to stop; says when it leads.
pub fn run(dir: &Path, seed: u64) {
    let pool = open(dir);
    serve(&pool, dir);
    let ns = namespace(&pool, SPACE);
    pool.use_ssd(ns).unwrap();
    let user = std::sync::Arc::clone(&pool);
    std::thread::spawn(move || {
        let mut random = Random::new(seed);
        loop {
            use_at_random(&user, &mut random);
        }
    });
    comes_about(Duration::from_secs(3600), || pool.ssd().unwrap().is_some_and(|facts| facts.leads));
    say("leads");
    wait_for_parent();
    std::process::exit(0);
}

/// One thing that an instance does.
pub fn use_at_random(pool: &Pool, random: &mut Random) {
    let ns = namespace(pool, SPACE);
    let wanted = chain(random.below(CHAINS));
    match random.below(100) {
        0 => {
            if let Err(error) = pool.reset(ns) {
                assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
            }
        }
        1..50 => drop(store_chain(pool, ns, &wanted, random.next()).to_string()),
        _ => {
            // Some go away before they have what they asked for.
            fetch(pool, ns, &wanted, Duration::from_micros(random.below(5000)));
            check_chain(pool, ns, &wanted);
        }
    }
}
