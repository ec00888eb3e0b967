//! A prefix never loses its head while its tail stays: whatever takes blocks away takes tails before heads, or tails
//! too.
#![allow(missing_docs)]

mod common;
mod kill;

use common::ShmDir;
use kill::blocks::{MAIN, check_chain, keys, namespace, open, store_all, store_chain};
use kill::settled::{assert_nothing_lost, assert_settled, stat};

#[test]
fn an_extent_taken_from_a_namespace_takes_the_tails_of_its_blocks_with_it() {
    let dir = ShmDir::new("retire-chain");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    // The first extent is full of the chain's head; its tail shares the second with blocks that are used later.
    let chain = keys(0..90);
    while check_chain(&pool, ns, &chain) < 90 {
        store_chain(&pool, ns, &chain, 1);
    }
    store_all(&pool, ns, &keys(1000..1160), 1);
    store_all(&pool, namespace(&pool, MAIN + 1), &keys(0..1), 1);
    assert_eq!(stat(&pool.stats(), "extents_retired"), 1);
    let left = check_chain(&pool, ns, &chain);
    let present = pool.contains(ns, &chain).unwrap().iter().filter(|present| **present).count();
    assert_eq!(present, left, "what is not reached any more is not kept");
    assert_settled(&pool);
    assert_nothing_lost(&pool, &[ns]);
}
