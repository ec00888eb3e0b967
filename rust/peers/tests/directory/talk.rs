//! Owners and askers, and what they say.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pegaflow_peers::directory::{Answer, Directory, DirectoryTuning, block_hash};

use crate::blocks::Blocks;

pub(crate) const ADDRESS: &str = "10.0.0.1:7400";
pub(crate) const OTHER: &str = "10.0.0.2:7400";

/// A safety net. Sentinels that get no processor for two seconds do nothing but look for half a minute.
const WAIT_MAX: Duration = Duration::from_secs(300);

/// Hash of the block of a number.
pub(crate) fn block(number: u64) -> u64 {
    block_hash(7, &number.to_le_bytes())
}

pub(crate) fn hasty() -> DirectoryTuning {
    let refresh = Duration::from_millis(200);
    DirectoryTuning { refresh, record_life: Duration::from_secs(5), ..DirectoryTuning::default() }
}

pub(crate) fn open(blocks: &Arc<Blocks>, url: &str, tuning: DirectoryTuning) -> Directory {
    Directory::open(Arc::clone(blocks) as _, url, tuning).unwrap()
}

/// Somebody who has nothing and asks.
pub(crate) fn asker(url: &str) -> Directory {
    open(&Arc::new(Blocks::new(99, 0)), url, hasty())
}

pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) -> Duration {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < WAIT_MAX, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
    began.elapsed()
}

/// What the directory says; nothing if it is not to be asked.
pub(crate) fn find(directory: &Directory, hashes: &[u64]) -> Answer {
    let Some(query) = directory.find(vec![hashes.to_vec()]) else { return Answer::default() };
    loop {
        match query.poll() {
            Some(answer) => return answer,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Of the hashes, those for which somebody is named. Of so few at a time that a busy machine answers each part in time.
pub(crate) fn named(directory: &Directory, hashes: &[u64]) -> HashSet<u64> {
    let mut named = HashSet::new();
    for part in hashes.chunks(512) {
        let answer = find(directory, part);
        let owners = answer.owners.into_iter().flatten();
        named.extend(part.iter().zip(owners).filter(|(_, owners)| !owners.is_empty()).map(|(hash, _)| *hash));
    }
    named
}

/// Ask until somebody was named for each: an answer may be late, and only what it lacks is asked for again.
pub(crate) fn until_found(what: &str, directory: &Directory, hashes: impl IntoIterator<Item = u64>) -> Duration {
    let mut missing: Vec<u64> = hashes.into_iter().collect();
    until(what, || {
        let found = named(directory, &missing);
        missing.retain(|hash| !found.contains(hash));
        missing.is_empty()
    })
}

pub(crate) fn is_complete(directory: &Directory) -> bool {
    directory.owner_facts().is_some_and(|facts| facts.up && facts.complete)
}
