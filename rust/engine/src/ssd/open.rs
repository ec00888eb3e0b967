//! Opening a store: files, superblocks, and the zones that recovery has to look at.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use super::bounded::for_each;
use super::buffer::{BUFFER_ALIGN, Buffer, Buffers};
use super::counters::Counters;
use super::file::{CacheFile, block_bytes_min, cache_path};
use super::geometry::Geometry;
use super::index::IndexView;
use super::io::{Direction, Io};
use super::member::Member;
use super::options::{Backend, StoreOptions};
use super::queue::{Extent, Queue};
use super::reader::ReadTarget;
use super::store::{Purpose, Store};
use super::superblock::{SUPERBLOCK_BYTES, Superblock};
use super::threads::ThreadIo;
use super::uring::UringIo;
use crate::error::{Error, ErrorKind, Result};
use crate::limits::{SSD_BLOCK_BYTES_MAX, SSD_THREADS_MAX};
use crate::shm::file::io_error;
use crate::shm::liveness::LockFile;

/// Zones that one process may fill: two to the power of this.
const SEQUENCE_BITS: u32 = 32;

/// A file as [`Store::assemble`] needs it.
pub(super) struct Opened {
    pub(super) path: PathBuf,
    pub(super) lock: Option<LockFile>,
    /// The smallest block that the device takes.
    pub(super) device_block: usize,
}

impl<T: ReadTarget> Store<T> {
    /// Open or create the files, lock them, and read their superblocks. Then [`Self::recover`] finds the records.
    /// Blocks, but no longer than a few times `hang_max`: directories that do not answer are left out.
    pub fn open(options: StoreOptions) -> Result<Self> {
        options.check()?;
        let (mut opened, mut files) = (Vec::new(), Vec::new());
        for (file, device_block) in open_files(&options)? {
            opened.push(Opened { path: file.path, lock: Some(file.lock), device_block });
            files.push(file.file);
        }
        let left_out = options.directories.len() - opened.len();
        let (io, buffers) = start_io(&options, files)?;
        let mut store = Self::assemble(options, io, buffers, opened)?;
        store.counters.turned_off += left_out as u64;
        Ok(store)
    }

    /// A store over `io`, whose files are `opened`.
    pub(super) fn assemble(
        options: StoreOptions,
        io: Box<dyn Io>,
        buffers: Buffers,
        opened: Vec<Opened>,
    ) -> Result<Self> {
        let device_block = opened.iter().map(|opened| opened.device_block).max().unwrap_or(SSD_BLOCK_BYTES_MAX);
        let queue = Queue::new(io, buffers, device_block, options.hang_max);
        let count = opened.len();
        let mut store = Self {
            options,
            queue,
            members: Vec::new(),
            index: IndexView::default(),
            unknown: (0..count).map(|_| VecDeque::new()).collect(),
            probed: HashMap::new(),
            newest: (0..count).map(|_| None).collect(),
            reads: HashMap::new(),
            reading: HashMap::new(),
            joined: HashMap::new(),
            waiting: (0..count).map(|_| VecDeque::new()).collect(),
            pending: HashMap::new(),
            pending_tags: HashSet::new(),
            chunks: HashMap::new(),
            counters: Counters::default(),
            events: Vec::new(),
            next: 0,
            session: 0,
            next_sequence: 0,
            clock: 0,
            turn: 0,
        };
        for (file, opened) in (0..).zip(opened) {
            store.add_member(file, opened)?;
        }
        let blocks = store.members.iter().map(|member| member.geometry().block_bytes);
        let block = blocks.max().unwrap_or(device_block);
        store.queue.set_block(block);
        store.agree();
        if store.is_off() {
            return Err(nothing_to_read());
        }
        Ok(store)
    }

    fn add_member(&mut self, file: u32, opened: Opened) -> Result<()> {
        let capacity = self.options.capacity_bytes.map(|bytes| bytes / self.options.directories.len() as u64);
        let found = self.find_superblock(file, opened.device_block);
        let Opened { path, lock, device_block } = opened;
        let name = path.display().to_string();
        let (superblock, dead) = match found {
            Ok(Some(superblock)) if superblock.geometry.block_bytes < device_block => {
                return Err(Error::refused(format!(
                    "{name} has blocks of {} bytes and its disk now needs {device_block}: remove it",
                    superblock.geometry.block_bytes
                )));
            }
            Ok(Some(superblock)) => (superblock, None),
            Ok(None) => (self.new_superblock(&name, capacity, device_block)?, None),
            Err(error) => (self.new_superblock(&name, capacity.or(Some(1 << 30)), device_block)?, Some(error)),
        };
        let chunk_bytes = self.options.chunk_bytes;
        if superblock.geometry.block_bytes > chunk_bytes {
            let text = format!("{name} has larger blocks than one operation of {chunk_bytes} bytes: allow more");
            return Err(Error::invalid(text));
        }
        let mut member = Member::new(file, path, lock, superblock);
        if dead.is_some() {
            member.zones.clear();
        }
        self.members.push(member);
        let at = file as u16;
        if let Some(error) = dead {
            self.turn_off(at, true, &error);
            return Ok(());
        }
        if let Err(error) = self.fit(at, capacity) {
            if !self.member(at).hung {
                return Err(error);
            }
            self.members[usize::from(at)].zones.clear();
            return Ok(());
        }
        self.unknown[usize::from(at)].extend(0..self.members[usize::from(at)].zones.len() as u32);
        Ok(())
    }

    /// The valid copy of the superblock with the higher generation. An error means that the disk does not read.
    fn find_superblock(&mut self, file: u32, device_block: usize) -> io::Result<Option<Superblock>> {
        let (mut best, mut failed): (Option<Superblock>, _) = (None, None);
        let places = std::iter::once(0).chain((12..=16).map(|bits| 1usize << bits));
        for place in places {
            let bytes = SUPERBLOCK_BYTES.max(device_block);
            let Some(buffer) = self.queue.buffers().take() else { return Err(io::ErrorKind::OutOfMemory.into()) };
            if bytes > buffer.len() {
                self.queue.buffers().give(buffer);
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let extent = Extent { file, offset: place as u64, bytes };
            if place % device_block != 0 {
                self.queue.buffers().give(buffer);
                continue;
            }
            let (result, buffer) = self.queue.run(Purpose::Alone, Direction::Read, extent, buffer);
            let found = buffer.and_then(|buffer| {
                let found = result.is_ok().then(|| Superblock::decode(&buffer)).flatten();
                self.queue.buffers().give(buffer);
                found
            });
            match result {
                Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(error),
                Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => failed = Some(error),
                _ => {}
            }
            // A copy elsewhere is part of a record that happens to look like one.
            let found = found.filter(|found| place == 0 || place == found.geometry.superblock_bytes());
            if found.as_ref().map(|found| found.generation) > best.as_ref().map(|best| best.generation) {
                best = found;
            }
        }
        match (best, failed) {
            (None, Some(error)) => Err(error),
            (best, _) => Ok(best),
        }
    }

    fn new_superblock(&self, name: &str, capacity: Option<u64>, device_block: usize) -> Result<Superblock> {
        let capacity = capacity.ok_or_else(|| without_superblock(&name))?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let geometry = Geometry::choose(capacity, device_block, self.options.block_bytes, self.options.zone_bytes)?;
        Ok(Superblock {
            geometry,
            generation: 0,
            cache_id: RandomState::new().hash_one(since.as_nanos()),
            created_unix_s: since.as_secs(),
            epochs: Default::default(),
        })
    }

    /// Claim the file's space, and add or drop zones if its capacity has changed.
    fn fit(&mut self, at: u16, capacity: Option<u64>) -> Result<()> {
        if self.options.read_only {
            self.members[usize::from(at)].writes_off = true;
            return Ok(());
        }
        let before = self.member(at).geometry();
        let geometry = capacity.map_or(Ok(before), |capacity| before.with_capacity(capacity))?;
        // A file never is shorter than its superblock says: what grows grows first, what shrinks shrinks last.
        if geometry.zones >= before.zones {
            self.claim(at, geometry.file_bytes())?;
        }
        let member = &mut self.members[usize::from(at)];
        member.superblock.geometry = geometry;
        member.zones.resize_with(geometry.zones as usize, Default::default);
        if geometry.zones < before.zones {
            self.write_superblock(at)?;
            self.claim(at, geometry.file_bytes())?;
        }
        Ok(())
    }

    fn claim(&mut self, at: u16, bytes: u64) -> Result<()> {
        self.queue.resize(self.member(at).file, bytes).map_err(|error| {
            if error.kind() == io::ErrorKind::TimedOut {
                self.turn_off(at, true, &error);
            }
            io_error("claim the space of", &self.member(at).path, &error)
        })
    }

    /// Every directory gets the latest epochs of all, and a generation above all. The sequences of this process begin
    /// there, so no crash can lead it to use one again.
    fn agree(&mut self) {
        let mut epochs = super::epochs::Epochs::default();
        self.members.iter().for_each(|member| epochs.join(&member.superblock.epochs));
        self.index.write().epochs = epochs;
        let generation = self.members.iter().map(|member| member.superblock.generation).max().unwrap_or(0);
        self.session = generation + 1;
        self.next_sequence = self.session << SEQUENCE_BITS;
        self.members.iter_mut().for_each(|member| member.superblock.generation = generation);
        let known = |at: &u16| !self.member(*at).zones.is_empty() && !self.options.read_only;
        let known: Vec<u16> = (0..self.members.len() as u16).filter(known).collect();
        for (_, result) in self.write_superblocks(&known) {
            if let Err(error) = result {
                log::warn!("pegaflow: {error}");
            }
        }
    }

    /// Write both copies of a superblock; see [`Self::write_superblocks`].
    fn write_superblock(&mut self, at: u16) -> Result<()> {
        self.write_superblocks(&[at]).into_iter().try_for_each(|(_, result)| result)
    }

    /// Write both copies of the superblocks of some directories with the epochs that hold, each copy synced before the
    /// next. The directories side by side: those that hang cost the time of one. Blocks.
    pub(super) fn write_superblocks(&mut self, members: &[u16]) -> Vec<(u16, Result<()>)> {
        let epochs = self.index.read().epochs.clone();
        let mut results = Vec::new();
        let mut going: Vec<u16> = members.to_vec();
        for &at in members {
            let superblock = &mut self.members[usize::from(at)].superblock;
            superblock.epochs.join(&epochs);
            superblock.generation += 1;
        }
        for copy in 0..2u64 {
            for write in [true, false] {
                let ended = if write { self.write_copies(&going, copy) } else { self.sync(&going) };
                going.clear();
                for (at, result) in ended {
                    match result {
                        Ok(()) => going.push(at),
                        Err(error) => results.push((at, Err(self.superblock_failed(at, &error)))),
                    }
                }
            }
        }
        results.extend(going.into_iter().map(|at| (at, Ok(()))));
        results
    }

    fn superblock_failed(&mut self, at: u16, error: &io::Error) -> Error {
        self.turn_off(at, error.kind() == io::ErrorKind::TimedOut, error);
        let text = format!(
            "cannot write the superblock of {} ({error}): remove the file, since it may bring back what was forgotten",
            self.member(at).path.display()
        );
        Error::new(ErrorKind::Device, text)
    }

    fn write_copies(&mut self, members: &[u16], copy: u64) -> Vec<(u16, io::Result<()>)> {
        self.run_on(members, Direction::Write, |member, buffer| {
            let bytes = member.geometry().superblock_bytes();
            buffer[..bytes].fill(0);
            member.superblock.encode(&mut buffer[..SUPERBLOCK_BYTES]);
            Extent { file: member.file, offset: copy * bytes as u64, bytes }
        })
    }

    /// Make all answered writes of some directories last. Blocks, no longer than for any operation.
    pub(super) fn sync(&mut self, members: &[u16]) -> Vec<(u16, io::Result<()>)> {
        self.run_on(members, Direction::Sync, |member, _| Extent { file: member.file, offset: 0, bytes: 0 })
    }

    /// One operation on each of some directories, as `prepare` says; those that hung before are not asked again.
    fn run_on(
        &mut self,
        members: &[u16],
        direction: Direction,
        prepare: impl Fn(&Member, &mut Buffer) -> Extent,
    ) -> Vec<(u16, io::Result<()>)> {
        let (mut asked, mut operations, mut results) = (Vec::new(), Vec::new(), Vec::new());
        for &at in members {
            let member = &self.members[usize::from(at)];
            let buffer = if member.hung { None } else { self.queue.buffers().take() };
            let Some(mut buffer) = buffer else {
                results.push((at, Err(io::Error::new(io::ErrorKind::TimedOut, "it does not answer"))));
                continue;
            };
            operations.push((prepare(member, &mut buffer), buffer));
            asked.push(at);
        }
        for (at, (result, buffer)) in asked.into_iter().zip(self.queue.run_all(Purpose::Alone, direction, operations)) {
            if let Some(buffer) = buffer {
                self.queue.buffers().give(buffer);
            }
            results.push((at, result));
        }
        results
    }
}

/// Open, or make, and lock the file of every directory, all side by side; each with the smallest block that its device
/// takes. Directories that cannot be read or do not answer in time are left out, with one line each.
fn open_files(options: &StoreOptions) -> Result<Vec<(CacheFile, usize)>> {
    let (name, create, read_only) = (options.name.clone(), options.create, options.read_only);
    let uid = nix::unistd::geteuid().as_raw();
    let paths: Vec<PathBuf> = options.directories.iter().map(|dir| cache_path(dir, uid, &name)).collect();
    let found = for_each(&paths, options.hang_max, move |path| {
        let file = CacheFile::open(path.parent().unwrap_or(path), &name, create)?;
        if read_only && file.file.metadata().is_ok_and(|meta| meta.len() < 2 * BUFFER_ALIGN as u64) {
            return Err(without_superblock(&path.display()));
        }
        Ok(match block_bytes_min(&file.file) {
            Err(error) if error.raw_os_error() != Some(libc::EIO) => return Err(io_error("read", path, &error)),
            device_block => (file, device_block),
        })
    });
    let mut files = Vec::new();
    for (path, found) in paths.iter().zip(found) {
        let why = match found {
            Ok(found) => match found? {
                (file, Ok(device_block)) => {
                    files.push((file, device_block));
                    continue;
                }
                (_, Err(error)) => error,
            },
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                let text = format!("{} is being opened by this process already: name it once", path.display());
                return Err(Error::new(ErrorKind::InUse, text));
            }
            Err(error) => error,
        };
        log::warn!("pegaflow: the SSD cache {} is left out, serving goes on without it: {why}", path.display());
    }
    if files.is_empty() {
        return Err(nothing_to_read());
    }
    Ok(files)
}

fn nothing_to_read() -> Error {
    Error::new(ErrorKind::Device, "no directory of the SSD cache can be read: look at the disks")
}

fn without_superblock(name: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorKind::Corrupt, format!("{name} has no valid superblock: nothing in it can be used"))
}

/// The back-end that the options ask for; threads if io_uring is not to be had.
pub(super) fn start_io(options: &StoreOptions, files: Vec<std::fs::File>) -> Result<(Box<dyn Io>, Buffers)> {
    let count = options.buffers() * files.len() as u16;
    let buffers = Buffers::new(count, options.chunk_bytes);
    if options.backend != Backend::Threads {
        let copies = files.iter().map(|file| file.try_clone()).collect::<io::Result<Vec<_>>>();
        let copies = copies
            .map_err(|error| Error::new(ErrorKind::Device, format!("too many files are open ({error}): allow more")))?;
        match UringIo::new(copies, count, &buffers) {
            Ok(ring) => return Ok((Box::new(ring), buffers)),
            Err(error) if options.backend == Backend::Uring => return Err(error),
            Err(error) => log::warn!("pegaflow: {error}; the SSD is read and written by threads"),
        }
    }
    Ok((Box::new(ThreadIo::new(files, count.min(SSD_THREADS_MAX))?), buffers))
}
