//! The result of a soak, for people and as JSON.

use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

use super::facts::machine;
use super::outcome::{Outcome, worst};
use crate::kill::report::{BYTES_READ, BYTES_WRITTEN, CHECKED, OPERATION_COUNT, OPERATIONS, Report, WRONG};

/// Longest wait of a survivor in one operation while it serves, not counting the time without a CPU.
const WAIT_MS_AIM: f64 = 50.0;
/// Longest time from a death until all that it held is free, with nobody stopped meanwhile.
const REAP_MS_AIM: u64 = 1000;

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn percentile(sorted: &[u64], percent: usize) -> u64 {
    sorted.get((sorted.len() * percent).div_ceil(100).saturating_sub(1)).copied().unwrap_or(0)
}

/// One line for while it runs.
pub fn line(outcome: &Outcome, running: &Report, elapsed: Duration) -> String {
    let mut all = outcome.totals.clone();
    all.add(running);
    let (name, took) = worst(&all);
    format!(
        "{:>3}:{:02}  pool {}: {:.1} M operations, {:.1} GB read, {} wrong, {} kills, {} stops, worst {name} {:.1} ms, \
         worst reap {} ms",
        elapsed.as_secs() / 60,
        elapsed.as_secs() % 60,
        outcome.rounds,
        all.counted(OPERATION_COUNT) as f64 / 1e6,
        all.counted(BYTES_READ) as f64 / 1e9,
        all.counted(WRONG),
        outcome.all_kills(),
        outcome.stops + outcome.stops_at_points,
        ms(took.own),
        percentile(&outcome.reap_ms(false), 100),
    )
}

/// What was aimed at and not reached.
pub fn missed_aims(outcome: &Outcome) -> Vec<String> {
    let mut missed = Vec::new();
    let (name, took) = worst(&outcome.totals);
    if ms(took.own) > WAIT_MS_AIM {
        missed.push(format!("{name} took {:.1} ms, the aim is {WAIT_MS_AIM} ms", ms(took.own)));
    }
    let reap_ms = percentile(&outcome.reap_ms(false), 100);
    if reap_ms > REAP_MS_AIM {
        missed.push(format!("a dead process was reaped after {reap_ms} ms, the aim is {REAP_MS_AIM} ms"));
    }
    missed
}

/// The table.
pub fn table(outcome: &Outcome, seed: u64, elapsed: Duration) -> String {
    let totals = &outcome.totals;
    let seconds = elapsed.as_secs_f64();
    let mut text = format!("\nSoak of {seconds:.0} s, seed {seed}, {} pools\n\n", outcome.rounds);
    let head = ["operation", "count", "per s", "p99.9 ms", "wall", "worst ms", "wall"];
    let [operation, count, rate, usual, usual_wall, worst, wall] = head;
    writeln!(text, "{operation:<10}{count:>12}{rate:>9}{usual:>10}{usual_wall:>9}{worst:>10}{wall:>9}").unwrap();
    for (number, name) in OPERATIONS.iter().enumerate() {
        let (usual, longest) = (totals.nearly_longest(number), totals.longest(number));
        writeln!(
            text,
            "{name:<10}{:>12}{:>9.0}{:>10.2}{:>9.2}{:>10.2}{:>9.2}",
            totals.times(number),
            totals.times(number) as f64 / seconds,
            ms(usual.own),
            ms(usual.wall),
            ms(longest.own),
            ms(longest.wall)
        )
        .unwrap();
    }
    text.push_str(
        "(without the time for which its thread, or one that it waits for, had no CPU; \"wall\" with it)\n\n",
    );
    for (name, value) in facts(outcome) {
        writeln!(text, "{name:<41}{value}").unwrap();
    }
    for missed in missed_aims(outcome) {
        writeln!(text, "missed: {missed}").unwrap();
    }
    for failure in &outcome.failures {
        writeln!(text, "FAILED: {failure}").unwrap();
    }
    text
}

fn stalled_max(outcome: &Outcome) -> Duration {
    outcome.stalls.iter().max().copied().unwrap_or_default()
}

fn facts(outcome: &Outcome) -> Vec<(&'static str, String)> {
    let totals = &outcome.totals;
    let gb = |counter| format!("{:.2} GB", totals.counted(counter) as f64 / 1e9);
    let reap = |disturbed| {
        let times = outcome.reap_ms(disturbed);
        let [half, most, all] = [50, 99, 100].map(|percent| percentile(&times, percent));
        format!("{half} / {most} / {all} ms of {}", times.len())
    };
    let (segments, slots) = outcome.mean_fill();
    let mut facts = vec![
        ("longest wait of a survivor", outcome.worst.as_ref().map_or_else(String::new, |(_, what)| what.clone())),
        ("blocks read and verified", format!("{} ({})", totals.counted(CHECKED), gb(BYTES_READ))),
        ("written", gb(BYTES_WRITTEN)),
        ("wrong bytes, blocks of before a reset", totals.counted(WRONG).to_string()),
        ("pools checked from end to end", outcome.checks.to_string()),
        ("killed while running", outcome.kills.to_string()),
        ("killed while stopped", outcome.kills_stopped.to_string()),
        ("died at a named point", outcome.kills_at_points.to_string()),
        ("all killed at once", format!("{} times", outcome.massacres)),
        ("left by themselves", outcome.departures.to_string()),
        ("stopped", format!("{} (and at a named point {})", outcome.stops, outcome.stops_at_points)),
        ("stopped for", format!("{:.1} s in sum", outcome.stopped_ms as f64 / 1e3)),
        ("reaped after, p50 / p99 / worst", reap(false)),
        ("the same, a sibling stopped or follower", reap(true)),
        ("the host stood still", format!("{} times, at most {:.0} ms", outcome.stalls.len(), ms(stalled_max(outcome)))),
        ("pool full, mean", format!("{segments:.0} % of its segments taken, {slots:.0} % of its slots sealed")),
    ];
    facts.extend(totals.pool_counters().map(|(name, count)| (name, count.to_string())));
    facts
}

/// The same for programs.
pub fn json(outcome: &Outcome, seed: u64, elapsed: Duration) -> Value {
    let totals = &outcome.totals;
    let operation = |(number, name): (usize, &&str)| {
        let (usual, longest) = (totals.nearly_longest(number), totals.longest(number));
        json!({
            "name": name,
            "count": totals.times(number),
            "per_s": totals.times(number) as f64 / elapsed.as_secs_f64(),
            "p999_ms": ms(usual.own),
            "p999_wall_ms": ms(usual.wall),
            "worst_ms": ms(longest.own),
            "worst_wall_ms": ms(longest.wall),
        })
    };
    let reap = |disturbed| {
        let times = outcome.reap_ms(disturbed);
        json!({ "count": times.len(), "p50_ms": percentile(&times, 50), "p99_ms": percentile(&times, 99),
                "worst_ms": percentile(&times, 100) })
    };
    let (segments, slots) = outcome.mean_fill();
    let counters: serde_json::Map<String, Value> =
        totals.pool_counters().map(|(name, count)| (name.to_owned(), json!(count))).collect();
    json!({
        "seed": seed,
        "seconds": elapsed.as_secs_f64(),
        "machine": machine(),
        "pools": outcome.rounds,
        "checks": outcome.checks,
        "operations": OPERATIONS.iter().enumerate().map(operation).collect::<Vec<_>>(),
        "blocks_verified": totals.counted(CHECKED),
        "bytes_read": totals.counted(BYTES_READ),
        "bytes_written": totals.counted(BYTES_WRITTEN),
        "wrong_blocks": totals.counted(WRONG),
        "kills": { "running": outcome.kills, "stopped": outcome.kills_stopped,
                   "at_points": outcome.kills_at_points, "all_at_once": outcome.massacres },
        "departures": outcome.departures,
        "stops": { "outside": outcome.stops, "at_points": outcome.stops_at_points, "ms": outcome.stopped_ms },
        "reaped": reap(false),
        "reaped_with_somebody_stopped": reap(true),
        "host_stalls": { "count": outcome.stalls.len(), "longest_ms": ms(stalled_max(outcome)) },
        "full_percent": { "segments": segments, "slots": slots },
        "pool": counters,
        "missed_aims": missed_aims(outcome),
        "failures": outcome.failures,
    })
}
