//! Damaged bytes in the control file, before and while a process works with it: an error or correct service, and never
//! a crash, a hang or an access outside. `PEGAFLOW_TEST_SEED` repeats a run, `PEGAFLOW_TEST_CASES` makes it longer.
#![allow(missing_docs)]

mod common;
mod kill;

use common::ShmDir;
use kill::child::Worker;
use kill::random::seed;

const CASES: u64 = 50;

/// Two workers, each with files of its own, damage them in `CASES` ways, and say which before they begin.
fn survive(test: &str, how: &str) {
    let seed = seed(test);
    let dirs = [ShmDir::new(test), ShmDir::new(test)];
    let start = |(index, dir): (usize, &ShmDir)| {
        let seed = (seed ^ index as u64).to_string();
        let cases = std::env::var("PEGAFLOW_TEST_CASES").unwrap_or(CASES.to_string());
        Worker::start("damage", &dir.0, &[how, &seed, &cases])
    };
    for mut worker in dirs.iter().enumerate().map(start).collect::<Vec<_>>() {
        let mut last = String::from("before the first case");
        loop {
            let line = worker.line_in_time(&last);
            match line.as_str() {
                "done" => break,
                "" => panic!("the worker died at {last}: {:?}", worker.end()),
                _ => last = line,
            }
        }
        worker.finish();
    }
}

#[test]
fn a_pool_with_damaged_words_is_refused_or_served() {
    survive("damaged", "before");
}

#[test]
fn words_damaged_under_the_hands_of_a_process_do_it_no_harm() {
    survive("damaged-live", "while");
}
