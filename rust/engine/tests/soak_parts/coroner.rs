//! How long the dead stay in the process table: a thread that looks at the pool from outside, attached to nothing.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pegaflow_engine::admin;
use serde_json::Value;

use crate::kill::stopwatch::Stopwatch;

const PAUSE: Duration = Duration::from_millis(10);
const SAMPLE_PAUSE: Duration = Duration::from_millis(500);
/// A pause that takes so much longer, though there was a CPU, says that the whole host stood still.
const STALL_MIN: Duration = Duration::from_millis(50);

/// One death.
struct Death {
    pid: i64,
    at: Instant,
    /// A sibling was stopped for some of the time until its row was free, a follower was alive or the host stood still.
    disturbed: bool,
    /// The dead one has been seen in the process table: not all live long enough to get there.
    seen: bool,
}

/// From the death of a process until everything that it held was free again.
#[derive(Clone, Copy, Debug)]
pub struct Reaped {
    pub after: Duration,
    pub disturbed: bool,
}

/// How full the pool was at one moment, in percent.
#[derive(Clone, Copy, Debug)]
pub struct Fill {
    /// Of its segments, those that are taken.
    pub segments: f64,
    /// Of its slots, those that hold a block.
    pub slots: f64,
}

#[derive(Default)]
struct Records {
    deaths: Vec<Death>,
    reaped: Vec<Reaped>,
    fills: Vec<Fill>,
    followers: bool,
    stopped: usize,
    stalls: Vec<Duration>,
    end: bool,
}

pub struct Coroner {
    records: Arc<Mutex<Records>>,
    thread: Option<JoinHandle<()>>,
}

impl Coroner {
    /// Watch the pool whose files are, or will be, in `path`. With `followers`, some of the dead have living ones.
    pub fn start(path: PathBuf, followers: bool) -> Self {
        let records = Arc::new(Mutex::new(Records { followers, ..Records::default() }));
        let shared = Arc::clone(&records);
        let thread = std::thread::spawn(move || watch(&path, &shared));
        Self { records, thread: Some(thread) }
    }

    /// A process was killed just now.
    pub fn died(&self, pid: i32) {
        let mut records = self.records.lock().unwrap();
        let disturbed = records.followers || records.stopped > 0;
        records.deaths.push(Death { pid: i64::from(pid), at: Instant::now(), disturbed, seen: false });
    }

    /// The first process is started after all have died: only now is there somebody to reap.
    pub fn revived(&self) {
        self.records.lock().unwrap().deaths.iter_mut().for_each(|death| death.at = Instant::now());
    }

    /// So many processes are stopped now.
    pub fn stopped(&self, count: usize) {
        let mut records = self.records.lock().unwrap();
        records.stopped = count;
        if count > 0 {
            records.deaths.iter_mut().for_each(|death| death.disturbed = true);
        }
    }

    /// What was seen until now, and for how long the host stood still, each time. Who is not reaped yet is forgotten.
    pub fn finish(mut self) -> (Vec<Reaped>, Vec<Fill>, Vec<Duration>) {
        self.records.lock().unwrap().end = true;
        self.thread.take().unwrap().join().unwrap();
        let mut records = self.records.lock().unwrap();
        let (reaped, fills) = (std::mem::take(&mut records.reaped), std::mem::take(&mut records.fills));
        (reaped, fills, std::mem::take(&mut records.stalls))
    }
}

fn watch(path: &Path, records: &Mutex<Records>) {
    let watch = Stopwatch::of_this_thread();
    let mut sampled = Instant::now();
    loop {
        let ((), paused) = watch.time(|| std::thread::sleep(PAUSE));
        if paused.own > PAUSE + STALL_MIN {
            records.lock().unwrap().stalled(paused.own - PAUSE);
        }
        let wanted = {
            let records = records.lock().unwrap();
            if records.end {
                return;
            }
            !records.deaths.is_empty() || sampled.elapsed() >= SAMPLE_PAUSE
        };
        // While it is being created there is nothing to see.
        let Some(Ok(text)) = wanted.then(|| admin::inspect(path)) else { continue };
        let pool: Value = serde_json::from_str(&text).unwrap();
        let mut records = records.lock().unwrap();
        records.look(&pool);
        if sampled.elapsed() >= SAMPLE_PAUSE {
            sampled = Instant::now();
            records.fills.push(fill_of(&pool));
        }
    }
}

impl Records {
    fn stalled(&mut self, time: Duration) {
        self.stalls.push(time);
        self.deaths.iter_mut().for_each(|death| death.disturbed = true);
    }

    fn look(&mut self, pool: &Value) {
        let rows: Vec<i64> = pool["processes"].as_array().unwrap().iter().filter_map(|p| p["pid"].as_i64()).collect();
        let reaped = &mut self.reaped;
        self.deaths.retain_mut(|death| {
            let there = rows.contains(&death.pid);
            if !there && death.seen {
                reaped.push(Reaped { after: death.at.elapsed(), disturbed: death.disturbed });
            }
            death.seen |= there;
            there
        });
    }
}

fn fill_of(pool: &Value) -> Fill {
    let sum = |name: &str| -> f64 {
        pool["namespaces"].as_array().unwrap().iter().filter_map(|space| space[name].as_f64()).sum()
    };
    let share = |part: f64, all: f64| if all > 0.0 { 100.0 * part / all } else { 0.0 };
    let [ready, creating, free] = ["ready", "creating", "free"].map(|name| pool["segments"][name].as_f64().unwrap());
    Fill {
        segments: share(ready + creating, ready + creating + free),
        slots: share(sum("blocks_sealed"), sum("slots")),
    }
}
