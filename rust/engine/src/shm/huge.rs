//! Huge pages that were reserved for good: where a hugetlbfs is mounted, and whether it has enough of them.

use std::path::{Path, PathBuf};

use crate::config::HugePages;

/// One mount of hugetlbfs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HugeMount {
    pub(crate) dir: PathBuf,
    pub(crate) page_bytes: u64,
    /// Bytes of pages that nobody has or has been promised.
    pub(crate) free_bytes: u64,
}

/// The mount, or the directory on one, in which to keep `bytes` (`None`: as much as there is); the most free one that
/// this user may write. The error is a reason to do without.
pub(crate) fn choose(wanted: &HugePages, bytes: Option<u64>) -> Result<HugeMount, String> {
    let mounts = mounts(&wanted.system_root);
    let mut candidates = match &wanted.dir {
        None => mounts,
        Some(dir) => {
            let below = mounts.into_iter().filter(|mount| dir.starts_with(&mount.dir));
            let mount = below.max_by_key(|mount| mount.dir.components().count());
            let mount = mount.ok_or_else(|| format!("{} is on no hugetlbfs", dir.display()))?;
            vec![HugeMount { dir: dir.clone(), ..mount }]
        }
    };
    if candidates.is_empty() {
        return Err("no hugetlbfs is mounted".into());
    }
    candidates.sort_by_key(|mount| mount.free_bytes);
    let Some(best) = candidates.into_iter().rev().find(|mount| is_writable(&mount.dir)) else {
        return Err("this user may not write to the hugetlbfs".into());
    };
    let needed = bytes.unwrap_or(best.page_bytes);
    if best.free_bytes < needed {
        return Err(format!(
            "{} has {} MiB of free huge pages, the pool needs {} MiB",
            best.dir.display(),
            best.free_bytes >> 20,
            needed.div_ceil(1 << 20)
        ));
    }
    Ok(best)
}

fn is_writable(dir: &Path) -> bool {
    let access = nix::unistd::AccessFlags::W_OK | nix::unistd::AccessFlags::X_OK;
    nix::unistd::eaccess(dir, access).is_ok()
}

/// All mounts of hugetlbfs, from what the kernel says below `root`.
pub(crate) fn mounts(root: &Path) -> Vec<HugeMount> {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let default_bytes = read("proc/meminfo")
        .lines()
        .find_map(|line| line.strip_prefix("Hugepagesize:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .map_or(0, |kib| kib << 10);
    let mut found: Vec<HugeMount> = Vec::new();
    for line in read("proc/self/mounts").lines() {
        let mut fields = line.split(' ');
        let (_, Some(dir), Some("hugetlbfs"), Some(options)) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let named = options.split(',').find_map(|option| option.strip_prefix("pagesize="));
        let page_bytes = named.map_or(Some(default_bytes), parse_bytes).unwrap_or(0);
        if page_bytes == 0 || !page_bytes.is_power_of_two() {
            continue;
        }
        let pages = |what: &str| -> u64 {
            let path = format!("sys/kernel/mm/hugepages/hugepages-{}kB/{what}", page_bytes >> 10);
            read(&path).trim().parse().unwrap_or(0)
        };
        let free = pages("free_hugepages").saturating_sub(pages("resv_hugepages"));
        let dir = PathBuf::from(unescape(dir));
        // Of mounts over each other the last one is seen.
        found.retain(|mount| mount.dir != dir);
        found.push(HugeMount { dir, page_bytes, free_bytes: free * page_bytes });
    }
    found
}

fn parse_bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|unit: char| !unit.is_ascii_digit());
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_shl(shift)
}

/// The kernel writes blanks in paths as octal escapes.
fn unescape(path: &str) -> String {
    path.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files as the kernel has them, and a directory that is said to be a hugetlbfs; gone in the end.
    struct MadeUp(PathBuf);

    impl MadeUp {
        fn new(test: &str) -> Self {
            let root = std::env::temp_dir().join(format!("pega-huge-{test}-{}", std::process::id()));
            std::fs::create_dir_all(root.join("huge pages")).unwrap();
            let made_up = Self(root);
            made_up.put("proc/meminfo", "MemTotal: 1 kB\nHugepagesize:       2048 kB\n");
            made_up.pages(2048, 100, 30);
            made_up
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        fn pages(&self, kib: u64, free: u64, promised: u64) {
            let dir = format!("sys/kernel/mm/hugepages/hugepages-{kib}kB");
            self.put(&format!("{dir}/free_hugepages"), &format!("{free}\n"));
            self.put(&format!("{dir}/resv_hugepages"), &format!("{promised}\n"));
        }

        fn mount(&self, options: &str) {
            let dir = self.0.join("huge pages").display().to_string().replace(' ', "\\040");
            self.put("proc/self/mounts", &format!("proc /proc proc rw 0 0\nnone {dir} hugetlbfs rw,{options} 0 0\n"));
        }

        fn choose(&self, dir: Option<&str>, bytes: Option<u64>) -> Result<HugeMount, String> {
            let dir = dir.map(|dir| self.0.join(dir));
            choose(&HugePages { dir, system_root: self.0.clone() }, bytes)
        }
    }

    impl Drop for MadeUp {
        fn drop(&mut self) {
            let _best_effort = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn pages_that_are_promised_to_others_do_not_count() {
        let made_up = MadeUp::new("promised");
        made_up.mount("relatime");
        let mount = made_up.choose(None, Some(140 << 20)).unwrap();
        assert_eq!((mount.page_bytes, mount.free_bytes), (2 << 20, 140 << 20));
        assert_eq!(mount.dir, made_up.0.join("huge pages"));
        let reason = made_up.choose(None, Some((140 << 20) + 1)).unwrap_err();
        assert!(reason.contains("has 140 MiB of free huge pages, the pool needs 141 MiB"), "{reason}");
    }

    #[test]
    fn the_size_of_pages_is_that_of_the_mount() {
        let made_up = MadeUp::new("size");
        made_up.pages(1 << 20, 3, 0);
        for (options, bytes) in [("pagesize=1024M", 1 << 30), ("pagesize=1G,uid=0", 1 << 30), ("pagesize=2M", 2 << 20)]
        {
            made_up.mount(options);
            assert_eq!(made_up.choose(None, None).unwrap().page_bytes, bytes, "{options}");
        }
        made_up.mount("pagesize=3X");
        assert!(made_up.choose(None, None).is_err());
    }

    #[test]
    fn a_directory_counts_only_on_a_hugetlbfs() {
        let made_up = MadeUp::new("directory");
        made_up.mount("relatime");
        std::fs::create_dir(made_up.0.join("huge pages/mine")).unwrap();
        assert_eq!(made_up.choose(Some("huge pages/mine"), None).unwrap().dir, made_up.0.join("huge pages/mine"));
        assert!(made_up.choose(Some("proc"), None).unwrap_err().ends_with("is on no hugetlbfs"));
    }

    #[test]
    fn without_mounts_or_pages_the_reason_is_said() {
        let made_up = MadeUp::new("none");
        assert_eq!(made_up.choose(None, None).unwrap_err(), "no hugetlbfs is mounted");
        made_up.mount("relatime");
        made_up.pages(2048, 5, 5);
        assert!(made_up.choose(None, None).unwrap_err().contains("has 0 MiB of free huge pages"));
    }
}
