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
    reap_beside_store("reserve.keyed", &["stored"]);
    reap_beside_store("publish.odd", &["stored"]);
    reap_beside_store("publish.linked", &["stored"]);
    reap_beside_store("publish.sealed", &["was there"]);
}

#[test]
fn a_death_in_the_middle_of_a_removal_brings_the_block_back() {
    reap_beside_store("evict.claimed", &["was there", "stored"]);
    reap_beside_store("evict.unlinked", &["was there", "stored"]);
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
