//! The file in the pool's directory: made whole by the first process that uses a namespace, mapped by whoever counts or
//! looks.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use xxhash_rust::xxh3::xxh3_64;

use super::rows::{Line, Sample, Span, TrafficHeader, TrafficNamespace};
use super::windows::SPANS;
use crate::error::{Error, ErrorKind, Result};
use crate::limits::{NAMESPACES_MAX, TRAFFIC_PLACES, TRAFFIC_SAMPLES_MAX, TRAFFIC_SEEN_MAX, TRAFFIC_SEEN_MIN};
use crate::shm::file::{Place, io_error, set_length};
use crate::shm::geometry::PAGE;
use crate::shm::mapping::{Mapping, Table};
use crate::shm::names::{TRAFFIC, TRAFFIC_NEW};
use crate::sync::AtomicU64;

const MAGIC: u64 = u64::from_le_bytes(*b"PEGATRAF");
const VERSION: u64 = 2;
const WORDS: usize = 16;
/// Tries to make the file while others take it away.
const CREATE_TRIES_MAX: usize = 16;
/// Places in the hash table of samples.
const SAMPLE_SLOTS: usize = 2 * TRAFFIC_SAMPLES_MAX;
/// Slots of the pool for each hash that a filter is made for.
const SLOTS_PER_SEEN: u64 = 4;
/// Bits of a filter for each hash that it is made for.
const BITS_PER_SEEN: u64 = 16;
const LINE_BITS: u64 = 512;

/// Offsets of the tables in a file whose filters are made for so many hashes each.
struct Offsets {
    namespaces: usize,
    samples: usize,
    tree: usize,
    spans: usize,
    lines: usize,
    end: usize,
}

impl Offsets {
    fn of(seen: u64) -> Self {
        let page = PAGE as usize;
        let namespaces = size_of::<TrafficHeader>();
        let samples = (namespaces + NAMESPACES_MAX * size_of::<TrafficNamespace>()).next_multiple_of(page);
        let tree = (samples + SAMPLE_SLOTS * size_of::<Sample>()).next_multiple_of(page);
        let spans = (tree + TRAFFIC_PLACES * size_of::<AtomicU64>()).next_multiple_of(page);
        let lines = (spans + SPANS * size_of::<Span>()).next_multiple_of(page);
        let end = (lines + 2 * lines_for(seen) * size_of::<Line>()).next_multiple_of(page);
        Self { namespaces, samples, tree, spans, lines, end }
    }
}

fn lines_for(seen: u64) -> usize {
    (seen * BITS_PER_SEEN / LINE_BITS) as usize
}

/// The mapped file.
pub(crate) struct Traffic {
    header: Table<TrafficHeader>,
    namespaces: Table<TrafficNamespace>,
    samples: Table<Sample>,
    tree: Table<AtomicU64>,
    spans: Table<Span>,
    lines: Table<Line>,
    /// Hashes for which one of the two filters is made.
    pub(super) seen: u64,
    _map: Mapping,
}

/// The records of a table of `self`.
macro_rules! records {
    ($self:ident . $table:ident) => {
        // SAFETY: made of the mapping that lives in the same struct and is never replaced.
        unsafe { $self.$table.records() }
    };
}

impl Traffic {
    /// Map the file in `place`; an error of kind *not found* if there is none, of kind *corrupt* if it is damaged.
    pub(crate) fn open(place: &Place) -> Result<Self> {
        Self::of(&place.open(TRAFFIC)?)
    }

    /// Map the file in `place`, making it for a pool of so many slots if there is none. A damaged one is replaced: who
    /// has mapped that counts on in it, and nobody sees what.
    pub(crate) fn open_or_create(place: &Place, slots_max: u64) -> Result<Self> {
        let seen = (slots_max / SLOTS_PER_SEEN).clamp(TRAFFIC_SEEN_MIN, TRAFFIC_SEEN_MAX).next_power_of_two();
        if matches!(place, Place::Anonymous) {
            return Self::of(&write(place, TRAFFIC, seen)?);
        }
        for _ in 0..CREATE_TRIES_MAX {
            match Self::open(place) {
                Err(error) if error.kind() == ErrorKind::NotFound => create(place, seen)?,
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    log::warn!("pegaflow: {error}; it is replaced, and counting begins anew");
                    place.remove(TRAFFIC);
                }
                outcome => return outcome,
            }
        }
        Err(Error::busy("the pool was removed while its statistics were made: open it again"))
    }

    fn of(file: &File) -> Result<Self> {
        let seen = read_superblock(file)?;
        let offsets = Offsets::of(seen);
        let length = file.metadata().map_err(|error| io_error("look at", Path::new(TRAFFIC), &error))?.len();
        if length != offsets.end as u64 {
            return Err(Error::corrupt("the file of the pool's statistics has another length than it says"));
        }
        let map = Mapping::new(file, offsets.end)?;
        Ok(Self {
            header: map.table(0, 1),
            namespaces: map.table(offsets.namespaces, NAMESPACES_MAX),
            samples: map.table(offsets.samples, SAMPLE_SLOTS),
            tree: map.table(offsets.tree, TRAFFIC_PLACES),
            spans: map.table(offsets.spans, SPANS),
            lines: map.table(offsets.lines, 2 * lines_for(seen)),
            seen,
            _map: map,
        })
    }

    pub(super) fn header(&self) -> &TrafficHeader {
        &records!(self.header)[0]
    }

    pub(super) fn namespaces(&self) -> &[TrafficNamespace] {
        records!(self.namespaces)
    }

    /// A power of two of them.
    pub(super) fn samples(&self) -> &[Sample] {
        records!(self.samples)
    }

    pub(super) fn tree(&self) -> &[AtomicU64] {
        records!(self.tree)
    }

    pub(super) fn spans(&self) -> &[Span] {
        records!(self.spans)
    }

    /// Lines of both filters, one behind the other: each a power of two of them.
    pub(super) fn lines(&self) -> &[Line] {
        records!(self.lines)
    }
}

/// Make the file, unless somebody is faster: theirs is as good. Who attaches meanwhile may take ours for one that
/// nobody will finish, and remove it.
fn create(place: &Place, seen: u64) -> Result<()> {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_nanos());
    let new_name = format!("{TRAFFIC_NEW}{}.{nanos}", std::process::id());
    let written = write(place, &new_name, seen);
    let linked = written.and_then(|_| place.link(&new_name, TRAFFIC));
    crate::crash_point::pass("traffic.linked");
    place.remove(&new_name);
    linked.map(drop)
}

fn write(place: &Place, name: &str, seen: u64) -> Result<File> {
    let bytes = Offsets::of(seen).end as u64;
    let file = place.create(name)?;
    crate::crash_point::pass("traffic.file_made");
    set_length(&file, bytes)?;
    place.claim(&file, 0, bytes, "the pool's statistics")?;
    let mut words = [0u64; WORDS];
    (words[0], words[1], words[2]) = (MAGIC, VERSION, seen);
    words[WORDS - 1] = checksum_of(&words);
    file.write_all_at(&words.map(u64::to_le_bytes).concat(), 0)
        .map_err(|error| Error::new(ErrorKind::ShmFull, format!("cannot write the pool's statistics: {error}")))?;
    Ok(file)
}

fn checksum_of(words: &[u64; WORDS]) -> u64 {
    let bytes: Vec<u8> = words[..WORDS - 1].iter().flat_map(|word| word.to_le_bytes()).collect();
    xxh3_64(&bytes)
}

/// For how many hashes the filters are made, if the superblock is whole.
fn read_superblock(file: &File) -> Result<u64> {
    let mut bytes = [0u8; WORDS * 8];
    let damaged = || Error::corrupt("the file of the pool's statistics is damaged");
    file.read_exact_at(&mut bytes, 0).map_err(|_| damaged())?;
    let mut words = [0u64; WORDS];
    for (word, piece) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(piece.try_into().expect("a piece of 8"));
    }
    let possible = words[2].is_power_of_two() && (TRAFFIC_SEEN_MIN..=TRAFFIC_SEEN_MAX).contains(&words[2]);
    if words[0] != MAGIC || words[1] != VERSION || words[WORDS - 1] != checksum_of(&words) || !possible {
        return Err(damaged());
    }
    Ok(words[2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Relaxed;

    #[test]
    fn tables_do_not_overlap_and_fit_the_file() {
        for seen in [TRAFFIC_SEEN_MIN, TRAFFIC_SEEN_MAX] {
            let offsets = Offsets::of(seen);
            assert!(offsets.namespaces + NAMESPACES_MAX * size_of::<TrafficNamespace>() <= offsets.samples);
            assert!(offsets.samples + SAMPLE_SLOTS * size_of::<Sample>() <= offsets.tree);
            assert!(offsets.tree + TRAFFIC_PLACES * 8 <= offsets.spans);
            assert!(offsets.spans + SPANS * size_of::<Span>() <= offsets.lines);
            assert!(offsets.lines + 2 * lines_for(seen) * size_of::<Line>() <= offsets.end);
            assert!(lines_for(seen).is_power_of_two());
        }
    }

    #[test]
    fn what_is_no_whole_file_is_told_from_one() {
        let file = write(&Place::Anonymous, TRAFFIC, TRAFFIC_SEEN_MIN).unwrap();
        let traffic = Traffic::of(&file).unwrap();
        assert_eq!(traffic.lines().len(), 2 * lines_for(TRAFFIC_SEEN_MIN));
        assert_eq!(traffic.header().references[0].load(Relaxed), 0);
        file.write_all_at(&[1], 100).unwrap();
        assert_eq!(Traffic::of(&file).map(drop).unwrap_err().kind(), ErrorKind::Corrupt, "its checksum is wrong");
        file.write_all_at(&[0], 100).unwrap();
        assert!(Traffic::of(&file).is_ok());
        file.set_len(4096).unwrap();
        assert_eq!(Traffic::of(&file).map(drop).unwrap_err().kind(), ErrorKind::Corrupt, "it was cut");
        file.set_len(10).unwrap();
        assert_eq!(Traffic::of(&file).map(drop).unwrap_err().kind(), ErrorKind::Corrupt, "it was cut short");
    }
}
