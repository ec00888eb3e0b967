//! Random operations of several members of one pool against a `HashMap`: what is found is what was stored, what is
//! leased stays, and no block is there whose parent is gone. `PEGAFLOW_TEST_SEED` repeats a run.
#![allow(missing_docs)]

mod common;
mod kill;
mod model_parts;

use std::sync::Arc;

use common::ShmDir;
use kill::blocks::{MAIN, check_chain, namespace, open, store_chain};
use kill::random::{Random, seed};
use kill::settled::assert_nothing_lost;
use model_parts::{MEMBERS, Model, Shape};

const PROBATION: [&str; MEMBERS] = ["probation"; MEMBERS];
const LRU: [&str; MEMBERS] = ["lru"; MEMBERS];

#[test]
fn a_pool_with_room_is_a_map() {
    let shape = Shape { chains: 4, length: 10, held_max: 1, fits: true, spaces: 2, policies: PROBATION };
    let mut model = Model::new("room", seed("model with room"), shape);
    for _ in 0..30_000 {
        model.step();
    }
    assert!(model.resets > 10 && model.published > 500, "{} resets, {} published", model.resets, model.published);
    model.finish();
}

#[test]
fn a_pool_under_pressure_is_a_map_that_forgets_tails_before_heads() {
    under_pressure("pressure", "model under pressure", 2, PROBATION);
}

#[test]
fn a_pool_under_pressure_forgets_tails_before_heads_by_last_use_too() {
    under_pressure("pressure-lru", "model under pressure by last use", 2, LRU);
}

#[test]
fn members_that_keep_their_shares_forget_tails_before_heads_whatever_their_policies() {
    under_pressure("shares", "model with shares", 1, ["lru", "probation", "probation"]);
}

fn under_pressure(test: &str, seed_name: &str, spaces: usize, policies: [&'static str; MEMBERS]) {
    let shape = Shape { chains: 40, length: 20, held_max: 30, fits: false, spaces, policies };
    let mut model = Model::new(test, seed(seed_name), shape);
    for _ in 0..30_000 {
        model.step();
    }
    assert!(model.evicted() > 1000, "{} evicted", model.evicted());
    assert!(model.resets > 10 && model.published > 1000, "{} resets, {} published", model.resets, model.published);
    model.finish();
}

#[test]
fn threads_that_share_a_handle_see_whole_blocks_and_lose_none() {
    let dir = ShmDir::new("threads");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    let seed = seed("threads");
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let pool = Arc::clone(&pool);
            let mut random = Random::new(seed ^ thread);
            scope.spawn(move || {
                for step in 0..1500u64 {
                    let chain = model_parts::chain(random.below(24), 20);
                    let chain = &chain[..1 + random.below(20) as usize];
                    match random.below(100) {
                        0..45 => drop(store_chain(&pool, ns, chain, step << 8 | thread)),
                        45..80 => drop(check_chain(&pool, ns, chain)),
                        80..90 => drop(pool.touch(ns, chain).unwrap()),
                        90..97 => {
                            let reserved = pool.reserve(ns, chain, None, true).unwrap();
                            pool.abort(&reserved.iter().map(|(_, block)| *block).collect::<Vec<_>>()).unwrap();
                        }
                        _ => drop(pool.rebuild_index()),
                    }
                }
            });
        }
    });
    assert_nothing_lost(&pool, &[ns]);
}
