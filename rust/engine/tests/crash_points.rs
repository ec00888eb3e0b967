//! The list of crash points is what the engine passes and what the documents explain; `crash.rs` kills at each.
#![allow(missing_docs)]

mod common;
mod kill;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use common::ShmDir;
use kill::blocks::{MAIN, check_chain, keys, namespace, open, store_all, store_chain};
use kill::child::Worker;
use kill::patience::PATIENCE;
use kill::settled::assert_nothing_lost;
use nix::sys::wait::WaitStatus;
use pegaflow_engine::crash_point;

fn sources(folder: &Path, text: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, text);
        } else {
            text.push_str(&std::fs::read_to_string(path).unwrap());
        }
    }
}

#[test]
fn every_point_that_the_engine_passes_is_listed_and_every_one_listed_is_passed() {
    let mut text = String::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut text);
    let passed: BTreeSet<&str> =
        text.split("crash_point::pass(\"").skip(1).map(|rest| rest.split_once('"').unwrap().0).collect();
    let listed: BTreeSet<&str> = crash_point::names().iter().copied().collect();
    assert_eq!(listed.len(), crash_point::names().len(), "no name is listed twice");
    assert_eq!(passed, listed);
}

#[test]
fn the_crash_model_says_what_is_left_behind_at_every_point() {
    let text = include_str!("../../../docs/crash-model.md");
    let explained: BTreeSet<&str> = text.split('`').skip(1).step_by(2).collect();
    let missing: Vec<_> = crash_point::names().iter().filter(|name| !explained.contains(*name)).collect();
    assert!(missing.is_empty(), "docs/crash-model.md does not explain {missing:?}");
}

#[test]
fn an_index_whose_rebuilder_died_is_rebuilt_by_the_background_thread_of_a_survivor() {
    let dir = ShmDir::new("rebuilder");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    let chain = keys(0..8);
    store_all(&pool, ns, &chain[..1], 1);
    store_chain(&pool, ns, &chain, 1);
    let mut dying = Worker::start("point", &dir.0, &["rebuild.cleared", "kill"]);
    assert!(matches!(dying.end(), WaitStatus::Signaled(..)));
    let started = Instant::now();
    while check_chain(&pool, ns, &chain) < chain.len() {
        assert!(started.elapsed() < PATIENCE, "nobody rebuilds the index");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_nothing_lost(&pool, &[ns]);
}
