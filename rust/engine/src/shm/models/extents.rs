//! Taking an extent out of use: it goes with no slot in anybody's hands, or it stays with every slot.

use super::world::{World, explore};
use crate::model_words::spawn;
use crate::shm::extent::ExtentState;
use crate::shm::publish::Published;

#[test]
fn an_empty_extent_goes_or_gives_a_slot_but_not_both() {
    explore("retire beside reserve", 1, &["retired", "reserved", "neither"], || {
        let (world, first) = World::new(1);
        let second = world.process();
        let key = first.keys[0];
        let extent = first.core.extents(first.ns)[0].clone();
        let taker = spawn(move || second.core.retire(&extent, false));
        let stored = first.store(&key, None, 1);
        let retired = taker.join();
        first.core.drop_orphans();
        let found = first.check(&key);
        first.assert_whole();
        match (retired, stored) {
            (true, None) => {
                assert_eq!((found, first.core.extents(first.ns).len()), (None, 0));
                "retired"
            }
            // The reservation found nothing while the extent was being taken, which then saw it in use and came back.
            (false, None) => {
                assert_eq!((found, first.free_slots()), (None, 1));
                "neither"
            }
            (false, Some(Published::Visible)) => {
                assert_eq!((found, first.core.extents(first.ns).len()), (Some(1), 1));
                "reserved"
            }
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn an_extent_with_a_leased_block_stays() {
    explore("retire beside lease", 1, &["retired", "leased"], || {
        let (world, first) = World::new(1);
        let second = world.process();
        let key = first.keys[0];
        first.store(&key, None, 1);
        let extent = first.core.extents(first.ns)[0].clone();
        let taker = spawn(move || second.core.retire(&extent, true));
        let leased = first.lease(&key);
        if let Some(block) = leased {
            assert_eq!(first.read(block) & 0xFF, 1);
        }
        let retired = taker.join();
        if let Some(block) = leased {
            assert!(!retired, "the extent of a leased block was taken");
            assert_eq!(first.read(block) & 0xFF, 1);
            first.release(block);
        }
        first.assert_whole();
        assert_eq!(first.core.extents(first.ns).len(), usize::from(!retired));
        if retired { "retired" } else { "leased" }
    });
}

#[test]
fn an_extent_of_a_living_process_that_is_reaped_is_gone_or_whole() {
    explore("retire beside its own reaper", 1, &["retired", "stayed"], || {
        let (world, first) = World::new(1);
        let second = world.process();
        let key = first.keys[0];
        let extent = first.core.extents(first.ns)[0].clone();
        // It loses its lock, and does not know.
        world.kill(second.number());
        let taker = spawn(move || second.core.retire(&extent, false));
        first.core.reap();
        let stored = first.store(&key, None, 1);
        taker.join();
        assert!(first.core.reap() <= 1, "what could not be settled beside it");
        first.core.drop_orphans();
        first.assert_whole();
        let all = first.core.all_extents();
        assert!(all.iter().all(|extent| extent.state == ExtentState::Ready), "{all:?}");
        assert!(stored != Some(Published::Visible) || first.check(&key) == Some(1), "a block is lost");
        if all.is_empty() { "retired" } else { "stayed" }
    });
}
