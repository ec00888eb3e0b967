//! Words, pauses and time as the models have them, which run every interleaving of a few processes under loom.
//!
//! A process is a loom thread. It may die: from then on its stores do nothing, and what it runs while it unwinds
//! (guards that are dropped) leaves no trace, as after a kill.
//!
//! loom takes sequentially consistent accesses for acquire and release, which is too weak, and knows sequentially
//! consistent fences, which are too strong. So every model runs twice, with such a fence before each sequentially
//! consistent load, and with one behind each such store: what passes both needs no more than the accesses promise.
//!
//! loom looks for the order of two accesses only if nothing else touched the word in between, not even the second
//! process itself. So each word has an echo for every process, which that process reads before each of its loads, and
//! which every other one changes before each store: no order of a load and a store is left out.

use std::cell::Cell;
use std::time::Duration;

use crate::limits::LOCK_WAIT_MAX;
use crate::sync::{Relaxed, SeqCst};

pub(crate) use loom::sync::atomic::fence;
pub(crate) use loom::thread::yield_now;

use crate::sync::Ordering;

/// Looks at a lock before a wait for it is over.
const LOOKS_MAX: u32 = 2;

/// Which accesses get a fence in this run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fences {
    Loads,
    Stores,
}

/// Processes that do something at the same time.
const AT_ONCE_MAX: usize = 3;

std::thread_local! {
    /// All threads of a model run on one thread of the system.
    static FENCES: Cell<Fences> = const { Cell::new(Fences::Loads) };
    /// How many of the model's threads are at work beside the first.
    static AT_ONCE: Cell<usize> = const { Cell::new(0) };
}

loom::thread_local! {
    static DEAD: Cell<bool> = Cell::new(false);
    static LOOKS: Cell<u32> = Cell::new(0);
    static NUMBER: Cell<usize> = Cell::new(0);
    static DIES_AT: Cell<Option<&'static str>> = Cell::new(None);
}

/// What a process unwinds with when it dies.
pub(crate) struct Died;

/// Fences of the runs that this thread begins.
pub(crate) fn set_fences(fences: Fences) {
    FENCES.with(|cell| cell.set(fences));
}

/// Run `process` at the same time as all others.
pub(crate) fn spawn<T: 'static>(process: impl FnOnce() -> T + 'static) -> Running<T> {
    let number = AT_ONCE.with(Cell::get) + 1;
    assert!(number < AT_ONCE_MAX, "a model has at most {AT_ONCE_MAX} processes at once");
    AT_ONCE.with(|cell| cell.set(number));
    Running(loom::thread::spawn(move || {
        NUMBER.with(|cell| cell.set(number));
        process()
    }))
}

/// A process at work.
pub(crate) struct Running<T>(loom::thread::JoinHandle<T>);

impl<T> Running<T> {
    /// Wait until it is done. All are waited for, the one that was spawned last at the end or not.
    pub(crate) fn join(self) -> T {
        let outcome = self.0.join().expect("a failure ends the model");
        AT_ONCE.with(|cell| cell.set(cell.get() - 1));
        outcome
    }
}

/// A new execution: nobody is at work.
pub(crate) fn start_over() {
    AT_ONCE.with(|cell| cell.set(0));
}

/// This process dies when it gets to the crash point `name`.
pub(crate) fn die_at(name: &'static str) {
    DIES_AT.with(|cell| cell.set(Some(name)));
}

/// Whether this process is dead.
pub(crate) fn is_dead() -> bool {
    DEAD.with(Cell::get)
}

/// What comes now is done by the kernel on behalf of this process, dead or not.
pub(crate) fn be_the_kernel() {
    DEAD.with(|cell| cell.set(false));
    DIES_AT.with(|cell| cell.set(None));
}

/// Pass the crash point `name`.
pub(crate) fn pass(name: &str) {
    if DIES_AT.with(Cell::get) == Some(name) && !is_dead() {
        DEAD.with(|cell| cell.set(true));
        std::panic::resume_unwind(Box::new(Died));
    }
}

/// A pause is nothing but a chance for the others.
pub(crate) fn sleep(_pause: Duration) {
    yield_now();
}

/// Start of a wait, which is over after a number of looks at the clock.
#[derive(Clone, Copy)]
pub(crate) struct Instant;

impl Instant {
    pub(crate) fn now() -> Self {
        LOOKS.with(|looks| looks.set(0));
        Self
    }

    pub(crate) fn elapsed(&self) -> Duration {
        let looks = LOOKS.with(|looks| looks.replace(looks.get() + 1)) + 1;
        if looks > LOOKS_MAX { LOCK_WAIT_MAX } else { Duration::ZERO }
    }
}

fn fence_for(order: Ordering, fences: Fences) {
    if order == SeqCst && AT_ONCE.with(Cell::get) > 0 && FENCES.with(Cell::get) == fences {
        fence(SeqCst);
    }
}

/// See above.
struct Echoes([loom::sync::atomic::AtomicU8; AT_ONCE_MAX]);

impl Echoes {
    fn new() -> Self {
        Self(std::array::from_fn(|_| loom::sync::atomic::AtomicU8::new(0)))
    }

    fn of_load(&self) {
        if AT_ONCE.with(Cell::get) > 0 {
            self.0[NUMBER.with(Cell::get)].load(Relaxed);
        }
    }

    fn of_store(&self) {
        let (at_once, mine) = (AT_ONCE.with(Cell::get), NUMBER.with(Cell::get));
        if at_once > 0 {
            let theirs = self.0.iter().take(at_once + 1).enumerate().filter(|(number, _)| *number != mine);
            theirs.for_each(|(_, echo)| {
                echo.fetch_add(0, Relaxed);
            });
        }
    }
}

macro_rules! word {
    ($name:ident, $value:ty, $($change:ident),*) => {
        /// A word of shared memory.
        pub(crate) struct $name {
            word: loom::sync::atomic::$name,
            echoes: Echoes,
        }

        impl $name {
            pub(crate) fn new(value: $value) -> Self {
                Self { word: loom::sync::atomic::$name::new(value), echoes: Echoes::new() }
            }

            pub(crate) fn load(&self, order: Ordering) -> $value {
                fence_for(order, Fences::Loads);
                self.echoes.of_load();
                self.word.load(order)
            }

            pub(crate) fn store(&self, value: $value, order: Ordering) {
                if !is_dead() {
                    self.echoes.of_store();
                    self.word.store(value, order);
                    fence_for(order, Fences::Stores);
                }
            }

            pub(crate) fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                if is_dead() {
                    return Err(current);
                }
                fence_for(success, Fences::Loads);
                self.echoes.of_store();
                let outcome = self.word.compare_exchange(current, new, success, failure);
                if outcome.is_ok() {
                    fence_for(success, Fences::Stores);
                }
                outcome
            }

            $(pub(crate) fn $change(&self, value: $value, order: Ordering) -> $value {
                if is_dead() {
                    return value;
                }
                fence_for(order, Fences::Loads);
                self.echoes.of_store();
                let before = self.word.$change(value, order);
                fence_for(order, Fences::Stores);
                before
            })*
        }
    };
}

word!(AtomicU32, u32, fetch_or);
word!(AtomicU64, u64, swap, fetch_add, fetch_or, fetch_and, fetch_max);

impl AtomicU64 {
    pub(crate) fn compare_exchange_weak(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        self.compare_exchange(current, new, success, failure)
    }
}
