//! Leases: what a process holds a lease on keeps its bytes, whoever evicts, replaces or removes the block meanwhile;
//! and the slot goes free exactly once.

use super::world::{World, explore};
use crate::model_words::spawn;
use crate::shm::publish::Published;

#[test]
fn a_leased_block_keeps_its_bytes_while_a_sibling_evicts() {
    // A lease that comes while the evictor decides misses, though the evictor sees it and lets the block stay.
    let outcomes = ["leased, evicted", "missed, evicted", "leased, kept", "missed, kept"];
    explore("lease beside evict", 2, &outcomes, || {
        let (world, first) = World::new(1);
        let second = world.process();
        let keys = first.keys;
        // The evictor's own, so that no share is in the way.
        second.store(&keys[0], None, 1);
        let evictor = spawn(move || second.store(&keys[1], None, 2));
        let found = first.check(&keys[0]);
        let stored = evictor.join();
        first.assert_whole();
        let evicted = stored == Some(Published::Visible);
        assert_eq!(
            (first.check(&keys[0]), first.check(&keys[1])),
            if evicted { (None, Some(2)) } else { (Some(1), None) }
        );
        match (found, evicted) {
            (Some(1), true) => "leased, evicted",
            (Some(1), false) => "leased, kept",
            (None, true) => "missed, evicted",
            (None, false) => "missed, kept",
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn a_replaced_block_keeps_its_bytes_for_who_leases_it_and_goes_free_once() {
    explore("lease beside replace", 2, &["the old one", "the new one", "neither"], || {
        let (world, first) = World::new(2);
        let second = world.process();
        let key = first.keys[0];
        first.store(&key, None, 1);
        let writer = spawn(move || second.replace(&key, 2));
        assert!(first.find(&key).is_some(), "there is always one of the two");
        let found = first.check(&key);
        assert_eq!(writer.join(), Published::Visible);
        first.assert_whole();
        assert_eq!(first.check(&key), Some(2));
        assert_eq!(first.free_slots(), 1, "the old block's slot is free, and was freed once");
        match found {
            Some(1) => "the old one",
            Some(2) => "the new one",
            // The old one was found, and was on its way out when it was to be pinned.
            None => "neither",
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn the_last_of_two_leases_frees_a_removed_block_once() {
    explore("two releases of a doomed block", 2, &["freed"], || {
        let (world, first) = World::new(1);
        let second = world.process();
        let key = first.keys[0];
        first.store(&key, None, 1);
        let (one, other) = (first.lease(&key).expect("it is there"), second.lease(&key).expect("it is there"));
        assert!(first.core.expel(one));
        let sibling = spawn(move || {
            assert_eq!(second.read(other) & 0xFF, 1);
            second.release(other);
        });
        assert_eq!(first.read(one) & 0xFF, 1);
        first.release(one);
        // Whoever is faster takes the slot: its bytes are written only when nobody reads them any more.
        let taken = first.reserve(&first.keys[1]);
        if let Some(block) = taken {
            first.fill(block, 0);
            first.core.give_back(block.slot(), first.core.reserved_state(block));
        }
        sibling.join();
        first.assert_whole();
        assert_eq!(first.free_slots(), 1);
        "freed"
    });
}

#[test]
fn a_block_is_either_leased_or_removed_first() {
    explore("lease beside remove", 2, &["leased", "missed"], || {
        let (world, first) = World::new(1);
        let second = world.process();
        let key = first.keys[0];
        first.store(&key, None, 1);
        let block = first.find(&key).expect("it is there");
        let remover = spawn(move || {
            assert!(second.core.expel(block));
            second
        });
        let found = first.check(&key);
        let second = remover.join();
        first.assert_whole();
        assert_eq!(second.free_slots(), 1, "the slot is free whoever was last");
        if found.is_some() { "leased" } else { "missed" }
    });
}
