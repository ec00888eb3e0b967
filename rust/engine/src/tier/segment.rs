//! The tier's file in the pool's directory: made whole by the first process that serves, mapped by whoever needs it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use xxhash_rust::xxh3::xxh3_64;

use super::rows::{HintBucket, RequestRow, TierHeader, TierNamespace};
use crate::error::{Error, ErrorKind, Result};
use crate::limits::{
    NAMESPACES_MAX, SSD_BYTES_PER_HINT_BUCKET, SSD_HINT_BUCKETS_MAX, SSD_HINT_BUCKETS_MIN, SSD_REQUESTS_MAX,
};
use crate::shm::file::{Place, io_error, set_length};
use crate::shm::geometry::PAGE;
use crate::shm::mapping::{Mapping, Table};
use crate::shm::names::{TIER, TIER_NEW};

const MAGIC: u64 = u64::from_le_bytes(*b"PEGATIER");
const VERSION: u64 = 1;
const WORDS: usize = 16;
/// Tries to make the file while others take it away.
const CREATE_TRIES_MAX: usize = 16;

/// Offsets of the tables in a file with so many buckets.
struct Offsets {
    namespaces: usize,
    requests: usize,
    hints: usize,
    end: usize,
}

impl Offsets {
    fn of(buckets: u64) -> Self {
        let page = PAGE as usize;
        let namespaces = size_of::<TierHeader>();
        let requests = (namespaces + NAMESPACES_MAX * size_of::<TierNamespace>()).next_multiple_of(page);
        let hints = (requests + SSD_REQUESTS_MAX * size_of::<RequestRow>()).next_multiple_of(page);
        let end = (hints + buckets as usize * size_of::<HintBucket>()).next_multiple_of(page);
        Self { namespaces, requests, hints, end }
    }
}

/// The mapped file.
pub(crate) struct Segment {
    header: Table<TierHeader>,
    namespaces: Table<TierNamespace>,
    requests: Table<RequestRow>,
    hints: Table<HintBucket>,
    _map: Mapping,
}

/// The records of a table of `self`.
macro_rules! records {
    ($self:ident . $table:ident) => {
        // SAFETY: made of the mapping that lives in the same struct and is never replaced.
        unsafe { $self.$table.records() }
    };
}

impl Segment {
    /// Map the file in `place`; `None` if there is none.
    pub(crate) fn open(place: &Place) -> Result<Option<Self>> {
        match place.open(TIER) {
            Ok(file) => Self::of(&file).map(Some),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Map the file in `place`, making it for `capacity_bytes` on SSD if there is none.
    pub(crate) fn open_or_create(place: &Place, capacity_bytes: u64) -> Result<Self> {
        if matches!(place, Place::Anonymous) {
            return Self::of(&write(place, TIER, capacity_bytes)?);
        }
        for _ in 0..CREATE_TRIES_MAX {
            if let Some(segment) = Self::open(place)? {
                return Ok(segment);
            }
            Self::create(place, capacity_bytes)?;
        }
        Err(Error::busy("the pool was removed while its SSD tier was made: open it again"))
    }

    /// Make the file, unless somebody is faster: theirs is as good. Who attaches meanwhile may take ours for one that
    /// nobody will finish, and remove it.
    fn create(place: &Place, capacity_bytes: u64) -> Result<()> {
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_nanos());
        let new_name = format!("{TIER_NEW}{}.{nanos}", std::process::id());
        let written = write(place, &new_name, capacity_bytes);
        let linked = written.and_then(|_| place.link(&new_name, TIER));
        crate::crash_point::pass("ssd.linked");
        place.remove(&new_name);
        linked.map(drop)
    }

    fn of(file: &File) -> Result<Self> {
        let buckets = read_superblock(file)?;
        let offsets = Offsets::of(buckets);
        let length = file.metadata().map_err(|error| io_error("look at", Path::new(TIER), &error))?.len();
        if length != offsets.end as u64 {
            return Err(Error::refused(
                "the file of the pool's SSD tier has another length than it says: remove the pool",
            ));
        }
        let map = Mapping::new(file, offsets.end)?;
        Ok(Self {
            header: map.table(0, 1),
            namespaces: map.table(offsets.namespaces, NAMESPACES_MAX),
            requests: map.table(offsets.requests, SSD_REQUESTS_MAX),
            hints: map.table(offsets.hints, buckets as usize),
            _map: map,
        })
    }

    pub(crate) fn header(&self) -> &TierHeader {
        &records!(self.header)[0]
    }

    pub(crate) fn namespaces(&self) -> &[TierNamespace] {
        records!(self.namespaces)
    }

    pub(crate) fn requests(&self) -> &[RequestRow] {
        records!(self.requests)
    }

    /// A power of two of them.
    pub(crate) fn hints(&self) -> &[HintBucket] {
        records!(self.hints)
    }
}

fn write(place: &Place, name: &str, capacity_bytes: u64) -> Result<File> {
    let buckets = (capacity_bytes / SSD_BYTES_PER_HINT_BUCKET).clamp(SSD_HINT_BUCKETS_MIN, SSD_HINT_BUCKETS_MAX);
    let buckets = buckets.next_power_of_two();
    let bytes = Offsets::of(buckets).end as u64;
    let file = place.create(name)?;
    crate::crash_point::pass("ssd.file_made");
    set_length(&file, bytes)?;
    place.claim(&file, 0, bytes, "the tables of the pool's SSD tier")?;
    let mut words = [0u64; WORDS];
    (words[0], words[1], words[2]) = (MAGIC, VERSION, buckets);
    words[WORDS - 1] = checksum_of(&words);
    file.write_all_at(&words.map(u64::to_le_bytes).concat(), 0)
        .map_err(|error| Error::new(ErrorKind::ShmFull, format!("cannot write the pool's SSD tier: {error}")))?;
    Ok(file)
}

fn checksum_of(words: &[u64; WORDS]) -> u64 {
    let bytes: Vec<u8> = words[..WORDS - 1].iter().flat_map(|word| word.to_le_bytes()).collect();
    xxh3_64(&bytes)
}

/// Number of buckets, if the superblock is whole and of this version.
fn read_superblock(file: &File) -> Result<u64> {
    let mut bytes = [0u8; WORDS * 8];
    file.read_exact_at(&mut bytes, 0).map_err(|error| io_error("read", Path::new(TIER), &error))?;
    let mut words = [0u64; WORDS];
    for (word, piece) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(piece.try_into().expect("a piece of 8"));
    }
    if words[0] != MAGIC || words[WORDS - 1] != checksum_of(&words) {
        return Err(Error::refused("the file of the pool's SSD tier is damaged: remove the pool"));
    }
    if words[1] != VERSION {
        let text = format!("the pool's SSD tier has version {}, not {VERSION}: use another pool_name", words[1]);
        return Err(Error::refused(text));
    }
    let possible = SSD_HINT_BUCKETS_MIN..=SSD_HINT_BUCKETS_MAX;
    if !words[2].is_power_of_two() || !possible.contains(&words[2]) {
        return Err(Error::refused("the file of the pool's SSD tier has an impossible size: remove the pool"));
    }
    Ok(words[2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Relaxed;

    #[test]
    fn tables_do_not_overlap_and_fit_the_file() {
        for buckets in [SSD_HINT_BUCKETS_MIN, SSD_HINT_BUCKETS_MAX] {
            let offsets = Offsets::of(buckets);
            assert!(offsets.namespaces + NAMESPACES_MAX * size_of::<TierNamespace>() <= offsets.requests);
            assert!(offsets.requests + SSD_REQUESTS_MAX * size_of::<RequestRow>() <= offsets.hints);
            assert!(offsets.hints + buckets as usize * size_of::<HintBucket>() <= offsets.end);
        }
    }

    #[test]
    fn what_is_no_whole_file_of_this_version_is_refused() {
        let file = write(&Place::Anonymous, TIER, 1 << 30).unwrap();
        let segment = Segment::of(&file).unwrap();
        assert_eq!(segment.hints().len(), 1 << 12);
        assert_eq!(segment.header().leader.load(Relaxed), 0);
        file.write_all_at(&[1], 100).unwrap();
        assert!(Segment::of(&file).is_err(), "its checksum is wrong");
        file.write_all_at(&[0], 100).unwrap();
        assert!(Segment::of(&file).is_ok());
        file.set_len(4096).unwrap();
        assert!(Segment::of(&file).is_err(), "it was cut");
    }
}
