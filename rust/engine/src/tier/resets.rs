//! Resets reach the files: what was forgotten in memory is forgotten there before its namespace is served again.
//!
//! The pool's epoch rises first, for all processes at once. The tier's `forgotten` follows when the files have it on
//! disk; a block counts for the tier only while both are equal.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::counters::Counter;
use super::segment::Segment;
use super::slots::SlotTarget;
use crate::error::Result;
use crate::shm::clock::boot_ms;
use crate::shm::core::Core;
use crate::shm::namespace::{Identity, Namespace, Origin};
use crate::ssd::{Fingerprint, Store};
use crate::sync::{Relaxed, SeqCst};

/// What never changes of a namespace.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) origin: Origin,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) part_bytes: Vec<u64>,
    pub(crate) block_bytes: u64,
}

/// Namespaces by number, looked at once.
#[derive(Default)]
pub(crate) struct KnownNamespaces(HashMap<u32, Known>);

impl KnownNamespaces {
    pub(crate) fn get(&mut self, core: &Core, ns: Namespace) -> Option<&Known> {
        let place = match self.0.entry(ns.id()) {
            Entry::Occupied(known) => return Some(known.into_mut()),
            Entry::Vacant(place) => place,
        };
        let (origin, info) = (core.origin_of(ns)?, core.namespace_info(ns).ok()?);
        let mut fingerprint = [0; 32];
        for (piece, word) in fingerprint.chunks_exact_mut(8).zip(origin.fingerprint) {
            piece.copy_from_slice(&word.to_le_bytes());
        }
        let block_bytes = info.part_bytes.iter().sum();
        Some(place.insert(Known { origin, fingerprint, part_bytes: info.part_bytes, block_bytes }))
    }
}

/// What headers of a namespace carry and what its records are called, as long as it is served.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Served {
    pub(crate) identity: Identity,
    /// Epoch of the files.
    pub(crate) epoch: u64,
}

impl Segment {
    /// Whether blocks of the family of `first` go to the files.
    pub(crate) fn is_used(&self, first: u32) -> bool {
        self.namespaces().get(first as usize).is_some_and(|row| row.used.load(SeqCst) != 0)
    }

    /// The pool's epoch up to which the files have forgotten a family.
    pub(crate) fn forgotten(&self, first: u32) -> u64 {
        self.namespaces().get(first as usize).map_or(0, |row| row.forgotten.load(SeqCst).max(1))
    }

    /// How blocks of a namespace are named while it is served; `None` while the files lag behind a reset.
    pub(crate) fn served(&self, core: &Core, ns: Namespace, origin: &Origin) -> Option<Served> {
        let row = self.namespaces().get(origin.first as usize)?;
        let epoch = row.epoch.load(SeqCst).checked_sub(1)?;
        let now = core.epoch_of_family(origin.first)?;
        if row.used.load(SeqCst) == 0 || self.forgotten(origin.first) != now {
            return None;
        }
        let mut fingerprint = origin.fingerprint;
        fingerprint[3] ^= now;
        Some(Served { identity: Identity { id: ns.id(), fingerprint }, epoch })
    }

    /// Serve nothing.
    pub(crate) fn clear_epochs(&self) {
        self.namespaces().iter().for_each(|row| row.epoch.store(0, SeqCst));
    }

    /// These are the files that are open now: what others have forgotten, they need not have.
    pub(crate) fn note_files(&self, identity: u64) {
        if self.header().files.load(SeqCst) != identity {
            self.namespaces().iter().for_each(|row| row.forgotten.store(0, SeqCst));
            self.header().files.store(identity, SeqCst);
        }
    }

    /// Have the files forget what was reset, and serve what is used and up to date. An error: they could not.
    pub(crate) fn follow_resets(
        &self,
        core: &Core,
        known: &mut KnownNamespaces,
        store: &mut Store<SlotTarget>,
    ) -> Result<()> {
        for (id, row) in (0u32..).zip(self.namespaces()) {
            let Some(now) = core.epoch_of_family(id) else { break };
            if row.used.load(SeqCst) == 0 {
                continue;
            }
            let Some(fingerprint) = known.get(core, Namespace(id)).map(|known| known.fingerprint) else { continue };
            if self.forgotten(id) < now {
                row.epoch.store(0, SeqCst);
                // Disks may keep it waiting now.
                self.header().alive_ms.store(0, Relaxed);
                crate::crash_point::pass("ssd.unserved");
                store.forget(&fingerprint)?;
                self.header().alive_ms.store(boot_ms().max(1), Relaxed);
                crate::crash_point::pass("ssd.forgotten");
                row.forgotten.fetch_max(now, SeqCst);
                crate::crash_point::pass("ssd.noted");
                self.header().add(Counter::Resets, 1);
            }
            let epoch = store.view().epoch(&fingerprint) + 1;
            if row.epoch.load(SeqCst) != epoch {
                row.epoch.store(epoch, SeqCst);
            }
        }
        Ok(())
    }
}
