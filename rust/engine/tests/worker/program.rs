//! Helper program of the kill tests: one process of a pool that does what its role says until it is told to stop, or
//! killed. `pool-worker ROLE DIR ARGS...`; lines on standard output say how far it is.
#![allow(clippy::disallowed_methods, reason = "a forked child ends where it is")]
#![allow(dead_code, missing_docs, unreachable_pub, reason = "a program for tests")]

#[path = "../kill/blocks.rs"]
mod blocks;
#[path = "../kill/chains.rs"]
mod chains;
#[path = "contained.rs"]
mod contained;
#[path = "create.rs"]
mod create;
#[path = "follower.rs"]
mod follower;
#[path = "forge.rs"]
mod forge;
#[path = "fork.rs"]
mod fork;
#[path = "full.rs"]
mod full;
#[path = "hammer.rs"]
mod hammer;
#[path = "../kill/histogram.rs"]
mod histogram;
#[path = "hold.rs"]
mod hold;
#[path = "../hostile/mod.rs"]
mod hostile;
#[path = "hostile.rs"]
mod hostile_inputs;
#[path = "../kill/tier.rs"]
mod kill_tier;
#[path = "lost_lock.rs"]
mod lost_lock;
#[path = "model.rs"]
mod model;
#[path = "nursery.rs"]
mod nursery;
#[path = "objects.rs"]
mod objects;
#[path = "../kill/patience.rs"]
mod patience;
#[path = "../kill/plan.rs"]
mod plan;
#[path = "points.rs"]
mod points;
#[path = "../kill/random.rs"]
mod random;
#[path = "reaper.rs"]
mod reaper;
#[path = "../kill/records.rs"]
mod records;
#[path = "../kill/report.rs"]
mod report;
#[path = "resets.rs"]
mod resets;
#[path = "ssd.rs"]
mod ssd;
#[path = "../kill/stopwatch.rs"]
mod stopwatch;
#[path = "tier.rs"]
mod tier;
#[path = "../kill/values.rs"]
mod values;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (role, dir) = (args[0].as_str(), PathBuf::from(&args[1]));
    let rest: Vec<&str> = args[2..].iter().map(String::as_str).collect();
    run(role, &dir, &rest)
}

fn run(role: &str, dir: &Path, rest: &[&str]) -> ExitCode {
    match role {
        "contained" => return contained::run(dir, rest),
        "contained-init" => return contained::init(dir, rest),
        "point" => points::run(dir, rest[0], rest[1], seed_of_this_process()),
        "nursery" => nursery::run(),
        "create" => create::race(dir),
        "open-close" => create::open_close(dir, rest[0].parse().unwrap()),
        "fork" => fork::run(dir, rest[0]),
        "full" => full::run(dir, rest[0]),
        "hammer" => hammer::run(dir, &plan::Plan::hammer(), rest[0].parse().unwrap(), rest[1].as_ref()),
        "soak" | "keep" => {
            die_loudly(dir);
            let plan = plan::Plan::random(rest[2].parse().unwrap());
            let run = if role == "soak" { hammer::run } else { objects::run };
            run(dir, &plan, rest[0].parse().unwrap(), rest[1].as_ref());
        }
        "follow" => {
            die_loudly(dir);
            let leader = pegaflow_engine::Member { row: rest[0].parse().unwrap(), epoch: rest[1].parse().unwrap() };
            follower::run(dir, leader, &plan::Plan::random(rest[2].parse().unwrap()));
        }
        "hostile" => hostile_inputs::run(dir, rest[0], rest[1].parse().unwrap(), rest[2].parse().unwrap()),
        "hold" => hold::run(dir, rest[0]),
        "lose-lock" => lost_lock::between(dir),
        "lose-lock-at" => points::run_without_lock(dir, rest[0], seed_of_this_process()),
        "lose-lock-within" => lost_lock::within(dir, rest[0]),
        "lead" => hold::lead(dir),
        "model" => model::run(dir),
        "ssd" => ssd::run(dir, rest[0], rest[1].parse().unwrap(), rest[2].parse().unwrap()),
        "tier" => tier::run(dir, rest[0].parse().unwrap()),
        other => panic!("no role {other}"),
    }
    ExitCode::SUCCESS
}

/// A panic in any thread ends the process, and leaves a file `failed-PID` for those that are not its parent.
fn die_loudly(dir: &std::path::Path) {
    let file = dir.join(format!("failed-{}", std::process::id()));
    std::panic::set_hook(Box::new(move |info| {
        eprintln!("{info}");
        std::fs::write(&file, info.to_string()).unwrap();
        std::process::abort();
    }));
}

fn seed_of_this_process() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    random::mix(now.as_nanos() as u64 ^ u64::from(std::process::id()) << 40) >> 36
}

/// Say something to the parent at once.
fn say(line: &str) {
    println!("{line}");
}

/// Wait until the parent writes a line or closes our input.
fn wait_for_parent() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}
