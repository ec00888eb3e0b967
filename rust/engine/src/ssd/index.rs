//! Where records are: 64 bits of each name lead to a place, and what is read there decides.
//!
//! Memory per record: 25 bytes per place in a table that is between 7/16 and 7/8 full, and 8 bytes in the list of its
//! zone; so 37 to 65 bytes, 51 on average.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::epochs::{Epochs, Fingerprint};
use super::record::RecordId;

/// Tags are hashes already.
#[derive(Default)]
pub(crate) struct TagHasher(u64);

impl Hasher for TagHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, tag: u64) {
        self.0 = tag;
    }
}

/// Place of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Located {
    pub(crate) member: u16,
    pub(crate) zone: u32,
    pub(crate) start: u32,
    pub(crate) blocks: u32,
}

const _: () = assert!(size_of::<(u64, Located)>() == 24);

/// Is told what is found from now on, and what no more.
pub(crate) trait IndexWatch: Send + Sync {
    fn added(&self, tag: u64);
    fn removed(&self, tag: u64);
}

/// All records that may be read.
#[derive(Default)]
pub(crate) struct Index {
    places: HashMap<u64, Located, BuildHasherDefault<TagHasher>>,
    pub(crate) epochs: Epochs,
    watch: Option<Box<dyn IndexWatch>>,
}

impl Index {
    pub(crate) fn tag(&self, id: &RecordId) -> u64 {
        id.tag(self.epochs.of(&id.fingerprint))
    }

    pub(crate) fn find(&self, id: &RecordId) -> Option<Located> {
        self.places.get(&self.tag(id)).copied()
    }

    /// Tags and places of all records.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u64, Located)> {
        self.places.iter().map(|(tag, located)| (*tag, *located))
    }

    pub(crate) fn place(&self, tag: u64) -> Option<Located> {
        self.places.get(&tag).copied()
    }

    pub(crate) fn insert(&mut self, tag: u64, located: Located) {
        self.places.insert(tag, located);
        if let Some(watch) = &self.watch {
            watch.added(tag);
        }
    }

    /// Remove `tag` if it is at `located`.
    pub(crate) fn remove(&mut self, tag: u64, located: &Located) {
        self.remove_if(tag, |place| place == located);
    }

    /// Remove `tag` if its place is such. Whether it was.
    pub(crate) fn remove_if(&mut self, tag: u64, such: impl Fn(&Located) -> bool) -> bool {
        let removed = self.places.get(&tag).is_some_and(such);
        if removed {
            self.places.remove(&tag);
            if let Some(watch) = &self.watch {
                watch.removed(tag);
            }
        }
        removed
    }
}

/// Lookups, from any thread and while the store is at work.
#[derive(Clone, Default)]
pub struct IndexView(Arc<RwLock<Index>>);

impl IndexView {
    /// Whether a record is there, as far as is known without reading.
    pub fn contains(&self, id: &RecordId) -> bool {
        self.read().find(id).is_some()
    }

    /// How many records there are.
    pub fn records(&self) -> usize {
        self.read().places.len()
    }

    /// Tell `watch` of every change from now on.
    pub(crate) fn set_watch(&self, watch: Box<dyn IndexWatch>) {
        self.write().watch = Some(watch);
    }

    pub(crate) fn epoch(&self, fingerprint: &Fingerprint) -> u64 {
        self.read().epochs.of(fingerprint)
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Index> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Index> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
