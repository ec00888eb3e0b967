//! One directory of a store: its file, its zones, and whether it still works.

use std::path::PathBuf;

use super::buffer::Buffer;
use super::geometry::Geometry;
use super::queue::Extent;
use super::record::Spot;
use super::summary::{Entry, Summary, summary_bytes};
use super::superblock::Superblock;
use crate::limits::SSD_FAILED_READS_MAX;
use crate::shm::liveness::LockFile;

/// A zone. `sequence` 0: empty.
#[derive(Default)]
pub(crate) struct Zone {
    pub(crate) sequence: u64,
    /// Clock of the store when it was last read or opened for writing.
    pub(crate) touched: u64,
    /// Writes on their way into it.
    pub(crate) writes: u32,
    /// Tags of its records; of the zone that is being filled they are in [`Filling`].
    pub(crate) tags: Box<[u64]>,
}

/// Bytes that wait for their write.
pub(crate) struct Chunk {
    pub(crate) buffer: Buffer,
    pub(crate) offset: u64,
    pub(crate) filled: usize,
    /// Tickets of the records that have bytes in it.
    pub(crate) records: Vec<u64>,
}

/// The zone that records are appended to.
pub(crate) struct Filling {
    pub(crate) zone: u32,
    /// First free block.
    pub(crate) end: u32,
    pub(crate) entries: Vec<Entry>,
    pub(crate) chunk: Option<Chunk>,
    /// Checksum of the last record's header; the next one carries it.
    pub(crate) last: u64,
}

/// One directory.
pub(crate) struct Member {
    pub(crate) file: u32,
    pub(crate) path: PathBuf,
    pub(crate) lock: Option<LockFile>,
    pub(crate) superblock: Superblock,
    pub(crate) zones: Vec<Zone>,
    pub(crate) filling: Option<Filling>,
    pub(crate) writes_off: bool,
    pub(crate) reads_off: bool,
    pub(crate) failed_reads: u32,
    /// Buffers that reads and writes have.
    pub(crate) reads_out: u16,
    /// See [`Self::reads_out`]; what recovery has counts among them, since nothing is written before its end.
    pub(crate) writes_out: u16,
    /// An operation had no answer: nothing more is asked of it.
    pub(crate) hung: bool,
}

impl Member {
    pub(crate) fn new(file: u32, path: PathBuf, lock: Option<LockFile>, superblock: Superblock) -> Self {
        let zones = (0..superblock.geometry.zones).map(|_| Zone::default()).collect();
        Self {
            file,
            path,
            lock,
            superblock,
            zones,
            filling: None,
            writes_off: false,
            reads_off: false,
            failed_reads: 0,
            reads_out: 0,
            writes_out: 0,
            hung: false,
        }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.superblock.geometry
    }

    pub(crate) fn is_filling(&self, zone: u32) -> bool {
        self.filling.as_ref().is_some_and(|filling| filling.zone == zone)
    }

    pub(crate) fn extent(&self, zone: u32, block: u32, bytes: usize) -> Extent {
        Extent { file: self.file, offset: self.geometry().offset(zone, block), bytes }
    }

    /// What the header of a record at this place says.
    pub(crate) fn spot(&self, zone: u32, start: u32) -> Spot {
        let sequence = self.zones.get(zone as usize).map_or(0, |zone| zone.sequence);
        Spot { cache_id: self.superblock.cache_id, zone, start, sequence }
    }

    /// Whether the zone that is being filled takes a record of so many blocks and still has room for its summary.
    pub(crate) fn takes(&self, blocks: u64, summary_bytes_max: usize) -> bool {
        self.filling.as_ref().is_some_and(|filling| {
            let summary = summary_bytes(filling.entries.len() + 1, self.geometry().block_bytes);
            let blocks = u64::from(filling.end) + blocks + self.geometry().blocks_of(summary as u64);
            blocks <= u64::from(self.geometry().zone_blocks()) && summary <= summary_bytes_max
        })
    }

    /// The largest record in blocks.
    pub(crate) fn record_blocks_max(&self) -> u64 {
        let summary = summary_bytes(1, self.geometry().block_bytes) as u64;
        u64::from(self.geometry().zone_blocks()) - self.geometry().blocks_of(summary)
    }

    /// Summary of the zone that is being filled.
    pub(crate) fn summary(&self, filling: &Filling) -> Summary {
        Summary {
            cache_id: self.superblock.cache_id,
            sequence: self.zones[filling.zone as usize].sequence,
            zone: filling.zone,
            end: filling.end,
            last: filling.last,
            entries: filling.entries.clone(),
        }
    }

    /// The zone to fill next: an empty one, else the one untouched for longest; none while writes are on their way to
    /// all of them.
    pub(crate) fn next_zone(&self) -> Option<u32> {
        let idle = |(number, zone): &(u32, &Zone)| zone.writes == 0 && !self.is_filling(*number);
        let rank = |(number, zone): &(u32, &Zone)| (zone.sequence > 0, zone.touched, *number);
        (0..).zip(&self.zones).filter(idle).min_by_key(rank).map(|(number, _)| number)
    }

    /// Take note of the end of a read. Whether the directory is to be turned off.
    pub(crate) fn note_read(&mut self, failed: bool, hung: bool) -> bool {
        self.failed_reads = if failed { self.failed_reads + 1 } else { 0 };
        !self.reads_off && (hung || self.failed_reads >= SSD_FAILED_READS_MAX)
    }
}
