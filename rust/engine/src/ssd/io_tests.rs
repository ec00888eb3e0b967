//! What every implementation of [`Io`] promises, tried on each: io_uring, threads, and the fake disk.

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use super::buffer::{Buffer, Buffers};
use super::fake_block::{Bytes, Random};
use super::fake_disk::{FakeDisk, Faults};
use super::file::cache_path;
use super::io::{Completion, Direction, Io, Operation};
use super::options::{Backend, StoreOptions};
use super::store::Store;
use super::threads::ThreadIo;
use super::uring::UringIo;

const CHUNK: usize = 64 << 10;
const DEPTH: u16 = 8;
const FILES: u32 = 2;
const LONG: Duration = Duration::from_secs(60);
const FILE_BYTES: u64 = 16 * CHUNK as u64;

/// A directory of its own, on a disk if there is one below the sources.
pub(super) struct Folder(pub(super) std::path::PathBuf);

impl Folder {
    pub(super) fn new(name: &str) -> Self {
        let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/ssd-tests");
        let path = base.join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

fn files(folder: &Folder) -> Vec<std::fs::File> {
    let open = |number: u32| {
        let path = folder.0.join(number.to_string());
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        options.custom_flags(libc::O_DIRECT).open(&path).or_else(|_| options.custom_flags(0).open(&path)).unwrap()
    };
    (0..FILES).map(open).collect()
}

fn run_one(io: &mut dyn Io, operation: Operation) -> (std::io::Result<usize>, Operation) {
    io.submit(operation);
    let mut done = Vec::new();
    while done.is_empty() {
        io.poll(Duration::from_millis(50), &mut done);
    }
    let Completion { operation, result } = done.pop().unwrap();
    assert!(done.is_empty());
    (result, operation)
}

fn operation(direction: Direction, file: u32, offset: u64, buffer: Buffer, bytes: usize) -> Operation {
    Operation { token: 1, file, direction, offset, buffer, range: 0..bytes }
}

/// The suite.
fn conforms(io: &mut dyn Io, buffers: &mut Buffers) {
    (0..FILES).for_each(|file| io.resize(file, FILE_BYTES, LONG).unwrap());
    many_at_once_each_have_their_own_answer(io, buffers);
    parts_of_buffers_and_ends_of_files(io, buffers);
    // Without anything on its way a poll returns.
    io.poll(Duration::ZERO, &mut Vec::new());
    for file in 0..FILES {
        let (result, answered) = run_one(io, operation(Direction::Sync, file, 0, buffers.take().unwrap(), 0));
        assert_eq!(result.unwrap(), 0);
        buffers.give(answered.buffer);
    }
    // A file that there is not: an error, and the buffer comes back.
    let buffer = buffers.take().unwrap();
    let (result, answered) = run_one(io, operation(Direction::Read, FILES, 0, buffer, 4096));
    assert!(result.is_err());
    buffers.give(answered.buffer);
    io.resize(0, FILE_BYTES / 2, LONG).unwrap();
    let buffer = buffers.take().unwrap();
    let (result, answered) = run_one(io, operation(Direction::Read, 0, FILE_BYTES / 2, buffer, 4096));
    assert_eq!(result.unwrap(), 0, "cut short");
    buffers.give(answered.buffer);
    assert_eq!(buffers.left(), usize::from(DEPTH));
}

fn many_at_once_each_have_their_own_answer(io: &mut dyn Io, buffers: &mut Buffers) {
    for direction in [Direction::Write, Direction::Read] {
        let mut missing: HashSet<u64> = (0..32).collect();
        let (mut next, mut done) = (0u64, Vec::new());
        while !missing.is_empty() {
            while next < 32
                && let Some(mut buffer) = buffers.take()
            {
                buffer.fill(if direction == Direction::Write { 100 + next as u8 } else { 0 });
                let (file, offset) = ((next % 2) as u32, next / 2 * CHUNK as u64);
                io.submit(Operation { token: next, file, direction, offset, buffer, range: 0..CHUNK });
                next += 1;
            }
            io.poll(Duration::from_millis(50), &mut done);
            for Completion { operation, result } in done.drain(..) {
                assert_eq!(result.unwrap(), CHUNK);
                assert!(missing.remove(&operation.token), "answered twice");
                assert!(operation.buffer.iter().all(|byte| *byte == 100 + operation.token as u8));
                buffers.give(operation.buffer);
            }
        }
    }
}

fn parts_of_buffers_and_ends_of_files(io: &mut dyn Io, buffers: &mut Buffers) {
    let mut buffer = buffers.take().unwrap();
    buffer.fill(1);
    buffer[8192..12288].fill(2);
    let write = Operation { range: 8192..12288, ..operation(Direction::Write, 1, 4096, buffer, 0) };
    let (result, mut answered) = run_one(io, write);
    assert_eq!(result.unwrap(), 4096);
    answered.buffer.fill(0);
    let read = Operation { range: 4096..12288, ..operation(Direction::Read, 1, 0, answered.buffer, 0) };
    let (result, answered) = run_one(io, read);
    assert_eq!(result.unwrap(), 8192);
    assert!(answered.buffer[8192..12288].iter().all(|byte| *byte == 2));
    assert!(answered.buffer[4096..8192].iter().all(|byte| *byte == 101));
    assert!(answered.buffer[..4096].iter().chain(&answered.buffer[12288..]).all(|byte| *byte == 0));
    let last = operation(Direction::Read, 1, FILE_BYTES - 4096, answered.buffer, 8192);
    let (result, answered) = run_one(io, last);
    assert_eq!(result.unwrap(), 4096, "a short read at the end");
    buffers.give(answered.buffer);
}

#[test]
fn threads_conform() {
    let folder = Folder::new("threads");
    let mut buffers = Buffers::new(DEPTH, CHUNK);
    conforms(&mut ThreadIo::new(files(&folder), DEPTH).unwrap(), &mut buffers);
}

#[test]
fn io_uring_conforms_or_says_that_it_is_not_to_be_had() {
    let folder = Folder::new("uring");
    let mut buffers = Buffers::new(DEPTH, CHUNK);
    match UringIo::new(files(&folder), DEPTH, &buffers) {
        Ok(mut io) => conforms(&mut io, &mut buffers),
        Err(error) => assert!(error.to_string().contains("io_uring"), "{error}"),
    }
}

#[test]
fn the_fake_disk_conforms() {
    let disk = FakeDisk::new(FILES as usize, 1);
    disk.set(Faults { late: 50, ..Faults::default() });
    conforms(&mut disk.io(), &mut Buffers::new(DEPTH, CHUNK));
}

#[test]
fn operations_on_their_way_do_not_keep_a_drop_from_ending() {
    let folder = Folder::new("drop");
    let mut buffers = Buffers::new(DEPTH, CHUNK);
    let mut all: Vec<Box<dyn Io>> = vec![Box::new(ThreadIo::new(files(&folder), DEPTH).unwrap())];
    all.extend(UringIo::new(files(&folder), DEPTH, &buffers).ok().map(|io| Box::new(io) as Box<dyn Io>));
    for mut io in all {
        io.resize(0, FILE_BYTES, LONG).unwrap();
        for _ in 0..2 {
            io.submit(operation(Direction::Write, 0, 0, buffers.take().unwrap(), CHUNK));
        }
    }
}

fn options(folder: &Folder, backend: Backend) -> StoreOptions {
    StoreOptions {
        directories: vec![folder.0.clone()],
        capacity_bytes: Some(17 << 20),
        chunk_bytes: 64 << 10,
        backend,
        ..StoreOptions::default()
    }
}

#[test]
fn files_of_both_back_ends_are_the_same() {
    use super::fake_block::{Block, Fixture};
    let folder = Folder::new("both");
    let fixture = Fixture { bytes_max: 200 << 10, ..Fixture::new(1, 1) };
    let mut random = Random::new(1);
    let mut written = Vec::new();
    for round in 0..6 {
        let backend = if round % 2 == 0 { Backend::Auto } else { Backend::Threads };
        let mut store: Store<Bytes> = Store::open(options(&folder, backend)).unwrap();
        store.recover();
        assert_eq!(fixture.count_whole(&mut store, &written), written.len());
        let more: Vec<Block> = (10 * round..10 * round + 5).map(Block::new).collect();
        fixture.write_through(&mut store, &more);
        written.extend(more);
        if random.chance(50) {
            store.close().unwrap();
        }
    }
}

#[test]
fn a_file_in_use_or_open_to_others_is_refused() {
    let folder = Folder::new("lock");
    let open = || Store::<Bytes>::open(options(&folder, Backend::Auto));
    let first = open().unwrap();
    assert_eq!(open().err().unwrap().kind(), crate::ErrorKind::InUse);
    drop(first);
    drop(open().unwrap());
    let path = cache_path(&folder.0, nix::unistd::geteuid().as_raw(), "default");
    assert!(std::fs::metadata(&path).unwrap().len() <= 17 << 20);
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    assert_eq!(open().err().unwrap().kind(), crate::ErrorKind::Refused);
    std::fs::rename(&path, folder.0.join("elsewhere")).unwrap();
    std::os::unix::fs::symlink(folder.0.join("elsewhere"), &path).unwrap();
    assert_eq!(open().err().unwrap().kind(), crate::ErrorKind::Refused);
    let nowhere = StoreOptions { directories: vec![folder.0.join("nowhere")], ..StoreOptions::default() };
    assert_eq!(Store::<Bytes>::open(nowhere).err().unwrap().kind(), crate::ErrorKind::NotFound);
    let unmade = StoreOptions { create: false, name: "other".into(), ..options(&folder, Backend::Auto) };
    assert_eq!(Store::<Bytes>::open(unmade).err().unwrap().kind(), crate::ErrorKind::NotFound);
}

#[test]
fn options_that_cannot_work_are_refused() {
    let folder = Folder::new("options");
    let good = options(&folder, Backend::Auto);
    let bad = [
        StoreOptions { directories: Vec::new(), ..good.clone() },
        StoreOptions { read_depth: 0, ..good.clone() },
        StoreOptions { write_depth: 1000, ..good.clone() },
        StoreOptions { chunk_bytes: 5000, ..good.clone() },
        StoreOptions { block_bytes: Some(128 << 10), ..good.clone() },
        StoreOptions { name: "../x".into(), ..good.clone() },
        StoreOptions { capacity_bytes: Some(1 << 20), ..good },
    ];
    for options in bad {
        let error = Store::<Bytes>::open(options.clone()).err().unwrap();
        assert_eq!(error.kind(), crate::ErrorKind::InvalidArgument, "{options:?}: {error}");
    }
}
