//! Files of a pool as they were before any damage, to begin again with.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::bytes::Bytes;

pub struct Files {
    pub dir: PathBuf,
    whole: Vec<(PathBuf, Vec<u8>)>,
}

impl Files {
    /// Remember all files of the pool in directory `dir`.
    pub fn of(dir: &Path) -> Self {
        let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        let whole = files.map(|file| (file.clone(), fs::read(file).unwrap())).collect();
        Self { dir: dir.to_owned(), whole }
    }

    pub fn contents(&self, file: &Path) -> &[u8] {
        &self.whole.iter().find(|(known, _)| known == file).unwrap().1
    }

    /// Paths of the segments.
    pub fn segments(&self) -> Vec<&Path> {
        let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
        let mut segments: Vec<&Path> = self.whole.iter().map(|(path, _)| path.as_path()).collect();
        segments.retain(|path| name(path).starts_with("segment-"));
        segments.sort_unstable();
        segments
    }

    /// As it was.
    pub fn restore(&self) {
        for entry in fs::read_dir(&self.dir).unwrap() {
            let file = entry.unwrap().path();
            if !self.whole.iter().any(|(known, _)| *known == file) {
                fs::remove_file(file).unwrap();
            }
        }
        for (file, bytes) in &self.whole {
            let open = File::options().write(true).create(true).truncate(false).mode(0o600).open(file).unwrap();
            open.set_len(bytes.len() as u64).unwrap();
            open.write_all_at(bytes, 0).unwrap();
        }
    }

    /// Damage the word at `at` of `file`, if it still has one there.
    pub fn spoil(&self, file: &Path, at: u64, bytes: &mut Bytes<'_>) {
        let mut word = [0u8; 8];
        let Ok(file) = File::options().read(true).write(true).open(file) else { return };
        if file.read_exact_at(&mut word, at).is_err() {
            return;
        }
        let value = bytes.damaged(u64::from_le_bytes(word));
        file.write_all_at(&value.to_le_bytes(), at).unwrap();
    }

    /// Make a segment shorter or longer, or remove it. Not while it is mapped: whoever truncates a file below another
    /// process kills it, and nothing in that process can help.
    pub fn spoil_length(&self, bytes: &mut Bytes<'_>) {
        let segments = self.segments();
        let path = segments[bytes.below(segments.len())];
        match bytes.byte() % 4 {
            0 => drop(fs::remove_file(path)),
            length => {
                let Ok(file) = File::options().write(true).open(path) else { return };
                let bytes = [0, bytes.below(1 << 16), (1 << 16) + bytes.below(1 << 16)][length as usize - 1];
                file.set_len(bytes as u64).unwrap();
            }
        }
    }
}
