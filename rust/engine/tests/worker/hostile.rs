//! A process that gives hostile bytes to one target: known inputs first, then random ones.

use std::path::Path;

use crate::hostile::Target;
use crate::random::Random;
use crate::say;

/// Longest random input.
const BYTES_MAX: u64 = 400;

pub fn run(dir: &Path, name: &str, seed: u64, cases: u64) {
    std::panic::set_hook(Box::new(|info| {
        eprintln!("{info}\n{}", std::backtrace::Backtrace::force_capture());
        // Also in a thread of the pool: nothing may panic, wherever it is.
        std::process::abort();
    }));
    let mut target = Target::new(name, dir);
    let known = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hostile/inputs").join(name);
    let mut known: Vec<_> = std::fs::read_dir(known).unwrap().map(|entry| entry.unwrap().path()).collect();
    known.sort_unstable();
    for path in known {
        say(&format!("input {}", path.display()));
        target.run(&std::fs::read(path).unwrap());
    }
    for case in 0..cases {
        say(&format!("case {case} of seed {seed}"));
        target.run(&random_input(seed, case));
    }
    say("done");
}

fn random_input(seed: u64, case: u64) -> Vec<u8> {
    let mut random = Random::new(seed ^ case << 32);
    let length = random.below(BYTES_MAX);
    (0..length).map(|_| random.next() as u8).collect()
}
