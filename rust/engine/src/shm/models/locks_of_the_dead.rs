//! The lock word: one holder at a time, taken over from the dead by one successor and from the living by nobody.

use std::sync::Arc;

use loom::cell::UnsafeCell;

use super::world::{Process, World, explore};
use crate::model_words::spawn;

struct Guarded(UnsafeCell<u64>);

impl Guarded {
    /// Count one up under the lock; `false` if the lock could not be had.
    fn add(&self, process: &Process, die: bool) -> bool {
        let Some(guard) = process.core.lock(&process.core.control.stripes()[0].lock) else { return false };
        // SAFETY: loom looks at every access for one that is going on at the same time.
        self.0.with_mut(|count| unsafe { *count += 1 });
        if die {
            crate::crash_point::pass("publish.locked");
        }
        drop(guard);
        true
    }
}

#[test]
fn a_lock_has_one_holder_at_a_time() {
    explore("lock", 2, &["both"], || {
        let (world, first) = World::new(1);
        let second = world.process();
        let guarded = Arc::new(Guarded(UnsafeCell::new(0)));
        let shared = Arc::clone(&guarded);
        let other = spawn(move || shared.add(&second, false));
        let had = [guarded.add(&first, false), other.join()];
        // SAFETY: nobody is left.
        let count = guarded.0.with(|count| unsafe { *count });
        assert_eq!(count, had.iter().map(|had| u64::from(*had)).sum::<u64>());
        first.assert_whole();
        assert_eq!(had, [true, true], "a living holder is soon done");
        "both"
    });
}

#[test]
fn the_lock_of_a_dead_holder_goes_to_one_successor() {
    explore("lock of a dead holder", 2, &["both", "one gave up"], || {
        let (world, first) = World::new(1);
        let (dying, second) = (world.process(), world.process());
        let guarded = Arc::new(Guarded(UnsafeCell::new(0)));
        dying.dies("publish.locked", |process| assert!(!guarded.add(process, true), "it is dead"));
        let theirs = Arc::clone(&guarded);
        let other = spawn(move || theirs.add(&second, false));
        let had = [guarded.add(&first, false), other.join()];
        // SAFETY: nobody is left.
        let count = guarded.0.with(|count| unsafe { *count });
        assert_eq!(count, 1 + had.iter().map(|had| u64::from(*had)).sum::<u64>());
        first.assert_whole();
        match had {
            [true, true] => "both",
            [false, false] => panic!("the lock of the dead went to nobody"),
            _ => "one gave up",
        }
    });
}
