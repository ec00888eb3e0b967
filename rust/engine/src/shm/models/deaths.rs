//! Deaths: whoever cleans up beside a sibling at work neither frees what is in use nor loses anything.

use super::world::{World, content, explore};
use crate::model_words::spawn;
use crate::shm::publish::Published;

/// A process dies at `point` while it stores a block; then one sibling reaps while another uses the pool.
fn reap_beside_store(point: &'static str, outcomes: &[&'static str]) {
    use std::sync::Mutex;
    static POINT: Mutex<&str> = Mutex::new("");
    *POINT.lock().expect("one model at a time") = point;
    explore(&format!("reap after {point} beside store"), 1, outcomes, || {
        let point = *POINT.lock().expect("one model at a time");
        let (world, first) = World::new(2);
        let (dying, second) = (world.process(), world.process());
        let key = first.keys[0];
        dying.dies(point, |process| {
            process.store(&key, None, 3);
            process.core.expel(process.find(&key).expect("just stored"));
        });
        let reaper = spawn(move || {
            second.core.reap();
            second
        });
        let stored = first.store(&key, None, 1);
        let second = reaper.join();
        assert!(second.core.reap() <= 1);
        second.core.drop_orphans();
        first.assert_whole();
        let found = first.check(&key);
        assert_eq!(first.free_slots(), 2 - usize::from(found.is_some()), "what holds no block is free");
        match (found, stored) {
            (Some(1), Some(Published::Visible)) => "stored",
            (Some(3), Some(Published::Duplicate)) => "was there",
            // The reaper had the lock, and nobody waits for long.
            (None | Some(3), Some(Published::Not)) => "locked out",
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn a_death_in_the_middle_of_a_publish_leaves_nothing_behind() {
    reap_beside_store("reserve.keyed", &["stored", "locked out?"]);
    reap_beside_store("publish.odd", &["stored", "locked out?"]);
    reap_beside_store("publish.linked", &["stored", "locked out?"]);
    reap_beside_store("publish.sealed", &["was there", "locked out?"]);
}

#[test]
fn a_death_before_a_removal_was_decided_brings_the_block_back() {
    reap_beside_store("evict.claimed", &["was there", "locked out?"]);
}

#[test]
fn a_death_after_a_removal_was_decided_finishes_it() {
    reap_beside_store("evict.unlinked", &["stored", "locked out?"]);
}

/// A process dies at `point` while it removes a block; a sibling stores and removes the key while another one reaps.
fn removed_beside_reap(point: &'static str) -> &'static str {
    let (world, first) = World::new(2);
    let (dying, second) = (world.process(), world.process());
    let key = first.keys[0];
    first.store(&key, None, 3);
    dying.dies(point, |process| {
        process.core.expel(process.find(&key).expect("it is there"));
    });
    let reaper = spawn(move || {
        second.core.reap();
        second
    });
    let replaced = first.replace(&key, 1) == Published::Visible;
    let removed = first.find(&key).is_some_and(|block| first.core.expel(block));
    let second = reaper.join();
    second.core.reap();
    second.core.drop_orphans();
    first.assert_whole();
    assert!(!(replaced && removed) || first.find(&key).is_none(), "an older block came back behind a newer one");
    if replaced && removed { "removed" } else { "locked out" }
}

#[test]
fn what_was_stored_and_removed_since_a_death_does_not_bring_the_older_block_back() {
    explore("store and remove beside reap (claimed)", 1, &["removed", "locked out?"], || {
        removed_beside_reap("evict.claimed")
    });
    explore("store and remove beside reap (unlinked)", 1, &["removed", "locked out?"], || {
        removed_beside_reap("evict.unlinked")
    });
}

#[test]
fn what_a_living_worker_may_still_write_stays_reserved_until_it_is_gone() {
    explore("reap a leader beside join", 1, &["joined in time", "refused"], || {
        let (world, first) = World::new(1);
        let (leader, worker) = (world.process(), world.process());
        let key = first.keys[0];
        let (member, number) = (leader.core.me, leader.number());
        let block = leader.reserve(&key).expect("a slot is free");
        drop(leader);
        world.kill(number);
        let worker = spawn(move || {
            let joined = worker.core.join(member).is_ok();
            if joined {
                worker.fill(block, content(&key, 2));
            }
            (joined, worker)
        });
        first.core.reap();
        // If the slot is free, nobody writes it any more.
        if let Some(block) = first.reserve(&first.keys[1]) {
            first.fill(block, content(&first.keys[1], 1));
            first.publish(block, &first.keys[1], None, false);
        }
        let (joined, worker) = worker.join();
        let number = worker.number();
        drop(worker);
        world.kill(number);
        first.core.reap();
        first.assert_whole();
        assert_eq!(first.core.reap(), 0, "nobody dead is left");
        if joined { "joined in time" } else { "refused" }
    });
}
