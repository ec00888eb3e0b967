//! Processes die by kill -9 at every named point, alone and in every pair of points, or stand still at one while others
//! die. Each time survivors go on within bounds, every invariant holds, nothing is lost, and no byte is wrong.
//!
//! `PEGAFLOW_TEST_KILLS` is the least number of deaths at each point; below 100 every point meets only some of the
//! others, chosen by chance, so that all pairs have had their turn after some runs. `PEGAFLOW_TEST_SEED` repeats the
//! choices of a run, `PEGAFLOW_TEST_LANES` is how many sequences run at a time, `PEGAFLOW_CRASH_JSON` names a file for
//! the figures. `make crash KILLS=n LANES=n` sets them.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "shared with the processes to kill")]

use std::io::IsTerminal;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Instant;

mod common;
mod crash_parts;
#[path = "worker/forge.rs"]
mod forge;
mod kill;

use crash_parts::lane::{Lane, is_slow};
use crash_parts::tally::Tally;
use kill::blocks;
use kill::random::{mix, seed};
use pegaflow_engine::crash_point;

const KILLS: u64 = 50;
/// From so many deaths at each point on, it meets every other.
const KILLS_OF_ALL_PAIRS_MIN: u64 = 100;
/// Deaths at each point alone for each round of all pairs.
const KILLS_PER_ROUND_OF_PAIRS: u64 = 50;
/// Share of the pairs in a short run.
const PAIRS_PERCENT: u64 = 10;
/// Of a hundred pairs, this many may not come about: what a death leaves behind can keep the other process from ever
/// coming to its point, and on a busy machine a sibling may be faster each time.
const UNMET_PERCENT_MAX: u64 = 1;
/// Rounds in which each pair has met in each way.
const ROUNDS_OF_PAIRS_MAX: u64 = 3;
/// Rounds for one death at a slow point.
const SSD_ROUNDS: u64 = 10;
/// As many as small machines have CPUs. A lane mostly waits, on a busy machine for its turn: there more are faster.
const LANES: usize = 2;

#[derive(Clone, Copy)]
enum Job {
    /// Every point once, but for those that are not met in every round.
    Round(u64),
    /// A point with every other.
    Pairs(&'static str, usize, u64),
}

fn jobs(kills: u64) -> Vec<Job> {
    let names = crash_point::names();
    let mut jobs: Vec<Job> = (0..kills).map(Job::Round).collect();
    if kills < KILLS_OF_ALL_PAIRS_MIN {
        jobs.extend(names.iter().map(|name| Job::Pairs(name, 0, PAIRS_PERCENT)));
        return jobs;
    }
    let rounds = kills.div_ceil(KILLS_PER_ROUND_OF_PAIRS).min(ROUNDS_OF_PAIRS_MAX) as usize;
    for round in 0..rounds {
        jobs.extend(names.iter().map(|name| Job::Pairs(name, round, 100)));
    }
    jobs
}

/// In short runs, points for which a pool and its files are made each time are met in every tenth round.
fn rounds_for_one(point: &str, kills: u64) -> u64 {
    if is_slow(point) && kills < KILLS_OF_ALL_PAIRS_MIN { SSD_ROUNDS } else { 1 }
}

fn run_lane(jobs: &[Job], next: &AtomicUsize, kills: u64, mut lane: Lane) -> Tally {
    loop {
        let number = next.fetch_add(1, SeqCst);
        match jobs.get(number) {
            None => return lane.tally,
            Some(Job::Round(round)) => lane.round(|point| round % rounds_for_one(point, kills) == 0),
            Some(Job::Pairs(first, round, percent)) => lane.pairs(first, *round, *percent),
        }
        show_progress(number + 1, jobs.len());
    }
}

/// One line that is written over, for people who look on.
fn show_progress(done: usize, total: usize) {
    if done <= total && std::io::stderr().is_terminal() {
        let filled = "#".repeat(done * 50 / total);
        eprint!("\r[{filled:<50}] {done} of {total}{}", if done == total { "\n" } else { "" });
    } else if (done * 10 / total) > (done - 1) * 10 / total {
        eprintln!("{done} of {total}");
    }
}

#[test]
fn deaths_at_every_point_alone_and_in_pairs_harm_nobody() {
    let kills = std::env::var("PEGAFLOW_TEST_KILLS").map_or(KILLS, |text| text.parse().unwrap());
    let lanes = std::env::var("PEGAFLOW_TEST_LANES").map_or(LANES, |text| text.parse().unwrap());
    let seed = seed("crash");
    let (jobs, next, tally, started) = (jobs(kills), AtomicUsize::new(0), Mutex::new(Tally::new()), Instant::now());
    std::thread::scope(|scope| {
        for number in 0..lanes {
            let (jobs, next, tally) = (&jobs, &next, &tally);
            scope.spawn(move || {
                let lane = Lane::new(&format!("crash-{number}"), mix(seed ^ number as u64));
                let done = run_lane(jobs, next, kills, lane);
                tally.lock().unwrap().add(&done);
            });
        }
    });
    let (tally, elapsed) = (tally.into_inner().unwrap(), started.elapsed());
    tally.print();
    println!(
        "{} kills and {} stops at {} points, {} pairs, {} tries that came to no point, in {elapsed:.1?}",
        tally.total().kills,
        tally.total().stops,
        crash_point::names().len(),
        tally.pairs,
        tally.missed
    );
    if let Some(file) = std::env::var_os("PEGAFLOW_CRASH_JSON") {
        std::fs::write(file, format!("{:#}\n", tally.to_json(kills, elapsed))).unwrap();
    }
    let unmet = &tally.unmet;
    println!("{} deaths and pairs did not come about: {unmet:?}", unmet.len());
    assert!(unmet.len() as u64 <= (tally.pairs * UNMET_PERCENT_MAX).div_ceil(100), "too many: {unmet:?}");
    for (name, row) in tally.rows() {
        assert!(row.kills >= kills / rounds_for_one(name, kills), "{name}: {} kills", row.kills);
    }
}
