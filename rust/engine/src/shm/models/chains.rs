//! Chains of blocks: none is there whose parent is gone, and none would outlive it, whatever is evicted, taken or reset
//! while it is published.

use super::world::{World, explore};
use crate::model_words::spawn;
use crate::shm::policy::policy_number;
use crate::shm::publish::Published;

#[test]
fn no_child_is_published_below_a_parent_that_goes() {
    let outcomes = ["parent evicted first", "child published"];
    explore("publish a child beside evict", 1, &outcomes, || child_beside_evict("probation"));
    explore("publish a child beside evict by last use", 1, &outcomes, || child_beside_evict("lru"));
}

fn child_beside_evict(policy: &str) -> &'static str {
    let (world, first) = World::new(2);
    let second = world.process();
    let policy = policy_number(policy).expect("there is one");
    [&first, &second].map(|process| process.core.set_policy(policy));
    let [parent, child, other, _] = first.keys;
    // The evictor's own, so that no share is in the way.
    second.store(&parent, None, 1);
    let block = first.reserve(&child).expect("a slot is free");
    first.fill(block, super::world::content(&child, 1));
    let evictor = spawn(move || second.store(&other, None, 2));
    let outcome = first.publish(block, &child, Some(parent), false);
    evictor.join();
    first.assert_whole();
    match outcome {
        Published::Visible => "child published",
        Published::Orphan => "parent evicted first",
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_tail_goes_before_its_head_while_their_owner_leaves() {
    explore("evict beside disown", 2, &["head left"], || {
        let (world, first) = World::new(2);
        let second = world.process();
        let [head, tail, other, _] = first.keys;
        second.store(&head, None, 1);
        second.store(&tail, Some(head), 1);
        let slots = [head, tail].map(|key| first.find(&key).expect("there").slot());
        let row = second.core.me.row;
        let evictor = spawn(move || second.store(&other, None, 2));
        slots.into_iter().for_each(|slot| first.core.disown(slot, row));
        let stored = evictor.join();
        first.assert_whole();
        let there = [head, tail, other].map(|key| first.find(&key).is_some());
        assert_eq!((stored, there), (Some(Published::Visible), [true, false, true]));
        "head left"
    });
}

#[test]
fn a_child_published_while_its_parent_is_removed_goes_with_it() {
    explore("publish a child beside removal", 1, &["published", "orphan"], || {
        let (world, first) = World::new(2);
        let second = world.process();
        let [parent, child, ..] = first.keys;
        first.store(&parent, None, 1);
        let block = first.reserve(&child).expect("a slot is free");
        first.fill(block, super::world::content(&child, 1));
        let victim = first.find(&parent).expect("there");
        let taker = spawn(move || {
            // As who takes a whole extent does.
            second.core.expect_orphans();
            assert!(second.core.expel(victim));
            second.core.drop_orphans();
        });
        let outcome = first.publish(block, &child, Some(parent), false);
        taker.join();
        first.core.drop_orphans();
        first.assert_whole();
        assert_eq!([parent, child].map(|key| first.check(&key)), [None, None], "what is left has its parent");
        if outcome == Published::Visible { "published" } else { "orphan" }
    });
}

#[test]
fn what_was_saved_before_a_reset_is_never_seen_after_it() {
    explore("publish beside reset", 1, &["published", "refused"], || {
        let (world, first) = World::new(1);
        let second = world.process();
        let key = first.keys[0];
        let block = first.reserve(&key).expect("a slot is free");
        first.fill(block, super::world::content(&key, 1));
        let reset = spawn(move || {
            second.core.reset(second.ns).expect("the namespace is there");
            assert_eq!(second.find(&key), None, "a block of the old epoch");
        });
        let outcome = first.publish(block, &key, None, false);
        reset.join();
        assert_eq!(first.find(&key), None, "a block of the old epoch");
        assert_eq!(first.store(&key, None, 2), Some(Published::Visible), "the new epoch has room");
        assert_eq!(first.check(&key), Some(2));
        first.assert_whole();
        if outcome == Published::Visible { "published" } else { "refused" }
    });
}

#[test]
fn a_block_of_the_new_epoch_is_not_aged_by_the_reset_that_began_it() {
    explore("store beside reset", 1, &["new epoch", "old epoch"], || {
        let (world, first) = World::new(2);
        let second = world.process();
        let [key, child, ..] = first.keys;
        first.store(&key, None, 1);
        let reset = spawn(move || drop(second.core.reset(second.ns)));
        let outcome = first.store(&key, None, 2);
        let below = first.store(&child, Some(key), 2);
        reset.join();
        first.assert_whole();
        let there = first.find(&child).is_some();
        assert!(!there || first.find(&key).is_some());
        if (outcome, below, there) == (Some(Published::Visible), Some(Published::Visible), true) {
            "new epoch"
        } else {
            "old epoch"
        }
    });
}
