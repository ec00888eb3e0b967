//! Names of a pool's directory and files: formatter and parser side by side.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::limits::POOL_NAME_CHARS_MAX;

/// Version of the layout of everything in shared memory. It is part of the directory's name, so pools of different
/// layouts never meet.
pub const LAYOUT_VERSION: u32 = 2;

/// File that holds the index, the slot headers and the process table.
pub(crate) const CONTROL: &str = "control";
/// Prefix of a control file that is still being written.
pub(crate) const CONTROL_NEW: &str = "control.new.";
/// File of the pool's SSD tier.
pub(crate) const TIER: &str = "ssd";
/// Prefix of such a file that is still being written.
pub(crate) const TIER_NEW: &str = "ssd.new.";
/// File of what was asked of the pool and found.
pub(crate) const TRAFFIC: &str = "traffic-v2";
/// Prefix of such a file that is still being written.
pub(crate) const TRAFFIC_NEW: &str = "traffic.new.";
/// How all their names begin, those of other versions too.
pub(crate) const TRAFFIC_ANY: &str = "traffic";
/// File of the names of what went.
pub(crate) const GONE: &str = "gone-v1";
/// Prefix of such a file that is still being written.
pub(crate) const GONE_NEW: &str = "gone.new.";
/// How all their names begin, those of other versions too.
pub(crate) const GONE_ANY: &str = "gone";
const SEGMENT: &str = "segment-";

/// Check a pool name given by a user.
pub(crate) fn check_pool_name(name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if name.is_empty() || name.len() > POOL_NAME_CHARS_MAX || name.starts_with('.') || !name.chars().all(plain) {
        return Err(Error::invalid(format!(
            "'{name}' is no pool name: use 1 to {POOL_NAME_CHARS_MAX} letters, digits, '.', '_' or '-', not starting \
             with '.'"
        )));
    }
    Ok(())
}

/// Directory of pool `name` of user `uid` below `shm_dir`.
pub fn pool_dir(shm_dir: &Path, uid: u32, name: &str) -> PathBuf {
    shm_dir.join(format!("pegaflow-v{LAYOUT_VERSION}-{uid}-{name}"))
}

/// The command that removes the pool in `dir`, to be run as it stands. It says which by path: a living pool of another
/// layout version or user may have the same name.
pub(crate) fn removal_command(dir: &Path) -> String {
    let path = dir.display().to_string();
    let plain = path.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '_' | '-'));
    let word = if plain { path } else { format!("'{}'", path.replace('\'', r"'\''")) };
    format!("`pegaflow rm --force {word}`")
}

/// What a directory name says: layout version, user and pool name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PoolDirName {
    pub(crate) version: u32,
    pub(crate) uid: u32,
    pub(crate) name: String,
}

/// Parse the name of a pool's directory; `None` for anything else.
pub(crate) fn parse_pool_dir(dir_name: &str) -> Option<PoolDirName> {
    let rest = dir_name.strip_prefix("pegaflow-v")?;
    let (version, rest) = rest.split_once('-')?;
    let (uid, name) = rest.split_once('-')?;
    check_pool_name(name).ok()?;
    Some(PoolDirName { version: version.parse().ok()?, uid: uid.parse().ok()?, name: name.to_owned() })
}

/// How the names of directories begin that hold segments of the pool in directory `pool_dir_name` on file system
/// `device`, where they do not lie beside its control file.
pub(crate) fn segments_dir_prefix(pool_dir_name: &str, device: u64) -> String {
    format!("pegaflow-segments-{}-{device:x}-", pool_dir_name.strip_prefix("pegaflow-").unwrap_or(pool_dir_name))
}

/// Name of the one that belongs to the pool of this id.
pub(crate) fn segments_dir_name(pool_dir_name: &str, device: u64, pool_id: u64) -> String {
    format!("{}{pool_id:016x}", segments_dir_prefix(pool_dir_name, device))
}

/// File name of segment `segment`.
pub(crate) fn segment_file(segment: u32) -> String {
    format!("{SEGMENT}{segment:05}")
}

/// Number of the segment that a file name stands for.
pub(crate) fn parse_segment_file(file_name: &str) -> Option<u32> {
    let digits = file_name.strip_prefix(SEGMENT)?;
    (digits.len() == 5).then(|| digits.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_format_and_parse() {
        let dir = pool_dir(Path::new("/dev/shm"), 1000, "llama-3.1_8b");
        let parsed = parse_pool_dir(dir.file_name().unwrap().to_str().unwrap()).unwrap();
        assert_eq!(parsed, PoolDirName { version: LAYOUT_VERSION, uid: 1000, name: "llama-3.1_8b".into() });
        assert_eq!(parse_segment_file(&segment_file(77)), Some(77));
    }

    #[test]
    fn removal_commands_are_one_word_a_path_in_a_shell() {
        for (dir, word) in
            [("/dev/shm/a-1_b.c", "/dev/shm/a-1_b.c"), ("/my shm/a", "'/my shm/a'"), ("it's", r"'it'\''s'")]
        {
            assert_eq!(removal_command(Path::new(dir)), format!("`pegaflow rm --force {word}`"));
        }
    }

    #[test]
    fn directories_of_segments_are_no_pools_and_tell_pools_apart() {
        let name = segments_dir_name("pegaflow-v1-0-a", 0x1f, 7);
        assert_eq!(name, "pegaflow-segments-v1-0-a-1f-0000000000000007");
        assert_eq!(parse_pool_dir(&name), None);
        assert!(!segments_dir_name("pegaflow-v1-0-a-1f", 0x1f, 7).ends_with(&name));
    }

    #[test]
    fn foreign_names_are_not_pools() {
        for name in ["pegaflow-v1-0-", "pegaflow-v1-x-a", "pegaflow-1-0-a", "sem.pegaflow", "pegaflow-v1-0-a/b"] {
            assert_eq!(parse_pool_dir(name), None, "{name}");
        }
        assert_eq!(parse_segment_file("segment-1"), None);
        assert_eq!(parse_segment_file("segment-000x1"), None);
    }

    #[test]
    fn bad_pool_names_are_refused() {
        for name in ["", ".hidden", "a/b", "a b", &"x".repeat(65)] {
            assert!(check_pool_name(name).is_err(), "{name}");
        }
    }
}
