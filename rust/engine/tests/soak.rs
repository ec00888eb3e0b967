//! Soak: several processes use pools of random shapes; they are killed, stopped and replaced at random. Every byte that
//! is read is verified, and every pool is checked whenever nobody uses it.
//!
//! Some seconds by default. `make soak MINUTES=n SEED=s` builds it for speed, and runs it for as long as one likes;
//! then missed aims count too. `PEGAFLOW_SOAK_SECONDS`, `PEGAFLOW_TEST_SEED` and `PEGAFLOW_SOAK_JSON` are behind it. A
//! failure names the seed of its round, which `PEGAFLOW_SOAK_ROUND` repeats.
#![allow(missing_docs)]

mod common;
mod kill;
mod soak_parts;

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use kill::random::{Random, seed};
use kill::report::{BYTES_READ, Report, WRONG};
use soak_parts::outcome::Outcome;
use soak_parts::round::Round;
use soak_parts::table::{json, line, missed_aims, table};

const SECONDS: u64 = 9;
const LEG_SECONDS: u64 = 3;
/// Of a long run: the pool is used for longer, and goes on after it was checked.
const LONG_LEG_SECONDS: u64 = 6;
const LONG_LEGS: u64 = 2;
/// Then a run has come to what it is for.
const LATEST: Duration = Duration::from_secs(300);
/// A terminal is told every second, a file every so often.
const TELL_PAUSE: Duration = Duration::from_secs(30);

/// Tells how it goes.
struct Teller {
    started: Instant,
    told: Instant,
    terminal: bool,
}

impl Teller {
    fn tell(&mut self, outcome: &Outcome, running: &Report) {
        if self.terminal || self.told.elapsed() >= TELL_PAUSE {
            self.told = Instant::now();
            let (start, end) = if self.terminal { ("\r\x1b[K", "") } else { ("", "\n") };
            eprint!("{start}{}{end}", line(outcome, running, self.started.elapsed()));
            std::io::stderr().flush().unwrap();
        }
    }
}

/// A slow host has not got so far in some seconds.
fn says_something(outcome: &Outcome) -> bool {
    outcome.totals.counted(BYTES_READ) > 0 && outcome.all_kills() > 0 && outcome.stops > 0
}

#[test]
fn kills_and_stops_for_a_long_time_cost_no_byte_and_leave_nothing_behind() {
    let seed = seed("soak");
    let wanted = std::env::var("PEGAFLOW_SOAK_SECONDS").ok().map(|text| text.parse::<f64>().unwrap());
    let length = wanted.map_or(Duration::from_secs(SECONDS), Duration::from_secs_f64);
    let (legs, leg_seconds) = if wanted.is_some() { (LONG_LEGS, LONG_LEG_SECONDS) } else { (1, LEG_SECONDS) };
    let only_round = std::env::var("PEGAFLOW_SOAK_ROUND").ok().map(|text| text.parse().unwrap());
    let mut random = Random::new(seed);
    let mut outcome = Outcome::default();
    let started = Instant::now();
    let mut teller = Teller { started, told: started, terminal: std::io::stderr().is_terminal() };
    while (started.elapsed() < length || !says_something(&outcome)) && outcome.failures.is_empty() {
        assert!(started.elapsed() < length + LATEST, "nobody reads, dies and stops");
        let round = Round::new(only_round.unwrap_or_else(|| random.next()), &mut outcome);
        round.run(legs, Duration::from_secs(leg_seconds), |outcome, running| teller.tell(outcome, running));
    }
    let elapsed = started.elapsed();
    println!("{}", table(&outcome, seed, elapsed));
    if let Ok(file) = std::env::var("PEGAFLOW_SOAK_JSON") {
        let text = serde_json::to_string_pretty(&json(&outcome, seed, elapsed)).unwrap();
        std::fs::write(&file, text + "\n").unwrap();
        println!("written to {file}");
    }
    assert!(outcome.failures.is_empty(), "the soak failed, and its seed is {seed}");
    assert_eq!(outcome.totals.counted(WRONG), 0);
    assert!(says_something(&outcome));
    if wanted.is_some() {
        assert_eq!(missed_aims(&outcome), [""; 0], "aims that a long run has to reach");
    }
}
