//! Moving a sealed block to another slot of its namespace, so that the extent it is in can go to another namespace.
//!
//! It is found all the time but for the few stores under the lock of its bucket, at which a reader looks again. Its
//! children name it by its slot, so they are told where it is now before the extent goes.

use std::collections::HashMap;

use crate::key::{BlockRef, Key};
use crate::shm::core::Core;
use crate::shm::evict::name_of;
use crate::shm::extent::Extent;
use crate::shm::free::TakenSlot;
use crate::shm::lease::is_leased;
use crate::shm::namespace::{Identity, Namespace};
use crate::shm::process::{ProcessState, load};
use crate::shm::recency::{owner_of, tick_of};
use crate::shm::rows::SlotHeader;
use crate::shm::state::{SlotState, State, sealed_word};
use crate::sync::{AcqRel, Acquire, Relaxed, Release, SeqCst};

/// Where moved blocks are now.
pub(crate) type Moved = HashMap<BlockRef, BlockRef>;

/// A block and its copy, which nobody can see yet.
pub(crate) struct Twin {
    pub(crate) block: BlockRef,
    /// Reserved by this process.
    pub(crate) copy: BlockRef,
    identity: Identity,
    key: Key,
}

impl Core {
    /// Copy the block in `slot` to `target`, reserved by this process. `None` if there is none that can be copied.
    pub(crate) fn copy_to_twin(&self, slot: u32, target: TakenSlot) -> Option<Twin> {
        let header = self.control.slot(slot)?;
        let sealed = SlotState::decode(header.state.load(Acquire)).filter(|state| state.state == State::Sealed)?;
        let (identity, key) = name_of(header)?;
        let block = sealed.block(slot);
        if header.member_next.load(Acquire) != 0 || !self.pin(block) {
            return None;
        }
        let copied = self.copy_to(block, header, target, &identity, &key);
        if let Err(error) = self.unpin(block) {
            log::error!("pegaflow: {error}");
        }
        let copy = copied?;
        crate::crash_point::pass("retire.copied");
        Some(Twin { block, copy, identity, key })
    }

    /// Have the copy found instead of the block. Returns the slot of the block, reserved by this process. `None` if
    /// somebody uses the block, or it is gone: then the copy stays what it is.
    pub(crate) fn switch_to_twin(&self, twin: &Twin, moved: &mut Moved) -> Option<TakenSlot> {
        let header = self.control.slot(twin.block.slot())?;
        let freeing = self.switch(twin.block, header, twin.copy, &twin.identity, &twin.key)?;
        moved.insert(twin.block, twin.copy);
        self.stats.blocks_moved.add(1);
        self.recycle(twin.block.slot(), freeing)
    }

    /// Copy the bytes and the header of a pinned block.
    fn copy_to(
        &self,
        block: BlockRef,
        header: &SlotHeader,
        target: TakenSlot,
        identity: &Identity,
        key: &Key,
    ) -> Option<BlockRef> {
        let parts = self.namespace_info(Namespace(identity.id)).ok()?.parts;
        let copy = self.name_slot(target, identity, key);
        for part in 0..parts {
            let (from, from_bytes) = self.address_of(block, part)?;
            let (to, to_bytes) = self.address_of(copy, part)?;
            // SAFETY: both ranges were checked against their mappings and lie in different slots; the one is pinned by
            // this process, so its bytes stay, the other reserved by it, so nobody else touches it.
            unsafe { std::ptr::copy_nonoverlapping(from, to, from_bytes.min(to_bytes)) };
        }
        let own = self.control.slot_unchecked(copy.slot());
        own.tag.store(header.tag.load(Relaxed), Relaxed);
        own.checksum.store(header.checksum.load(Relaxed), Relaxed);
        own.used_bytes.store(header.used_bytes.load(Relaxed), Relaxed);
        own.parts_written.store(header.parts_written.load(Acquire), Release);
        Some(copy)
    }

    /// Make the copy visible instead of the block, which is FREEING by this process then.
    fn switch(
        &self,
        block: BlockRef,
        header: &SlotHeader,
        copy: BlockRef,
        identity: &Identity,
        key: &Key,
    ) -> Option<SlotState> {
        let bucket = self.lock_bucket(self.bucket_of(identity, key))?;
        let word = sealed_word(block.generation());
        let evicting = SlotState::new(block.generation(), self.me.row, State::Evicting);
        // Said before the block is out of sight: else a reader would take it for absent.
        bucket.begin();
        if header.state.compare_exchange(word, evicting.encode(), SeqCst, Relaxed).is_err() {
            bucket.finish();
            return None;
        }
        crate::crash_point::pass("retire.moving");
        if is_leased(header) {
            let _mine = header.state.compare_exchange(evicting.encode(), word, SeqCst, Relaxed);
            bucket.finish();
            return None;
        }
        // From here on nobody touches the block any more.
        self.control.namespaces()[identity.id as usize].moves.fetch_add(1, SeqCst);
        let own = self.control.slot_unchecked(copy.slot());
        own.parent.store(header.parent.load(Acquire), Relaxed);
        self.control.stamp(copy.slot()).store(self.control.stamp(block.slot()).load(SeqCst), SeqCst);
        self.disown_of_the_dead(copy.slot());
        bucket.link(copy.slot());
        crate::crash_point::pass("retire.linked");
        let reserved = self.reserved_state(copy).encode();
        let sealed = own.state.compare_exchange(reserved, sealed_word(copy.generation()), AcqRel, Relaxed).is_ok();
        crate::crash_point::pass("retire.sealed");
        bucket.unlink(if sealed { block.slot() } else { copy.slot() });
        let freeing = evicting.to(State::Freeing);
        let next = if sealed { freeing.encode() } else { word };
        let mine = header.state.compare_exchange(evicting.encode(), next, SeqCst, Relaxed).is_ok();
        bucket.finish();
        (sealed && mine).then_some(freeing)
    }

    /// Whoever reaps the owner marks its row, then takes the row out of all stamps. It may have passed this slot before
    /// the stamp came here, and the block's old slot after it had left: then the row is marked.
    fn disown_of_the_dead(&self, slot: u32) {
        if let Some(row) = owner_of(self.control.stamp(slot).load(SeqCst))
            && load(&self.control.processes()[row as usize]).1 != ProcessState::Alive
        {
            self.disown(slot, row);
        }
    }

    /// Tell the children of moved blocks where those are now. Nobody else ever has an old reference as a parent, so it
    /// does not matter what became of a slot that has one. They may be in an extent that came meanwhile, or in one that
    /// a sibling is taking.
    pub(crate) fn rename_moved_parents(&self, ns: Namespace, moved: &Moved) {
        crate::crash_point::pass("retire.moved");
        if moved.is_empty() {
            return;
        }
        for slot in self.all_extents().iter().filter(|extent| extent.namespace == ns.0).flat_map(Extent::slots) {
            let Some(header) = self.control.slot(slot) else { continue };
            let old = BlockRef(header.parent.load(Acquire));
            let Some(new) = moved.get(&old) else { continue };
            if header.parent.compare_exchange(old.0, new.0, SeqCst, Relaxed).is_err() {
                continue;
            }
            // It may have been touched meanwhile, and its chain could not be followed.
            let tick = |slot| tick_of(self.control.stamp(slot).load(SeqCst));
            let state = SlotState::decode(header.state.load(Acquire)).filter(|state| state.state == State::Sealed);
            if let Some(state) = state
                && tick(slot) >= tick(new.slot())
            {
                self.keep(state.block(slot));
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::shm::recency::stamp_word;
    use crate::sync::AtomicU64;
    use crate::{OpenOptions, Pool};

    fn relocate(core: &Core, slot: u32, target: TakenSlot) -> Option<TakenSlot> {
        core.switch_to_twin(&core.copy_to_twin(slot, target)?, &mut Moved::new())
    }

    /// A pool with one block, its key, and a free slot.
    fn one_block() -> (std::sync::Arc<Pool>, Namespace, Key, BlockRef, TakenSlot) {
        let options = OpenOptions { pool_bytes: Some(1 << 20), private: true, ..OpenOptions::default() };
        let pool = Pool::open("p", &options).expect("a private pool");
        let ns = pool.namespace(&[1; 32], 0, &[64], "test").expect("a namespace");
        pool.core().grow(ns).expect("room");
        let key = Key::new(&[7; 16]).expect("a key");
        let block = pool.reserve(ns, &[key], None, false).expect("a namespace")[0].1;
        pool.mark_written(0, &[block], None).expect("reserved");
        assert_eq!(pool.publish(&[block]).expect("written"), 1);
        let target = pool.core().take_free(ns, &pool.core().extents(ns)).expect("a free slot");
        (pool, ns, key, block, target)
    }

    #[test]
    fn a_block_that_moves_while_its_owner_is_reaped_is_on_nobodys_account() {
        let (pool, _, _, block, target) = one_block();
        let core = pool.core();
        let stamp = core.control.stamp(block.slot());
        let dead = core.me.row + 3;
        stamp.store(stamp_word(tick_of(stamp.load(SeqCst)), Some(dead)), SeqCst);
        let there = target.0;
        assert!(relocate(core, block.slot(), target).is_some());
        assert_eq!(owner_of(core.control.stamp(there).load(SeqCst)), None);
    }

    #[test]
    fn a_lease_finds_a_block_wherever_it_is_moving() {
        const LEASES: usize = 5000;
        const MOVES: u64 = 100;
        let (pool, ns, key, block, mut target) = one_block();
        let (core, done) = (pool.core(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let mover = scope.spawn(|| {
                let mut slot = block.slot();
                while done.load(Acquire) == 0 {
                    let there = target.0;
                    if let Some(left) = relocate(core, slot, target) {
                        (slot, target) = (there, left);
                    }
                }
            });
            let leased = || {
                let blocks = pool.lease(ns, &[key], 0, 1).expect("a namespace");
                pool.release(&blocks).expect("leased");
                blocks.len()
            };
            // Who moves it may have no CPU for longer than anybody waits.
            let given_up = || core.stats.lock_timeouts.get();
            let (mut tries, mut lost) = (0, 0);
            while tries < LEASES || core.stats.blocks_moved.get() < MOVES {
                let before = given_up();
                let is_lost = leased() == 0 && given_up() == before;
                (tries, lost) = (tries + 1, lost + u64::from(is_lost));
            }
            done.store(1, Release);
            mover.join().expect("no panic");
            assert_eq!(lost, 0);
        });
    }

    #[test]
    fn a_reader_never_takes_a_block_that_moves_for_absent() {
        const MOVES: usize = 20_000;
        let (pool, ns, key, block, mut target) = one_block();
        let core = pool.core();
        let identity = core.identity(ns).expect("a namespace");
        let done = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut absent = 0;
                while done.load(Acquire) == 0 {
                    absent += usize::from(core.find_surely(&identity, &key) == Some(None));
                }
                absent
            });
            let mut slot = block.slot();
            for _ in 0..MOVES {
                let there = target.0;
                if let Some(left) = relocate(core, slot, target) {
                    (slot, target) = (there, left);
                }
            }
            done.store(1, Release);
            assert_eq!(reader.join().expect("no panic"), 0);
        });
    }
}
