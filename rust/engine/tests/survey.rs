//! What a walk over a pool's slots sees: every block that can be found, once, and no other.
#![allow(missing_docs)]

mod common;

use std::collections::HashMap;
use std::sync::Arc;

use common::{ShmDir, keys, namespace, store};
use pegaflow_engine::{BlockRef, Key, Pool, Sight, Survey};

const MIB: u64 = 1 << 20;

/// One pass in steps of seven slots: blocks by key, and how many slots were said to hold none.
fn pass(pool: &Arc<Pool>, survey: &mut Survey) -> (HashMap<Key, BlockRef>, u64) {
    let (mut blocks, mut empty, mut next) = (HashMap::new(), 0, 0);
    loop {
        let mut seen = 0;
        let over = pool.survey(survey, 7, |sight| {
            let range = match &sight {
                Sight::Nothing(range) => range.clone(),
                Sight::Block(block) => block.slot()..block.slot() + 1,
            };
            assert_eq!(range.start, next, "slots come in order, without holes");
            next = range.end;
            match sight {
                Sight::Nothing(range) => empty += u64::from(range.end - range.start),
                Sight::Block(block) => {
                    let name = pool.block_name(block).expect("nobody evicts here");
                    assert_eq!((name.fingerprint, name.group), ([9; 32], 0));
                    assert_eq!(blocks.insert(name.key, block), None, "each block is seen once");
                }
            }
            seen += 1;
            true
        });
        assert!(seen <= 7 + 2, "one step sees a bounded number");
        if over.unwrap() {
            assert_eq!(u64::from(next), pool.slots_max());
            return (blocks, empty);
        }
    }
}

#[test]
fn a_survey_sees_what_can_be_found_and_nothing_else() {
    let dir = ShmDir::new("survey");
    let pool = Pool::open("p", &dir.options(8 * MIB, MIB)).unwrap();
    let mut survey = Survey::default();
    assert_eq!(pass(&pool, &mut survey), (HashMap::new(), pool.slots_max()), "an empty pool");

    let ns = namespace(&pool, &[4096]);
    store(&pool, ns, 0..300);
    let reserved = pool.reserve(ns, &keys(900..901), None, true).unwrap();
    let (blocks, empty) = pass(&pool, &mut survey);
    assert_eq!(blocks.len(), 300);
    assert!(keys(0..300).iter().all(|key| blocks.contains_key(key)));
    assert_eq!(empty, pool.slots_max() - 300, "a reserved block is none yet");
    pool.abort(&[reserved[0].1]).unwrap();

    pool.reset(ns).unwrap();
    assert_eq!(pass(&pool, &mut survey).0.len(), 0, "what a reset has made foreign cannot be found");
    assert_eq!(store(&pool, ns, 0..3), 3);
    assert_eq!(pass(&pool, &mut survey).0.len(), 3);
}

#[test]
fn a_survey_that_was_told_to_stop_goes_on_behind_what_it_saw() {
    let dir = ShmDir::new("surveystop");
    let pool = Pool::open("p", &dir.options(4 * MIB, MIB)).unwrap();
    store(&pool, namespace(&pool, &[4096]), 0..20);
    let (mut survey, mut blocks) = (Survey::default(), Vec::new());
    while !pool
        .survey(&mut survey, usize::MAX, |sight| {
            if let Sight::Block(block) = &sight {
                blocks.push(*block);
            }
            matches!(sight, Sight::Nothing(_))
        })
        .unwrap()
    {}
    blocks.dedup();
    assert_eq!(blocks.len(), 20);
}

#[test]
fn a_block_that_is_gone_has_no_name() {
    let dir = ShmDir::new("surveyname");
    let pool = Pool::open("p", &dir.options(MIB, MIB)).unwrap();
    let ns = namespace(&pool, &[16384]);
    store(&pool, ns, 0..64);
    let (blocks, _) = pass(&pool, &mut Survey::default());
    store(&pool, ns, 1000..1064);
    assert!(blocks.values().all(|block| pool.block_name(*block).is_none()), "every slot was taken for another block");
    assert_eq!(pool.block_name(BlockRef(u64::MAX)), None);
}
