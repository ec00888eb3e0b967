//! What a soak has seen: sums over its rounds.

use std::time::Duration;

use super::coroner::{Fill, Reaped};
use crate::kill::report::{OPERATIONS, Report, SERVING};
use crate::kill::stopwatch::Took;

#[derive(Debug, Default)]
pub struct Outcome {
    pub totals: Report,
    pub rounds: u64,
    /// Times that a pool without processes was checked from end to end.
    pub checks: u64,
    /// Processes killed from outside while they ran, and while they were stopped.
    pub kills: u64,
    pub kills_stopped: u64,
    /// Processes that died at a named point.
    pub kills_at_points: u64,
    /// Times that all processes were killed at once.
    pub massacres: u64,
    /// Processes that left by themselves, with all that they held.
    pub departures: u64,
    /// Processes stopped from outside, and at a named point.
    pub stops: u64,
    pub stops_at_points: u64,
    pub stopped_ms: u64,
    pub reaped: Vec<Reaped>,
    pub fills: Vec<Fill>,
    /// For how long the whole host stood still, each time: whatever was measured meanwhile is longer by that.
    pub stalls: Vec<Duration>,
    /// In which round the longest wait of a survivor was, and how long it was.
    pub worst: Option<(Took, String)>,
    pub failures: Vec<String>,
}

/// The operation of an engine that serves which took longest.
pub fn worst(report: &Report) -> (&'static str, Took) {
    let serving = OPERATIONS.iter().enumerate().take(SERVING);
    serving.map(|(number, name)| (*name, report.longest(number))).max_by_key(|(_, took)| took.own).unwrap()
}

impl Outcome {
    /// A round is over: remember where the longest wait was.
    pub fn remember_worst(&mut self, round: &str) {
        let (name, took) = worst(&self.totals);
        if self.worst.as_ref().is_none_or(|(longest, _)| took.own > longest.own) {
            self.worst = Some((took, format!("{name}, {round}")));
        }
    }

    pub fn all_kills(&self) -> u64 {
        self.kills + self.kills_stopped + self.kills_at_points
    }

    /// Reap times in milliseconds, shortest first: with nobody stopped meanwhile, or with somebody.
    pub fn reap_ms(&self, disturbed: bool) -> Vec<u64> {
        let chosen = self.reaped.iter().filter(|reaped| reaped.disturbed == disturbed);
        let mut times: Vec<u64> = chosen.map(|reaped| reaped.after.as_millis() as u64).collect();
        times.sort_unstable();
        times
    }

    /// Mean fill of segments and of slots in percent.
    pub fn mean_fill(&self) -> (f64, f64) {
        let count = self.fills.len().max(1) as f64;
        let mean = |of: fn(&Fill) -> f64| self.fills.iter().map(of).sum::<f64>() / count;
        (mean(|fill| fill.segments), mean(|fill| fill.slots))
    }
}
