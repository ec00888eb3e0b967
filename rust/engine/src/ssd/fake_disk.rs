//! A disk that does what disks may do: answers late and in any order, moves less than asked, fails, hangs, and forgets
//! or tears at a crash what was not synced.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::fake_block::Random;
use super::io::{Completion, Direction, Io, Operation};

const SECTOR: usize = 512;

/// What goes wrong, in percent of all operations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Faults {
    /// Fewer bytes than asked for.
    pub(crate) short: u64,
    /// No answer yet at a poll.
    pub(crate) late: u64,
    /// EIO of reads.
    pub(crate) read_error: u64,
    /// EIO of writes.
    pub(crate) write_error: u64,
    /// Writes of files that have no more room.
    pub(crate) full: bool,
    /// No answer at all.
    pub(crate) hang: bool,
    /// No answer of one file.
    pub(crate) hangs: Option<u32>,
    /// No answer to syncs.
    pub(crate) sync_hangs: bool,
    /// EIO of everything that one file is asked.
    pub(crate) broken: Option<u32>,
    /// Whoever looks for answers meets a defect.
    pub(crate) panic: bool,
}

impl Faults {
    /// A disk that works.
    pub(crate) const NONE: Self = Self {
        short: 0,
        late: 0,
        read_error: 0,
        write_error: 0,
        full: false,
        hang: false,
        hangs: None,
        sync_hangs: false,
        broken: None,
        panic: false,
    };
}

impl Default for Faults {
    fn default() -> Self {
        Self::NONE
    }
}

#[derive(Default)]
struct File {
    /// As reads see it.
    bytes: Vec<u8>,
    /// As of the last sync.
    durable: Vec<u8>,
    unsynced: Vec<(usize, Vec<u8>)>,
}

impl File {
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        if let Some(target) = self.bytes.get_mut(offset..offset + bytes.len()) {
            target.copy_from_slice(bytes);
            self.unsynced.push((offset, bytes.to_vec()));
        }
    }

    fn sync(&mut self) {
        for (offset, bytes) in self.unsynced.drain(..) {
            self.durable[offset..offset + bytes.len()].copy_from_slice(&bytes);
        }
    }

    /// The power goes: of what was not synced, any part is there, in any order and torn anywhere.
    fn crash(&mut self, random: &mut Random) {
        let kept = [0, 50, 90, 100][random.below(4) as usize];
        let torn = [0, 10, 50][random.below(3) as usize];
        let mut unsynced = std::mem::take(&mut self.unsynced);
        while !unsynced.is_empty() {
            let (offset, bytes) = unsynced.swap_remove(random.below(unsynced.len() as u64) as usize);
            let tears = random.chance(torn);
            for (number, sector) in bytes.chunks(SECTOR).enumerate() {
                if random.chance(kept) && !(tears && random.chance(50)) {
                    let at = offset + number * SECTOR;
                    self.durable[at..at + sector.len()].copy_from_slice(sector);
                }
            }
        }
        self.bytes.clone_from(&self.durable);
    }
}

struct State {
    files: Vec<File>,
    /// Offsets and lengths are multiples of it, as direct I/O demands.
    block: usize,
    faults: Faults,
    random: Random,
    /// Reads that were answered.
    reads: u64,
}

/// The disks of some files; outlives the stores on it.
#[derive(Clone)]
pub(crate) struct FakeDisk(Arc<Mutex<State>>);

impl FakeDisk {
    pub(crate) fn new(files: usize, seed: u64) -> Self {
        let files = (0..files).map(|_| File::default()).collect();
        let (block, faults, random) = (SECTOR, Faults::default(), Random::new(seed));
        Self(Arc::new(Mutex::new(State { files, block, faults, random, reads: 0 })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub(crate) fn set(&self, faults: Faults) {
        self.state().faults = faults;
    }

    /// Reads that were answered so far.
    pub(crate) fn reads(&self) -> u64 {
        self.state().reads
    }

    /// Take nothing smaller than `block`.
    pub(crate) fn set_block(&self, block: usize) {
        self.state().block = block;
    }

    /// The power of all disks goes at once. Nothing may use them.
    pub(crate) fn crash(&self) {
        let State { files, random, .. } = &mut *self.state();
        files.iter_mut().for_each(|file| file.crash(random));
    }

    /// Damage the bytes of a file.
    pub(crate) fn damage(&self, file: usize, damage: impl FnOnce(&mut Vec<u8>, &mut Random)) {
        let State { files, random, .. } = &mut *self.state();
        let file = &mut files[file];
        file.sync();
        damage(&mut file.bytes, random);
        file.durable.clone_from(&file.bytes);
    }

    pub(crate) fn len(&self, file: usize) -> usize {
        self.state().files[file].bytes.len()
    }

    /// A copy of a file.
    pub(crate) fn bytes(&self, file: usize) -> Vec<u8> {
        self.state().files[file].bytes.clone()
    }

    /// I/O of one process.
    pub(crate) fn io(&self) -> FakeIo {
        FakeIo { disk: self.clone(), started: Vec::new() }
    }
}

/// What one process has on its way.
pub(crate) struct FakeIo {
    disk: FakeDisk,
    started: Vec<Operation>,
}

impl State {
    fn transfer(&mut self, operation: &mut Operation) -> io::Result<usize> {
        let Faults { short, read_error, write_error, full, broken, .. } = self.faults;
        self.reads += u64::from(operation.direction == Direction::Read);
        let percent = if operation.direction == Direction::Read { read_error } else { write_error };
        if self.random.chance(percent) || broken == Some(operation.file) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        if full && operation.direction == Direction::Write {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let mut bytes = operation.range.len();
        if operation.direction == Direction::Sync {
            self.files.get_mut(operation.file as usize).ok_or(io::ErrorKind::NotFound)?.sync();
            return Ok(0);
        }
        let beside = (bytes % self.block, operation.offset as usize % self.block);
        assert_eq!(beside, (0, 0), "not aligned as the disk needs it");
        if self.random.chance(short) {
            bytes = self.random.below(bytes as u64 + 1) as usize;
        }
        let file = self.files.get_mut(operation.file as usize).ok_or(io::ErrorKind::NotFound)?;
        let offset = operation.offset as usize;
        let bytes = bytes.min(file.bytes.len().saturating_sub(offset));
        let start = operation.range.start;
        let memory = &mut operation.buffer[start..start + bytes];
        match operation.direction {
            Direction::Read if bytes > 0 => memory.copy_from_slice(&file.bytes[offset..offset + bytes]),
            Direction::Write if bytes > 0 => file.write(offset, memory),
            _ => {}
        }
        Ok(bytes)
    }
}

impl Io for FakeIo {
    fn submit(&mut self, operation: Operation) {
        self.started.push(operation);
    }

    fn poll(&mut self, _wait: Duration, done: &mut Vec<Completion>) {
        let mut state = self.disk.state();
        if state.faults.hang {
            return;
        }
        if state.faults.panic {
            // Not while its lock is held: others go on with these disks.
            drop(state);
            panic!("a defect of the I/O");
        }
        let late = state.faults.late;
        let mut later = Vec::new();
        while !self.started.is_empty() {
            let next = state.random.below(self.started.len() as u64) as usize;
            let mut operation = self.started.swap_remove(next);
            let silent = state.faults.hangs == Some(operation.file)
                || (state.faults.sync_hangs && operation.direction == Direction::Sync);
            if silent || state.random.chance(late) {
                later.push(operation);
                continue;
            }
            let result = state.transfer(&mut operation);
            done.push(Completion { operation, result });
        }
        self.started = later;
    }

    fn resize(&mut self, file: u32, bytes: u64, _limit: Duration) -> io::Result<()> {
        let mut state = self.disk.state();
        if state.faults.hang || state.faults.hangs == Some(file) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let file = &mut state.files[file as usize];
        file.sync();
        file.bytes.resize(bytes as usize, 0);
        file.durable.resize(bytes as usize, 0);
        Ok(())
    }
}

impl Drop for FakeIo {
    /// The process is killed: of what is on its way, some gets to the disk.
    fn drop(&mut self) {
        let mut state = self.disk.state();
        for mut operation in std::mem::take(&mut self.started) {
            if operation.direction == Direction::Write && state.random.chance(50) {
                let _torn = state.transfer(&mut operation);
            }
        }
    }
}
