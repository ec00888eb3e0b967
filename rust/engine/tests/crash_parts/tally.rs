//! What the kills cost, point by point.

use std::time::Duration;

use pegaflow_engine::crash_point;

use crate::kill::stopwatch::Took;

/// Counts and worst times of one point.
#[derive(Clone, Copy, Default)]
pub struct Row {
    pub kills: u64,
    pub stops: u64,
    pub wait: Took,
    pub reap: Took,
}

/// All points, in the order of their names.
#[derive(Clone)]
pub struct Tally {
    rows: Vec<Row>,
    pub pairs: u64,
    /// Tries in which a process ended without having come to its point.
    pub missed: u64,
    /// Pairs that did not come about.
    pub unmet: Vec<String>,
}

impl Tally {
    pub fn new() -> Self {
        Self { rows: vec![Row::default(); crash_point::names().len()], pairs: 0, missed: 0, unmet: Vec::new() }
    }

    pub fn row(&mut self, point: &str) -> &mut Row {
        let index = crash_point::names().iter().position(|name| *name == point).unwrap();
        &mut self.rows[index]
    }

    pub fn took(&mut self, points: &[&str], wait: Took, reap: Took) {
        for point in points {
            let row = self.row(point);
            row.wait = row.wait.max(wait);
            row.reap = row.reap.max(reap);
        }
    }

    pub fn add(&mut self, other: &Self) {
        for (row, more) in self.rows.iter_mut().zip(&other.rows) {
            row.kills += more.kills;
            row.stops += more.stops;
            row.wait = row.wait.max(more.wait);
            row.reap = row.reap.max(more.reap);
        }
        self.pairs += other.pairs;
        self.missed += other.missed;
        self.unmet.extend(other.unmet.iter().cloned());
    }

    pub fn rows(&self) -> impl Iterator<Item = (&'static str, &Row)> {
        crash_point::names().iter().copied().zip(&self.rows)
    }

    pub fn total(&self) -> Row {
        let mut total = Row::default();
        for row in &self.rows {
            total.kills += row.kills;
            total.stops += row.stops;
            total.wait = total.wait.max(row.wait);
            total.reap = total.reap.max(row.reap);
        }
        total
    }

    pub fn print(&self) {
        let line = |name: &str, row: &Row| {
            println!(
                "{name:<26}{:>8}{:>8}{:>12}{:>12}{:>12}{:>12}",
                row.kills,
                row.stops,
                ms(row.wait.own),
                ms(row.wait.wall),
                ms(row.reap.own),
                ms(row.reap.wall)
            );
        };
        println!("worst times in ms, less the time for which there was no CPU, and by the clock on the wall");
        println!(
            "{:<26}{:>8}{:>8}{:>12}{:>12}{:>12}{:>12}",
            "point", "kills", "stops", "survivor", "(wall)", "reap", "(wall)"
        );
        self.rows().for_each(|(name, row)| line(name, row));
        line("all", &self.total());
    }

    pub fn to_json(&self, kills_per_point: u64, elapsed: Duration) -> serde_json::Value {
        let points: Vec<serde_json::Value> = self
            .rows()
            .map(|(name, row)| {
                serde_json::json!({
                    "name": name, "kills": row.kills, "stops": row.stops,
                    "survivor_wait_ms_max": to_ms(row.wait.own), "survivor_wait_wall_ms_max": to_ms(row.wait.wall),
                    "reap_ms_max": to_ms(row.reap.own), "reap_wall_ms_max": to_ms(row.reap.wall),
                })
            })
            .collect();
        serde_json::json!({
            "kills_per_point": kills_per_point, "kills": self.total().kills, "pairs": self.pairs,
            "stops": self.total().stops, "missed": self.missed, "unmet": self.unmet,
            "elapsed_s": elapsed.as_secs_f64(), "points": points,
        })
    }
}

fn to_ms(time: Duration) -> f64 {
    time.as_micros() as f64 / 1000.0
}

fn ms(time: Duration) -> String {
    format!("{:.2}", to_ms(time))
}
