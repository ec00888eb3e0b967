//! States that take long or many processes to come about by themselves, written into the control file by hand: offsets
//! as in `docs/shm-format.md`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use pegaflow_engine::{Key, names};

use crate::blocks::POOL_NAME;

const PAGE: u64 = 4096;
const REBUILD_WANTED: u64 = 168;
const ORPHANS_EXPECTED: u64 = 184;
const PROCESSES: u64 = PAGE;
const PROCESS_BYTES: u64 = 128;
const PROCESS_COUNT: u64 = 128;
const ALIVE: u64 = 1;
const SLOT_BYTES: u64 = 128;
const KEY: u64 = 32;
const CHECKSUM: u64 = 104;
const PARENT: u64 = 112;
const QUARANTINED: u8 = 5;

/// The control file of the pool that all processes of a test share.
pub struct Forge {
    control: File,
    ranges: u64,
    buckets: u64,
    free: u64,
    slots: u64,
    slots_max: u64,
}

impl Forge {
    /// `None` if there is no pool.
    pub fn open(dir: &Path) -> Option<Self> {
        let path = names::pool_dir(dir, nix::unistd::geteuid().as_raw(), POOL_NAME).join("control");
        let control = File::options().read(true).write(true).open(path).ok()?;
        let word = |index: u64| read(&control, index * 8);
        let (segments, slots_max) = (word(2) / word(3), word(4));
        let mut end = PROCESSES + PROCESS_BYTES * PROCESS_COUNT;
        let mut table = |bytes: u64| {
            let start = end;
            end = (start + bytes).next_multiple_of(PAGE);
            start
        };
        let _namespaces = table(256 * 704);
        let _extents = table(segments * 320);
        let _stripes = table(1024 * 64);
        let ranges = table(slots_max / 64 * 4);
        let buckets = table(slots_max.next_power_of_two() * 2 * 4);
        let free = table(slots_max / 64 * 8);
        let _stamps = table(slots_max * 8);
        let slots = table(slots_max * SLOT_BYTES);
        Some(Self { control, ranges, buckets, free, slots, slots_max })
    }

    fn write(&self, offset: u64, word: u64) {
        self.control.write_all_at(&word.to_le_bytes(), offset).unwrap();
    }

    /// Offsets of the headers of all slots that extents have.
    fn headers(&self) -> impl Iterator<Item = u64> + '_ {
        let claimed = |range: &u64| read4(&self.control, self.ranges + range * 4) != 0;
        let ranges = (0..self.slots_max / 64).filter(claimed);
        ranges.flat_map(|range| range * 64..range * 64 + 64).map(|slot| self.slots + slot * SLOT_BYTES)
    }

    /// Rows of processes that died and that nobody has noticed, until the table is full.
    pub fn fill_process_table(&self) {
        for row in (0..PROCESS_COUNT).map(|row| PROCESSES + row * PROCESS_BYTES) {
            let state = read(&self.control, row);
            if state as u8 == 0 {
                self.write(row, (state & !0xFF) | ALIVE);
            }
        }
    }

    fn quarantined(&self) -> impl Iterator<Item = u64> + '_ {
        self.headers().filter(|header| read(&self.control, *header) as u8 == QUARANTINED)
    }

    /// The grace period of every slot in quarantine is over.
    pub fn end_grace_periods(&self) {
        self.quarantined().for_each(|header| self.write(header + CHECKSUM, 0));
    }

    /// The grace period of no slot in quarantine ends by itself. Returns how many there are.
    pub fn extend_grace_periods(&self) -> usize {
        self.quarantined().map(|header| self.write(header + CHECKSUM, u64::MAX)).count()
    }

    /// The block of `key` has lost the block before it, as when an extent was taken.
    pub fn make_orphan(&self, key: &Key) {
        let name = key.to_bytes();
        for header in self.headers() {
            let mut found = [0u8; 32];
            self.control.read_exact_at(&mut found, header + KEY).unwrap();
            if found[..] == name[..] {
                // A generation that its slot will not come to in this test.
                self.write(header + PARENT, read(&self.control, header + PARENT) ^ 1 << 63);
            }
        }
        // Raised as the engine does it, further than others do meanwhile.
        self.write(ORPHANS_EXPECTED, (read(&self.control, ORPHANS_EXPECTED) | 1) + (1 << 20));
    }

    /// The index is empty, and known to be damaged.
    pub fn empty_index(&self) {
        self.write(REBUILD_WANTED, 1);
        let zeros = vec![0u8; (self.free - self.buckets) as usize];
        self.control.write_all_at(&zeros, self.buckets).unwrap();
    }
}

fn read(file: &File, offset: u64) -> u64 {
    let mut bytes = [0u8; 8];
    file.read_exact_at(&mut bytes, offset).unwrap();
    u64::from_le_bytes(bytes)
}

fn read4(file: &File, offset: u64) -> u32 {
    let mut bytes = [0u8; 4];
    file.read_exact_at(&mut bytes, offset).unwrap();
    u32::from_le_bytes(bytes)
}
