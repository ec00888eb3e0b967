//! Counting and listing all values.

use crate::error::{Error, Result};
use crate::key::BlockRef;
use crate::shm::extent::Extent;
use crate::shm::namespace::Identity;
use crate::shm::rows::{SlotHeader, load4};
use crate::shm::state::{SlotState, State};
use crate::sync::{Acquire, Relaxed, SeqCst, fence};

use super::bytes;
use super::classes::HEAD;
use super::find::Pinned;
use super::patience::Patience;
use super::record::RECORD_BYTES;
use super::store::Inner;

/// Scans that are thrown away because the index changed meanwhile.
const SCANS_MAX: usize = 3;

/// Looks at one bucket before asking whether a dead process left it marked as changing.
const LOOKS_PER_LOCK: u32 = 8;

impl Inner {
    pub(super) fn count(&self) -> Result<usize> {
        let identity = self.core().identity(self.classes.namespace(HEAD))?;
        let mut count = 0;
        for _ in 0..SCANS_MAX {
            let before = self.changes();
            count = self.heads(&identity).count();
            if self.changes() == before {
                break;
            }
        }
        Ok(count)
    }

    pub(super) fn keys(&self) -> Result<Vec<String>> {
        let identity = self.core().identity(self.classes.namespace(HEAD))?;
        for _ in 0..SCANS_MAX {
            let before = self.changes();
            let pinned = self.heads(&identity).map(|block| Pinned::new(self.core(), block));
            let keys = pinned.map(|pinned| Some(self.key_of(&pinned?))).collect::<Option<Vec<_>>>();
            if let Some(keys) = keys
                && self.changes() == before
            {
                return Ok(keys.into_iter().flatten().collect());
            }
        }
        self.keys_by_bucket(&identity)
    }

    /// Heads of all values as far as they stay where they are meanwhile.
    fn heads(&self, identity: &Identity) -> impl Iterator<Item = BlockRef> {
        let core = self.core();
        let extents = core.extents(self.classes.namespace(HEAD));
        let slots: Vec<_> = extents.iter().map(Extent::slots).collect();
        // Reading the stamps first skips free slots and members much faster than reading their headers.
        slots.into_iter().flatten().filter(|slot| core.control.stamp(*slot).load(Relaxed) != 0).filter_map(|slot| {
            let state = sealed_head(core.control.slot(slot)?, identity)?;
            Some(state.block(slot))
        })
    }

    /// A number that is another after every change of the index.
    fn changes(&self) -> u64 {
        self.core().control.stripes().iter().fold(0, |sum, stripe| sum.wrapping_add(stripe.version.load(Acquire)))
    }

    /// Keys of all values while others keep changing the index: exact for each bucket.
    fn keys_by_bucket(&self, identity: &Identity) -> Result<Vec<String>> {
        let mut keys = Vec::new();
        for bucket in 0..self.core().control.buckets().len() {
            let mut patience = Patience::default();
            let complete = keys.len();
            while !self.keys_of_bucket(bucket, identity, &mut keys)? {
                keys.truncate(complete);
                patience.wait()?;
                if patience.tries() % LOOKS_PER_LOCK == 0 {
                    drop(self.core().lock_bucket(bucket));
                }
            }
        }
        Ok(keys)
    }

    /// Append the keys of one bucket. `false` if it was changed meanwhile.
    fn keys_of_bucket(&self, bucket: usize, identity: &Identity, keys: &mut Vec<String>) -> Result<bool> {
        let core = self.core();
        let head = core.control.buckets()[bucket].load(Acquire);
        if head == 0 && core.stripe_of(bucket).version.load(Relaxed).is_multiple_of(2) {
            return Ok(true);
        }
        let Some(blocks) = self.blocks_of_bucket(bucket, identity) else { return Ok(false) };
        for block in blocks {
            let Some(pinned) = Pinned::new(core, block) else { return Ok(false) };
            keys.extend(self.key_of(&pinned));
        }
        Ok(true)
    }

    /// All heads of one bucket at one instant.
    fn blocks_of_bucket(&self, bucket: usize, identity: &Identity) -> Option<Vec<BlockRef>> {
        let core = self.core();
        let stripe = core.stripe_of(bucket);
        let version = stripe.version.load(Acquire);
        if !version.is_multiple_of(2) {
            return None;
        }
        let mut blocks = Vec::new();
        let mut link = core.control.buckets()[bucket].load(Acquire);
        for _ in 0..crate::limits::CHAIN_HOPS_MAX {
            let Some(slot) = link.checked_sub(1) else {
                fence(SeqCst);
                return (stripe.version.load(Relaxed) == version).then_some(blocks);
            };
            let header = core.control.slot(slot)?;
            blocks.extend(sealed_head(header, identity).map(|state| state.block(slot)));
            link = header.next.load(Acquire);
        }
        None
    }

    /// Text of a key; what is damaged is left out.
    fn key_of(&self, pinned: &Pinned<'_>) -> Option<String> {
        let text = pinned
            .record()
            .and_then(|record| bytes::text(pinned.core, pinned.block, RECORD_BYTES..record.prefix_bytes()))
            .and_then(|text| String::from_utf8(text).map_err(|_| Error::corrupt("a key is no UTF-8")));
        text.inspect_err(|error| log::error!("pegaflow: a value is left out of the keys: {error}")).ok()
    }
}

/// State of a slot that holds the head of a value.
fn sealed_head(header: &SlotHeader, identity: &Identity) -> Option<SlotState> {
    let state = SlotState::decode(header.state.load(Acquire)).filter(|state| state.state == State::Sealed)?;
    let named = header.tag.load(Relaxed) >> 16 == identity.id && load4(&header.fingerprint) == identity.fingerprint;
    named.then_some(state)
}
