//! The index: a reader without a lock finds what is there, however the chain changes under it, and never what is not.

use super::world::{Process, World, explore};
use crate::model_words::spawn;
use crate::shm::publish::Published;

#[test]
fn a_block_becomes_visible_once_and_whole() {
    explore("lookup beside publish", 2, &["before", "after"], || {
        let (world, first) = World::new(1);
        let second = world.process();
        let key = first.keys[0];
        let writer = spawn(move || second.store(&key, None, 2));
        let found = first.check(&key);
        if found.is_some() {
            assert!(first.find(&key).is_some(), "a block that was there is gone");
        }
        assert_eq!(writer.join(), Some(Published::Visible));
        first.assert_whole();
        assert_eq!(first.check(&key), Some(2));
        if found.is_some() { "after" } else { "before" }
    });
}

#[test]
fn of_two_stores_of_one_key_one_is_visible() {
    explore("two publishers of a key", 2, &["first", "second"], || {
        let (world, first) = World::new(2);
        let second = world.process();
        let key = first.keys[0];
        let writer = spawn(move || second.store(&key, None, 2));
        let outcomes = [first.store(&key, None, 1), writer.join()];
        first.assert_whole();
        let winner = outcomes.iter().position(|outcome| *outcome == Some(Published::Visible)).expect("one wins");
        assert_eq!(outcomes[1 - winner], Some(Published::Duplicate));
        assert_eq!(first.check(&key), Some(winner as u64 + 1));
        assert_eq!(first.free_slots(), 1, "the other one's slot is free");
        ["first", "second"][winner]
    });
}

#[test]
fn a_block_is_found_while_its_chain_changes_before_and_behind_it() {
    explore("lookup beside link and unlink", 2, &["found"], || {
        let (world, first) = World::new(4);
        let second = world.process();
        let [oldest, key, newest, another] = first.keys;
        // One chain: newest, key, oldest.
        for key in [oldest, key, newest] {
            first.store(&key, None, 1);
        }
        let (before, behind) = (first.find(&newest).expect("there"), first.find(&oldest).expect("there"));
        let writer = spawn(move || {
            assert!(second.core.expel(before) && second.core.expel(behind));
            assert_eq!(second.store(&another, None, 2), Some(Published::Visible));
        });
        assert!(first.find(&key).is_some(), "a miss of what was there all the time");
        writer.join();
        first.assert_whole();
        assert_eq!([newest, key, oldest, another].map(|key| first.check(&key)), [None, Some(1), None, Some(2)]);
        "found"
    });
}

#[test]
fn a_walk_over_a_slot_that_is_reused_finds_the_old_block_or_none() {
    explore("lookup of the old beside reuse", 2, &["found", "missed"], || reuse(|first| first.check(&first.keys[1])));
}

#[test]
fn a_walk_over_a_slot_that_is_reused_finds_the_new_block_or_none() {
    explore("lookup of the new beside reuse", 2, &["found", "missed"], || reuse(|first| first.check(&first.keys[2])));
}

/// The slot of one key goes to another of the same chain while `reader` walks over it.
fn reuse(reader: fn(&Process) -> Option<u64>) -> &'static str {
    let (world, first) = World::new(1);
    let second = world.process();
    let [_, old, new, _] = first.keys;
    first.store(&old, None, 1);
    let victim = first.find(&old).expect("there");
    let writer = spawn(move || {
        assert!(second.core.expel(victim));
        second.store(&new, None, 2)
    });
    let found = reader(&first);
    let stored = writer.join();
    first.assert_whole();
    // A lease may keep the slot until the store has given up.
    assert_eq!(stored.is_some(), first.check(&new).is_some());
    if found.is_some() { "found" } else { "missed" }
}

#[test]
fn a_replaced_key_is_never_missed() {
    explore("lookup beside replace", 2, &["found"], || {
        let (world, first) = World::new(2);
        let second = world.process();
        let key = first.keys[0];
        first.store(&key, None, 1);
        let writer = spawn(move || {
            assert_eq!(second.replace(&key, 3), Published::Visible);
        });
        assert!(first.find(&key).is_some(), "there is always one of them");
        writer.join();
        first.assert_whole();
        assert_eq!(first.check(&key), Some(3));
        "found"
    });
}
