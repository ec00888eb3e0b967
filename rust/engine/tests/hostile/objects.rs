//! Stored values whose bytes and headers are damaged: what `PegaEngine` reads back.

use std::path::Path;

use pegaflow_engine::objects::{ObjectStore, ObjectStoreOptions, Value, ValueKind};

use super::bytes::Bytes;
use super::files::Files;

const STEPS_MAX: usize = 24;
const SUPERBLOCK_BYTES: u64 = 128;

pub struct Target {
    options: ObjectStoreOptions,
    files: Files,
    /// File and offset of every word that is not zero.
    used: Vec<(usize, u64)>,
}

fn options(dir: &Path) -> ObjectStoreOptions {
    ObjectStoreOptions { shm_dir: dir.to_owned(), pool_bytes: Some(4 << 20), evict: true, checksum: true }
}

fn key(number: usize) -> String {
    "key ".repeat(number % 5) + &number.to_string()
}

impl Target {
    pub fn new(dir: &Path) -> Self {
        let options = options(dir);
        let store = ObjectStore::open(Some("o"), &options).unwrap();
        for number in 0..12 {
            store.put(&key(number), ValueKind::Str, &vec![b'v'; number * number * 100]).unwrap();
        }
        let pool_dir = std::fs::read_dir(dir).unwrap().next().unwrap().unwrap().path();
        let files = Files::of(&pool_dir);
        drop(store);
        let mut used = Vec::new();
        for (number, file) in Self::paths(&files).iter().enumerate() {
            let words = files.contents(file).chunks_exact(8).enumerate().filter(|(_, word)| **word != [0; 8]);
            // Values are all alike, so a few words of each segment stand for it.
            let words = words.map(|(index, _)| index as u64 * 8).filter(|at| number > 0 || *at >= SUPERBLOCK_BYTES);
            used.extend(words.take(if number > 0 { 64 } else { usize::MAX }).map(|at| (number, at)));
        }
        Self { options, files, used }
    }

    /// The control file first, then the segments.
    fn paths(files: &Files) -> Vec<std::path::PathBuf> {
        let mut paths = vec![files.dir.join("control")];
        paths.extend(files.segments().iter().map(|path| path.to_path_buf()));
        paths
    }

    pub fn run(&mut self, data: &[u8]) {
        let mut bytes = Bytes::new(data);
        self.files.restore();
        for _ in 0..bytes.byte() % 12 {
            self.spoil(&mut bytes);
        }
        if bytes.byte() % 4 == 1 {
            self.files.spoil_length(&mut bytes);
        }
        let options = ObjectStoreOptions { checksum: bytes.flag(), ..self.options.clone() };
        let Ok(store) = ObjectStore::open(Some("o"), &options) else { return };
        let mut held = Vec::new();
        for _ in 0..STEPS_MAX {
            if bytes.is_empty() {
                break;
            }
            self.step(&store, &mut held, &mut bytes);
        }
    }

    fn spoil(&self, bytes: &mut Bytes<'_>) {
        let (file, at) = self.used[bytes.below(self.used.len())];
        self.files.spoil(&Self::paths(&self.files)[file], at, bytes);
    }

    fn step(&self, store: &ObjectStore, held: &mut Vec<Value>, bytes: &mut Bytes<'_>) {
        let key = key(bytes.below(14));
        match bytes.byte() % 10 {
            0..3 => self.spoil(bytes),
            3 => {
                if let Ok(Some(value)) = store.get(&key) {
                    let copy = value.to_vec();
                    assert!(copy.is_err() || copy.is_ok_and(|copy| copy.len() == value.bytes()));
                    held.push(value);
                }
            }
            4 => drop(store.put(&key, ValueKind::Bytes, &vec![bytes.byte(); bytes.below(3000)])),
            5 => drop(store.remove(&key)),
            6 => drop(store.keys()),
            7 => drop(store.contains(&key)),
            8 => held.clear(),
            _ => drop((store.count(), store.stats())),
        }
    }
}
