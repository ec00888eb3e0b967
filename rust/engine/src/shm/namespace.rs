//! Namespaces: whose blocks are whose. Two namespaces can never exchange a block, since every slot header carries the
//! fingerprint and every hit compares it.

use crate::error::{Error, ErrorKind, Result};
use crate::limits::{NAMESPACES_MAX, PARTS_MAX};
use crate::shm::control::Control;
use crate::shm::core::Core;
use crate::shm::extent::Extent;
use crate::shm::geometry::slot_stride;
use crate::shm::recency::stamp_word;
use crate::shm::rows::{NamespaceRow, load_label, load4, store_label, store4};
use crate::sync::{Acquire, AtomicU64, Relaxed, Release, SeqCst, fence};

/// Handle of a namespace of one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Namespace(pub(crate) u32);

impl Namespace {
    /// Number of the namespace in its pool.
    pub fn id(self) -> u32 {
        self.0
    }
}

/// Sizes of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceInfo {
    /// Number of the namespace in its pool.
    pub id: u32,
    /// Parts of a block.
    pub parts: u32,
    /// Bytes of each part.
    pub part_bytes: Vec<u64>,
}

/// What a header must carry to belong to a namespace now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) id: u32,
    /// The fingerprint, its last word xor the epoch: a reset makes every older header foreign.
    pub(crate) fingerprint: [u64; 4],
}

/// Who a namespace is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// Without the epoch.
    pub(crate) fingerprint: [u64; 4],
    pub(crate) group: u32,
    /// Number of the first namespace of the fingerprint, whose epoch counts for all.
    pub(crate) first: u32,
}

const READY: u64 = 1;

/// First word of the fingerprint of a namespace whose blocks are kept: they go if their users say so, and never to make
/// room for another namespace.
pub(crate) const KEPT: u64 = u64::from_le_bytes(*b"PEGAKEPT");

impl Core {
    /// Find or create the namespace of a fingerprint and group.
    pub(crate) fn namespace(
        &self,
        fingerprint: &[u8; 32],
        group: u32,
        part_bytes: &[u64],
        label: &str,
    ) -> Result<Namespace> {
        self.check_parts(part_bytes)?;
        let words = words_of(fingerprint);
        let _structure = self.lock(&self.control.header().structure_lock).ok_or_else(|| {
            Error::busy("another process holds the pool's structure lock for too long (is it stopped?): try again")
        })?;
        for (id, row) in self.control.namespaces().iter().enumerate() {
            if row.state.load(Acquire) != READY {
                crate::crash_point::pass("namespace.claimed");
                store4(&row.fingerprint, words);
                row.group.store(group, Relaxed);
                let first = self.first_of(words).unwrap_or(id);
                row.epoch.store(1, Relaxed);
                row.begun.store(self.control.header().clock.load(Relaxed), Relaxed);
                row.epoch_row.store(first as u64, Relaxed);
                row.parts.store(part_bytes.len() as u32, Relaxed);
                row.part_bytes.iter().zip(part_bytes).for_each(|(word, bytes)| word.store(*bytes, Relaxed));
                store_label(&row.label, label);
                crate::crash_point::pass("namespace.filled");
                row.state.store(READY, Release);
                crate::crash_point::pass("namespace.ready");
                self.claim_share_in(words);
                return Ok(Namespace(id as u32));
            }
            if load4(&row.fingerprint) == words && row.group.load(Relaxed) == group {
                let known = sizes(&self.control, row).unwrap_or_default();
                if known != part_bytes {
                    return Err(Error::refused(format!(
                        "the namespace exists with parts of {known:?} bytes, not {part_bytes:?}: the fingerprint does \
                         not cover the layout"
                    )));
                }
                self.claim_share_in(words);
                return Ok(Namespace(id as u32));
            }
        }
        Err(Error::new(
            ErrorKind::Full,
            format!("the pool has all {NAMESPACES_MAX} namespaces in use: use another pool_name or `pegaflow rm` it"),
        ))
    }

    /// The namespace of this name whose blocks make room for each other, if there is one with parts of these sizes.
    pub(crate) fn known_namespace(&self, fingerprint: &[u8; 32], group: u32, part_bytes: &[u64]) -> Option<Namespace> {
        let words = words_of(fingerprint);
        let mut ready = self.control.namespaces().iter().take_while(|row| row.state.load(Acquire) == READY);
        let id = ready.position(|row| load4(&row.fingerprint) == words && row.group.load(Relaxed) == group)?;
        let known = sizes(&self.control, &self.control.namespaces()[id])?;
        (words[0] != KEPT && known == part_bytes).then_some(Namespace(id as u32))
    }

    /// Fingerprint and group of a namespace.
    pub(crate) fn name_of_namespace(&self, ns: Namespace) -> Result<([u8; 32], u32)> {
        let row = self.namespace_row(ns)?;
        let mut fingerprint = [0; 32];
        for (chunk, word) in fingerprint.chunks_exact_mut(8).zip(load4(&row.fingerprint)) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        Ok((fingerprint, row.group.load(Relaxed)))
    }

    /// Whoever only keeps values, of which none makes room for others, has no share of what the others divide.
    fn claim_share_in(&self, fingerprint: [u64; 4]) {
        if fingerprint[0] != KEPT {
            self.claim_share();
        }
    }

    /// Number of the first namespace of a fingerprint.
    fn first_of(&self, fingerprint: [u64; 4]) -> Option<usize> {
        let mut ready = self.control.namespaces().iter().take_while(|row| row.state.load(Acquire) == READY);
        ready.position(|row| load4(&row.fingerprint) == fingerprint)
    }

    /// Who a namespace is, whatever its epoch; `None` if there is none of that number.
    pub(crate) fn origin_of(&self, ns: Namespace) -> Option<Origin> {
        let row = self.namespace_row(ns).ok()?;
        let first = row.epoch_row.load(Relaxed) as usize;
        let first = if first < self.control.namespaces().len() { first as u32 } else { ns.0 };
        Some(Origin { fingerprint: load4(&row.fingerprint), group: row.group.load(Relaxed), first })
    }

    /// The epoch of the namespaces whose first is number `first`; `None` if there is none of that number.
    pub(crate) fn epoch_of_family(&self, first: u32) -> Option<u64> {
        let row = self.control.namespaces().get(first as usize)?;
        (row.state.load(Acquire) == READY).then(|| row.epoch.load(SeqCst))
    }

    fn check_parts(&self, part_bytes: &[u64]) -> Result<()> {
        if part_bytes.is_empty() || part_bytes.len() > PARTS_MAX {
            return Err(Error::invalid(format!("a block has 1 to {PARTS_MAX} parts, not {}", part_bytes.len())));
        }
        let (pool, segment) = (self.control.geometry().pool_bytes, self.control.geometry().segment_bytes);
        for bytes in part_bytes {
            if *bytes == 0 || bytes.checked_next_multiple_of(4096).is_none_or(|bytes| slot_stride(bytes) > segment) {
                return Err(Error::invalid(format!(
                    "a part of {bytes} bytes does not fit a segment of {segment} bytes of a pool of {pool}: \
                     `pegaflow rm {}`, then choose a larger pool_size (and /dev/shm, if that is why it is small)",
                    self.name
                )));
            }
        }
        if part_bytes.len() as u64 > self.control.geometry().segments_max() {
            return Err(Error::invalid(format!(
                "{} parts need as many segments, the pool has {}: `pegaflow rm {}` and choose a larger pool_size or \
                 smaller segment_size",
                part_bytes.len(),
                self.control.geometry().segments_max(),
                self.name
            )));
        }
        Ok(())
    }

    pub(crate) fn namespace_row(&self, ns: Namespace) -> Result<&NamespaceRow> {
        self.control
            .namespaces()
            .get(ns.0 as usize)
            .filter(|row| row.state.load(Acquire) == READY)
            .ok_or_else(|| Error::corrupt(format!("namespace {} of the pool is gone: remove the pool", ns.0)))
    }

    /// What headers of `ns` must carry now.
    pub(crate) fn identity(&self, ns: Namespace) -> Result<Identity> {
        let row = self.namespace_row(ns)?;
        let mut fingerprint = load4(&row.fingerprint);
        fingerprint[3] ^= epoch_of(&self.control, row).load(SeqCst);
        Ok(Identity { id: ns.0, fingerprint })
    }

    pub(crate) fn namespace_info(&self, ns: Namespace) -> Result<NamespaceInfo> {
        let part_bytes = sizes(&self.control, self.namespace_row(ns)?)
            .ok_or_else(|| Error::corrupt(format!("namespace {} has impossible parts: remove the pool", ns.0)))?;
        Ok(NamespaceInfo { id: ns.0, parts: part_bytes.len() as u32, part_bytes })
    }

    /// Bytes of a block of `ns`, as its row says.
    pub(crate) fn block_bytes(&self, ns: Namespace) -> Result<u64> {
        let row = self.namespace_row(ns)?;
        let parts = row.part_bytes.iter().take(row.parts.load(Relaxed) as usize);
        Ok(parts.fold(0, |sum, bytes| sum.saturating_add(bytes.load(Relaxed))))
    }

    /// Make every block of `ns`, and of all other groups of its fingerprint, foreign: one store, for all processes.
    pub(crate) fn reset(&self, ns: Namespace) -> Result<u64> {
        let row = self.namespace_row(ns)?;
        let epoch = epoch_of(&self.control, row).fetch_add(1, SeqCst).wrapping_add(1);
        crate::crash_point::pass("reset.bumped");
        let fingerprint = load4(&row.fingerprint);
        for (id, other) in self.control.namespaces().iter().enumerate() {
            if other.state.load(Acquire) != READY || load4(&other.fingerprint) != fingerprint {
                continue;
            }
            // What is stale now is of no use to anybody: first in line for eviction, and on nobody's account.
            let group = Namespace(id as u32);
            self.extents(group).iter().flat_map(Extent::slots).try_for_each(|slot| self.age_if_stale(slot, group))?;
        }
        Ok(epoch)
    }

    fn age_if_stale(&self, slot: u32, group: Namespace) -> Result<()> {
        let Some(header) = self.control.slot(slot) else { return Ok(()) };
        let (stamp, word) = (self.control.stamp(slot), header.state.load(Acquire));
        let before = stamp.load(SeqCst);
        let (tag, fingerprint) = (header.tag.load(Relaxed), load4(&header.fingerprint));
        fence(SeqCst);
        // Who stood still since its reset finds blocks of later epochs, and extents that have changed hands. The epoch
        // is read after the block's: what differs from it is older.
        let stale = tag >> 16 == group.0 && fingerprint != self.identity(group)?.fingerprint;
        // If the slot was recycled meanwhile, either its state or its stamp is another: blocks of the new epoch keep
        // their order.
        if before != 0 && stale && header.state.load(Acquire) == word {
            let _newer = stamp.compare_exchange(before, stamp_word(1, None), SeqCst, Relaxed);
            crate::crash_point::pass("reset.aged");
        }
        Ok(())
    }

    pub(crate) fn namespace_freed(&self, id: u32) {
        if let Some(row) = self.control.namespaces().get(id as usize) {
            row.frees.fetch_add(1, Release);
        }
    }
}

/// A fingerprint as rows and headers have it.
fn words_of(fingerprint: &[u8; 32]) -> [u64; 4] {
    let mut words = [0u64; 4];
    for (word, chunk) in words.iter_mut().zip(fingerprint.chunks_exact(8)) {
        *word = u64::from_le_bytes(chunk.try_into().expect("chunk of 8"));
    }
    words
}

/// Part sizes as the row has them; `None` if no writer writes such sizes.
fn sizes(control: &Control, row: &NamespaceRow) -> Option<Vec<u64>> {
    let parts = row.parts.load(Relaxed) as usize;
    let part_bytes: Vec<u64> = row.part_bytes.get(..parts)?.iter().map(|bytes| bytes.load(Relaxed)).collect();
    let segment_bytes = control.geometry().segment_bytes;
    let possible = |bytes: &u64| *bytes != 0 && *bytes <= segment_bytes && slot_stride(*bytes) <= segment_bytes;
    (!part_bytes.is_empty() && part_bytes.iter().all(possible)).then_some(part_bytes)
}

/// Whether blocks of the namespace must not go to make room for others.
pub(crate) fn is_kept(control: &Control, id: u32) -> bool {
    control.namespaces().get(id as usize).is_some_and(|row| row.fingerprint[0].load(Relaxed) == KEPT)
}

/// The epoch that counts for `row`. A number that no writer writes leads to its own.
fn epoch_of<'a>(control: &'a Control, row: &'a NamespaceRow) -> &'a AtomicU64 {
    let first = usize::try_from(row.epoch_row.load(Relaxed)).ok().and_then(|id| control.namespaces().get(id));
    first.map_or(&row.epoch, |first| &first.epoch)
}

/// A namespace as `pegaflow inspect` shows it.
pub(crate) struct NamespaceFacts {
    pub(crate) fingerprint: [u64; 4],
    pub(crate) group: u32,
    pub(crate) epoch: u64,
    pub(crate) label: String,
    pub(crate) part_bytes: Vec<u64>,
}

/// Facts of a namespace, `None` if there is none of that number or what its row says cannot be.
pub(crate) fn facts(control: &Control, id: u32) -> Option<NamespaceFacts> {
    let row = control.namespaces().get(id as usize).filter(|row| row.state.load(Acquire) == READY)?;
    Some(NamespaceFacts {
        fingerprint: load4(&row.fingerprint),
        group: row.group.load(Relaxed),
        epoch: epoch_of(control, row).load(SeqCst),
        label: load_label(&row.label),
        part_bytes: sizes(control, row)?,
    })
}
