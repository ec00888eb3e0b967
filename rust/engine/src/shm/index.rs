//! The index: hash chains through the slot headers. Readers take no lock; writers one of many.
//!
//! Every structural change is a single atomic store (a new head, or the link that bypasses a slot), so a writer that
//! dies at any instruction leaves an intact chain; what may be stale is only whether a slot is on it, and that is
//! decided by the slot's own state. The stripe's version is odd during a change: a reader that finds its key needs
//! no version (the slot's state word proves the hit), a reader that does not walks again if the version moved.

use crate::key::{BlockRef, Key};
use crate::limits::{CHAIN_HOPS_AHEAD, CHAIN_HOPS_MAX, LOOKUP_BATCH, READ_RETRIES_MAX};
use crate::shm::core::Core;
use crate::shm::evict::name_of;
use crate::shm::lock::LockGuard;
use crate::shm::namespace::Identity;
use crate::shm::rows::{SlotHeader, Stripe};
use crate::shm::state::{SlotState, State, sealed_word};
use crate::sync::{Acquire, AtomicU32, AtomicU64, Relaxed, Release, SeqCst, fence, yield_now};

/// Outcome of one walk by a reader.
enum Walk {
    Hit(BlockRef),
    Miss,
    /// A writer changed the chain meanwhile.
    Changed,
}

impl Core {
    pub(crate) fn bucket_of(&self, identity: &Identity, key: &Key) -> usize {
        key.spread(u64::from(identity.id)) as usize & (self.control.geometry().buckets() - 1)
    }

    pub(crate) fn stripe_of(&self, bucket: usize) -> &Stripe {
        let stripes = self.control.stripes();
        &stripes[bucket & (stripes.len() - 1)]
    }

    /// The sealed block of `key`, if there is one. Takes no lock.
    pub(crate) fn find(&self, identity: &Identity, key: &Key) -> Option<BlockRef> {
        self.find_surely(identity, key).flatten()
    }

    /// As [`Self::find`], but `None` if a writer was in the way for so long that nothing is known.
    pub(crate) fn find_surely(&self, identity: &Identity, key: &Key) -> Option<Option<BlockRef>> {
        let bucket = self.bucket_of(identity, key);
        let head = self.control.buckets()[bucket].load(Acquire);
        self.find_from(identity, key, bucket, head)
    }

    fn find_from(&self, identity: &Identity, key: &Key, bucket: usize, first_head: u32) -> Option<Option<BlockRef>> {
        let stripe = self.stripe_of(bucket);
        if let Walk::Hit(block) = self.walk(identity, key, first_head) {
            return Some(Some(block));
        }
        for attempt in 0..READ_RETRIES_MAX {
            let version = stripe.version.load(Acquire);
            let head = self.control.buckets()[bucket].load(Acquire);
            match self.walk(identity, key, head) {
                Walk::Hit(block) => return Some(Some(block)),
                Walk::Miss => {
                    fence(SeqCst);
                    if version.is_multiple_of(2) && stripe.version.load(Relaxed) == version {
                        return Some(None);
                    }
                }
                Walk::Changed => {}
            }
            if attempt > 4 {
                if self.is_held_for_long(&stripe.lock) {
                    break;
                }
                yield_now();
            }
        }
        self.stats.lookups_uncertain.add(1);
        self.find_locked(identity, key)
    }

    /// Decide under the lock what readers could not; a stopped writer costs a bounded wait, then nothing is known.
    #[cold]
    fn find_locked(&self, identity: &Identity, key: &Key) -> Option<Option<BlockRef>> {
        let guard = self.lock_bucket(self.bucket_of(identity, key))?;
        Some(guard.find(identity, key))
    }

    fn walk(&self, identity: &Identity, key: &Key, head: u32) -> Walk {
        let mut link = head;
        for _ in 0..CHAIN_HOPS_MAX {
            let Some(slot) = link.checked_sub(1) else { return Walk::Miss };
            let Some(header) = self.control.slot(slot) else { return Walk::Changed };
            let before = header.state.load(Acquire);
            if holds(header, identity, key) {
                fence(Acquire);
                if before as u8 == State::Sealed as u8 && header.state.load(Relaxed) == before {
                    return Walk::Hit(BlockRef::new(slot, (before >> 32) as u32));
                }
            }
            link = header.next.load(Acquire);
        }
        self.want_rebuild("a chain of the index does not end");
        Walk::Changed
    }

    /// Find many keys; the table reads of a batch are independent, so that their cache misses overlap.
    pub(crate) fn find_many(&self, identity: &Identity, keys: &[Key], mut found: impl FnMut(Option<BlockRef>) -> bool) {
        let buckets = self.control.buckets();
        for batch in keys.chunks(LOOKUP_BATCH) {
            let mut places = [(0usize, 0u32); LOOKUP_BATCH];
            for (place, key) in places.iter_mut().zip(batch) {
                place.0 = self.bucket_of(identity, key);
            }
            for place in places.iter_mut().take(batch.len()) {
                place.1 = buckets[place.0].load(Acquire);
            }
            self.step_to_likely(&mut places, batch);
            for (place, key) in places.iter().zip(batch) {
                if !found(self.find_from(identity, key, place.0, place.1).flatten()) {
                    return;
                }
            }
        }
    }

    /// Move each place along its chain to the first slot whose key begins right. The loads of one round do not depend
    /// on each other, so the processor has many cache misses under way at once; a walk that starts further down the
    /// chain proves its hits like any other, and a miss is decided by a walk from the head.
    fn step_to_likely(&self, places: &mut [(usize, u32); LOOKUP_BATCH], batch: &[Key]) {
        let mut warm = 0u64;
        for _ in 0..CHAIN_HOPS_AHEAD {
            for (place, key) in places.iter_mut().zip(batch) {
                let Some(header) = place.1.checked_sub(1).and_then(|slot| self.control.slot(slot)) else { continue };
                warm ^= header.fingerprint[0].load(Relaxed);
                if header.key[0].load(Relaxed) != key.words()[0] {
                    place.1 = header.next.load(Acquire);
                }
            }
        }
        std::hint::black_box(warm);
    }

    /// Lock the stripe of `bucket`; `None` after a bounded wait.
    pub(crate) fn lock_bucket(&self, bucket: usize) -> Option<BucketGuard<'_>> {
        let stripe = self.stripe_of(bucket);
        let guard = self.lock(&stripe.lock)?;
        if stripe.version.load(Relaxed) % 2 == 1 {
            // Left by a dead holder. The chains are whole, but it may have died while it replaced a block.
            crate::crash_point::pass("takeover.odd");
            self.drop_shadowed(bucket % self.control.stripes().len());
            stripe.version.fetch_add(1, SeqCst);
            crate::crash_point::pass("takeover.even");
        }
        Some(BucketGuard { core: self, head: &self.control.buckets()[bucket], stripe, _guard: guard })
    }

    /// Take away sealed blocks that a newer one of the same key precedes on its chain: who was replacing them died
    /// right after sealing the new one. The stripe is locked and its version odd.
    fn drop_shadowed(&self, stripe: usize) {
        for head in self.control.buckets().iter().skip(stripe).step_by(self.control.stripes().len()) {
            let (mut names, mut shadowed) = (Vec::new(), Vec::new());
            let mut link = head.load(Acquire);
            for _ in 0..CHAIN_HOPS_MAX {
                let Some(slot) = link.checked_sub(1) else { break };
                let Some(header) = self.control.slot(slot) else { break };
                let sealed = SlotState::decode(header.state.load(Acquire)).filter(|s| s.state == State::Sealed);
                if let (Some(state), Some(name)) = (sealed, name_of(header)) {
                    if names.contains(&name) { shadowed.push(state.block(slot)) } else { names.push(name) }
                }
                link = header.next.load(Acquire);
            }
            for block in shadowed {
                self.supersede(block, |slot| self.unlink_from(head, slot));
            }
        }
    }

    fn unlink_from(&self, head: &AtomicU32, slot: u32) {
        if let Some(link) = self.link_to(head, slot) {
            link.store(self.control.slot_unchecked(slot).next.load(Acquire), Release);
        }
    }

    fn link_to<'a>(&'a self, head: &'a AtomicU32, slot: u32) -> Option<&'a AtomicU32> {
        let mut link = head;
        for _ in 0..CHAIN_HOPS_MAX {
            let next = link.load(Acquire).checked_sub(1)?;
            if next == slot {
                return Some(link);
            }
            link = &self.control.slot(next)?.next;
        }
        self.want_rebuild("a chain of the index does not end");
        None
    }

    pub(crate) fn want_rebuild(&self, why: &str) {
        if self.control.header().rebuild_wanted.swap(1, SeqCst) == 0 {
            log::error!("pegaflow: {why}; the index will be rebuilt from the slot headers");
            self.wake();
        }
    }
}

/// Whether the header names this key in this namespace at its present epoch.
fn holds(header: &SlotHeader, identity: &Identity, key: &Key) -> bool {
    let tag = header.tag.load(Relaxed);
    tag >> 16 == identity.id
        && tag as u8 == key.len_bytes()
        && same4(&header.key, &key.words())
        && same4(&header.fingerprint, &identity.fingerprint)
}

/// Comparison of four words without a branch or a call per word; this is what a lookup spends its time on.
#[inline]
fn same4(words: &[AtomicU64; 4], values: &[u64; 4]) -> bool {
    let difference = |position: usize| words[position].load(Relaxed) ^ values[position];
    difference(0) | difference(1) | difference(2) | difference(3) == 0
}

/// One bucket, held for changes.
pub(crate) struct BucketGuard<'a> {
    core: &'a Core,
    head: &'a AtomicU32,
    stripe: &'a Stripe,
    _guard: LockGuard<'a>,
}

impl BucketGuard<'_> {
    /// The sealed block of `key` in this bucket.
    pub(crate) fn find(&self, identity: &Identity, key: &Key) -> Option<BlockRef> {
        match self.core.walk(identity, key, self.head.load(Acquire)) {
            Walk::Hit(block) => Some(block),
            Walk::Miss | Walk::Changed => None,
        }
    }

    /// Bring back a block of `key` that a dead process was about to take away with the lock that this process has
    /// now: else its reaper would bring it back, after what is stored in its place.
    pub(crate) fn restore_abandoned(&self, identity: &Identity, key: &Key) {
        let mut link = self.head.load(Acquire);
        for _ in 0..CHAIN_HOPS_MAX {
            let Some(header) = link.checked_sub(1).and_then(|slot| self.core.control.slot(slot)) else { return };
            let word = header.state.load(Acquire);
            if word as u8 == State::Evicting as u8 && holds(header, identity, key) {
                let sealed = sealed_word((word >> 32) as u32);
                let _changed = header.state.compare_exchange(word, sealed, SeqCst, Relaxed);
            }
            link = header.next.load(Acquire);
        }
    }

    /// Announce a change to readers; [`Self::finish`] ends it.
    pub(crate) fn begin(&self) {
        self.stripe.version.fetch_add(1, SeqCst);
    }

    /// End of a change.
    pub(crate) fn finish(&self) {
        self.stripe.version.fetch_add(1, SeqCst);
    }

    /// Put `slot` in front of the chain, within a change.
    pub(crate) fn link(&self, slot: u32) {
        let header = self.core.control.slot_unchecked(slot);
        header.next.store(self.head.load(Acquire), Release);
        crate::crash_point::pass("publish.chained");
        self.head.store(slot + 1, Release);
    }

    /// Take `slot` off the chain if it is on it, within a change.
    pub(crate) fn unlink(&self, slot: u32) {
        self.core.unlink_from(self.head, slot);
    }

    /// Whether `slot` is on the chain.
    pub(crate) fn is_linked(&self, slot: u32) -> bool {
        self.core.link_to(self.head, slot).is_some()
    }
}
