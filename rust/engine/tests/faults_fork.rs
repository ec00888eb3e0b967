//! fork() after use: the child gets a clear error and may open the pool for itself; the parent notices nothing while it
//! lives, and its death is noticed although the child lives.
#![allow(missing_docs)]

mod common;
mod kill;

use std::time::Instant;

use common::ShmDir;
use kill::blocks::{MAIN, namespace, open};
use kill::child::Worker;
use kill::patience::PATIENCE;
use kill::settled::{assert_nothing_lost, assert_settled, stat};

#[test]
fn a_forked_child_is_refused_and_its_parent_unharmed() {
    let dir = ShmDir::new("fork");
    Worker::start("fork", &dir.0, &["refused"]).finish();
    let pool = open(&dir.0);
    assert_nothing_lost(&pool, &[namespace(&pool, MAIN)]);
}

#[test]
fn a_forked_child_is_a_member_of_its_own_once_it_has_opened_the_pool() {
    let dir = ShmDir::new("fork-open");
    Worker::start("fork", &dir.0, &["opens"]).finish();
    let pool = open(&dir.0);
    assert_nothing_lost(&pool, &[namespace(&pool, MAIN)]);
}

#[test]
fn a_parent_is_reaped_while_its_forked_child_lives() {
    let dir = ShmDir::new("fork-parent-dies");
    let pool = open(&dir.0);
    let ns = namespace(&pool, MAIN);
    let mut parent = Worker::start("fork", &dir.0, &["outlives"]);
    parent.expect("forked");
    assert_eq!(stat(&pool.namespace_stats(ns).unwrap(), "blocks_reserved"), 1);
    parent.kill_alone();
    let started = Instant::now();
    while stat(&pool.namespace_stats(ns).unwrap(), "blocks_reserved") > 0 {
        assert!(started.elapsed() < PATIENCE, "the child keeps its dead parent's lock");
        pool.reap().unwrap();
    }
    assert_settled(&pool);
    // Only now: the child ends when its input does.
    parent.finish_orphans();
    assert_nothing_lost(&pool, &[ns]);
}

#[test]
fn a_fork_in_the_middle_of_everything_harms_nobody() {
    let dir = ShmDir::new("fork-busy");
    Worker::start("fork", &dir.0, &["busy"]).finish();
    let pool = open(&dir.0);
    assert_nothing_lost(&pool, &[namespace(&pool, MAIN)]);
}
