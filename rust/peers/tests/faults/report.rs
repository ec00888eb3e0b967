//! What became of all cases of a fault: a row of a table, and of `PEGAFLOW_PEER_JSON`.

use std::sync::Mutex;
use std::time::Duration;

/// Set in processes that a test has started to do its work.
pub(crate) const INSIDE: &str = "PEGAFLOW_PEER_INSIDE";

/// How often each fault is tried: 3 times, or as `PEGAFLOW_PEER_CASES` says.
pub(crate) fn cases() -> u64 {
    std::env::var("PEGAFLOW_PEER_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(3)
}

#[derive(Default)]
struct Counts {
    cases: u64,
    whole: u64,
    part: u64,
    none: u64,
    slowest: Duration,
}

/// One fault. Wrong bytes, waits without end and slots that do not come back fail the test, so no row has any.
pub(crate) struct Tally {
    fault: &'static str,
    counts: Mutex<Counts>,
}

static ROWS: Mutex<Vec<String>> = Mutex::new(Vec::new());

impl Tally {
    pub(crate) fn new(fault: &'static str) -> Self {
        Self { fault, counts: Mutex::default() }
    }

    /// A case: how many blocks came of how many, and how long the request went on after the fault.
    pub(crate) fn add(&self, found: usize, wanted: u64, took: Duration) {
        let mut counts = self.counts.lock().unwrap();
        counts.cases += 1;
        match found as u64 {
            0 => counts.none += 1,
            found if found == wanted => counts.whole += 1,
            _ => counts.part += 1,
        }
        counts.slowest = counts.slowest.max(took);
    }

    /// All that is checked has held.
    pub(crate) fn end(self) {
        let Counts { cases, whole, part, none, slowest } = self.counts.into_inner().unwrap();
        let (fault, slowest_ms) = (self.fault, slowest.as_millis());
        println!("| {fault} | {cases} | {whole} | {part} | {none} | {:.3} s |", slowest.as_secs_f64());
        keep(format!(
            "{{\"fault\": \"{fault}\", \"cases\": {cases}, \"whole\": {whole}, \"part\": {part}, \"none\": {none}, \
             \"wrong_bytes\": 0, \"hangs\": 0, \"slots_left\": 0, \"slowest_ms\": {slowest_ms}}}"
        ));
    }
}

/// Write a row down; in a process of another one's test, for that one.
pub(crate) fn keep(row: String) {
    if std::env::var_os(INSIDE).is_some() {
        return println!("{row}");
    }
    let mut rows = ROWS.lock().unwrap();
    rows.push(row);
    if let Some(path) = std::env::var_os("PEGAFLOW_PEER_JSON") {
        std::fs::write(path, format!("[\n  {}\n]\n", rows.join(",\n  "))).unwrap();
    }
}

/// Have the numbers of all cases taken by so many threads, each with a setting of its own.
pub(crate) fn in_lanes(lanes: u64, lane: impl Fn(&mut dyn Iterator<Item = u64>) + Sync) {
    let next = Mutex::new(0..cases());
    std::thread::scope(|scope| {
        for _ in 0..lanes.min(cases()) {
            scope.spawn(|| lane(&mut std::iter::from_fn(|| next.lock().unwrap().next())));
        }
    });
}
