//! Names of the blocks that went last, in a file beside the control file that all processes of the pool write and read.
//!
//! A bucket holds marks of the last 32 names that came to it. Nothing rests on it: a name that is lost, or one taken
//! for another, lets a block start elsewhere than it should. So plain stores do, and a death can leave nothing behind.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::shm::core::Core;
use crate::shm::extent::ExtentState;
use crate::shm::file::{Place, io_error, set_length};
use crate::shm::geometry::PAGE;
use crate::shm::mapping::{Mapping, Table};
use crate::shm::names::{GONE, GONE_NEW};
use crate::shm::namespace::Identity;
use crate::sync::{Acquire, AtomicU64, Relaxed, Release};

const MAGIC: u64 = u64::from_le_bytes(*b"PEGAGONE");
/// Words in the first page: what the file is, how many words follow, and how many of them are in use.
const IN_USE: usize = 2;
const MARK_BITS: u32 = 16;
const MARK: u64 = (1 << MARK_BITS) - 1;
/// Words of a bucket: a cache line.
const BUCKET_WORDS: u64 = 8;
/// So many names are remembered for each slot.
const MARKS_PER_SLOT: u64 = 6;
/// Tries to make the file while others take it away.
const CREATE_TRIES_MAX: usize = 16;

/// The mapped file.
pub(crate) struct Gone {
    file: File,
    header: Table<AtomicU64>,
    words: Table<AtomicU64>,
    _map: Mapping,
}

impl Gone {
    /// Map the file in `place`, making it if there is none. Without it nothing is remembered.
    pub(crate) fn open(place: &Place, slots_max: u64) -> Option<Self> {
        match Self::open_or_create(place, words_for(slots_max)) {
            Ok(gone) => Some(gone),
            // The pool was removed meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => {
                log::warn!("pegaflow: what goes is not remembered, so the pool finds a little less: {error}");
                None
            }
        }
    }

    fn open_or_create(place: &Place, words: u64) -> Result<Self> {
        if matches!(place, Place::Anonymous) {
            return Self::of(write(place, GONE, words)?, words);
        }
        for _ in 0..CREATE_TRIES_MAX {
            match place.open(GONE) {
                Ok(file) => return Self::of(file, words),
                Err(error) if error.kind() == ErrorKind::NotFound => create(place, words)?,
                Err(error) => return Err(error),
            }
        }
        Err(Error::busy("the file of what went was taken away while it was made"))
    }

    fn of(file: File, words: u64) -> Result<Self> {
        let length = file.metadata().map_err(|error| io_error("look at", Path::new(GONE), &error))?.len();
        if length != length_of(words) {
            return Err(Error::refused(format!("the pool's file {GONE} has another length than its size asks for")));
        }
        let map = Mapping::new(&file, length as usize)?;
        let (header, table) = (map.table(0, IN_USE + 1), map.table(PAGE as usize, words as usize));
        let gone = Self { file, header, words: table, _map: map };
        if gone.header()[0].load(Acquire) != MAGIC || gone.header()[1].load(Relaxed) != words {
            return Err(Error::refused(format!("the pool's file {GONE} is none of ours")));
        }
        Ok(gone)
    }

    fn header(&self) -> &[AtomicU64] {
        // SAFETY: made of the mapping that lives in the same struct and is never replaced.
        unsafe { self.header.records() }
    }

    /// The bucket of a name, and its mark there, which is not 0.
    fn place_of(&self, identity: &Identity, key: &Key) -> Option<(&[AtomicU64], u64)> {
        // SAFETY: made of the mapping that lives in the same struct and is never replaced.
        let words = unsafe { self.words.records() };
        let in_use = self.header()[IN_USE].load(Acquire).min(words.len() as u64);
        // With the epoch: what was reset is not remembered.
        let hash = key.spread(identity.fingerprint[3] ^ u64::from(identity.id)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let bucket = (u128::from(hash) * u128::from(in_use / BUCKET_WORDS)) >> 64;
        let mark = (hash.rotate_left(29) ^ hash) & MARK;
        Some((words.chunks_exact(BUCKET_WORDS as usize).nth(bucket as usize)?, mark.max(1))).filter(|_| in_use > 0)
    }

    /// A block has gone: its mark becomes the first of its bucket. Those before its old place move on, or all if it has
    /// none, and the last is forgotten.
    fn note(&self, identity: &Identity, key: &Key) {
        let Some((bucket, mark)) = self.place_of(identity, key) else { return };
        let mut comes = mark;
        for word in bucket {
            let before = word.load(Relaxed);
            let moved = before << MARK_BITS | comes;
            if let Some(lane) = lane_of(before, mark) {
                let moves = u64::MAX >> (u64::BITS - MARK_BITS - lane);
                word.store(before & !moves | moved & moves, Relaxed);
                return;
            }
            word.store(moved, Relaxed);
            comes = before >> (u64::BITS - MARK_BITS);
        }
    }

    /// Whether a block of this name went not long ago.
    fn knows(&self, identity: &Identity, key: &Key) -> bool {
        let place = self.place_of(identity, key);
        place.is_some_and(|(bucket, mark)| bucket.iter().any(|word| lane_of(word.load(Relaxed), mark).is_some()))
    }

    /// Have room for what goes of so many slots. What was remembered is found no more if there was less.
    fn widen(&self, place: &Place, slots: u64) -> Result<()> {
        // SAFETY: made of the mapping that lives in the same struct and is never replaced.
        let mapped = unsafe { self.words.records() }.len() as u64;
        let words = words_for(slots).min(mapped);
        if words > self.header()[IN_USE].load(Acquire) {
            place.claim(&self.file, PAGE, words * size_of::<u64>() as u64, "names of what went")?;
            self.header()[IN_USE].fetch_max(words, Release);
        }
        Ok(())
    }
}

/// The first bit of a mark in a word, if it is there.
fn lane_of(word: u64, mark: u64) -> Option<u32> {
    (0..u64::BITS).step_by(MARK_BITS as usize).find(|lane| word >> lane & MARK == mark)
}

/// Words for what goes of so many slots: whole buckets.
fn words_for(slots: u64) -> u64 {
    (slots * MARKS_PER_SLOT).div_ceil(u64::from(u64::BITS / MARK_BITS) * BUCKET_WORDS) * BUCKET_WORDS
}

fn length_of(words: u64) -> u64 {
    (PAGE + words * size_of::<u64>() as u64).next_multiple_of(PAGE)
}

/// Make the file, unless somebody is faster: theirs is as good.
fn create(place: &Place, words: u64) -> Result<()> {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_nanos());
    let new_name = format!("{GONE_NEW}{}.{nanos}", std::process::id());
    let written = write(place, &new_name, words);
    let linked = written.and_then(|_| place.link(&new_name, GONE));
    crate::crash_point::pass("gone.linked");
    place.remove(&new_name);
    linked.map(drop)
}

fn write(place: &Place, name: &str, words: u64) -> Result<File> {
    let file = place.create(name)?;
    crate::crash_point::pass("gone.file_made");
    set_length(&file, length_of(words))?;
    place.claim(&file, 0, PAGE, "names of what went")?;
    let header = [MAGIC, words].map(u64::to_le_bytes).concat();
    file.write_all_at(&header, 0)
        .map_err(|error| Error::new(ErrorKind::ShmFull, format!("cannot write names of what went: {error}")))?;
    Ok(file)
}

impl Core {
    /// A block was evicted.
    pub(crate) fn note_gone(&self, identity: &Identity, key: &Key) {
        if let Some(gone) = &self.gone {
            gone.note(identity, key);
        }
    }

    /// Whether a block of this name was evicted not long ago, by whomever.
    pub(crate) fn went_lately(&self, identity: &Identity, key: &Key) -> bool {
        self.gone.as_ref().is_some_and(|gone| gone.knows(identity, key))
    }

    /// Make room for the names of what will go of all slots that there are now.
    pub(crate) fn remember_more(&self) {
        let Some(gone) = &self.gone else { return };
        let all = self.all_extents();
        let ready = all.iter().filter(|extent| extent.state == ExtentState::Ready);
        if let Err(error) = gone.widen(&self.place, ready.map(|extent| u64::from(extent.slot_count)).sum()) {
            log::warn!("pegaflow: less of what goes is remembered, so the pool finds a little less: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOTS: u64 = 4096;

    fn names(range: std::ops::Range<u64>) -> impl Iterator<Item = (Identity, Key)> {
        range.map(|number| {
            let key = Key::new(&number.to_le_bytes()).expect("8 bytes");
            (Identity { id: 3, fingerprint: [1, 2, 3, 4] }, key)
        })
    }

    fn known(gone: &Gone, range: std::ops::Range<u64>) -> usize {
        names(range).filter(|(identity, key)| gone.knows(identity, key)).count()
    }

    fn with_room() -> Gone {
        let gone = Gone::open(&Place::Anonymous, 2 * SLOTS).expect("anonymous memory");
        gone.widen(&Place::Anonymous, SLOTS).expect("no file system can be full");
        gone
    }

    #[test]
    fn of_what_went_the_last_are_known_and_the_first_forgotten() {
        let gone = with_room();
        names(0..40 * SLOTS).for_each(|(identity, key)| gone.note(&identity, &key));
        assert_eq!(known(&gone, 40 * SLOTS - 100..40 * SLOTS), 100, "just now");
        let few = SLOTS as usize / 100;
        assert!(known(&gone, 36 * SLOTS..37 * SLOTS) > SLOTS as usize - 20 * few, "a few times what fits ago");
        assert!(known(&gone, 0..SLOTS) < few, "long ago");
        assert!(known(&gone, 50 * SLOTS..51 * SLOTS) < few, "never");
    }

    #[test]
    fn what_goes_again_is_known_for_as_long_as_what_goes_for_the_first_time() {
        let gone = with_room();
        for flood in 0..30 {
            names(0..100).for_each(|(identity, key)| gone.note(&identity, &key));
            assert!(known(&gone, 0..100) >= 98, "with {flood} floods between");
            names(1000 + flood * SLOTS..1000 + (flood + 1) * SLOTS)
                .for_each(|(identity, key)| gone.note(&identity, &key));
        }
        assert!(known(&gone, 0..100) >= 98);
    }

    #[test]
    fn what_was_reset_is_not_remembered() {
        let gone = with_room();
        let (identity, key) = names(0..1).next().expect("one");
        gone.note(&identity, &key);
        assert!(gone.knows(&identity, &key));
        let mut after = identity;
        after.fingerprint[3] ^= 1;
        assert!(!gone.knows(&after, &key));
    }

    #[test]
    fn without_room_nothing_is_remembered_and_more_room_than_there_is_is_not_used() {
        let gone = Gone::open(&Place::Anonymous, SLOTS).expect("anonymous memory");
        names(0..9).for_each(|(identity, key)| gone.note(&identity, &key));
        assert_eq!(known(&gone, 0..9), 0);
        gone.header()[IN_USE].store(u64::MAX, Relaxed);
        names(0..SLOTS).for_each(|(identity, key)| gone.note(&identity, &key));
        assert!(known(&gone, 0..SLOTS) > SLOTS as usize / 2);
    }
}
