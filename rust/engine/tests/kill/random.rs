//! Random numbers that a printed seed brings back.

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number from 0 to `count - 1`.
    pub fn below(&mut self, count: u64) -> u64 {
        self.next() % count
    }

    /// True in `percent` of 100 cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// The finalizer of SplitMix64: spreads every bit over all.
pub fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

/// The seed of a run: from `PEGAFLOW_TEST_SEED` to repeat one, else from the clock. Printed, so that a failure tells.
pub fn seed(test: &str) -> u64 {
    let seed = match std::env::var("PEGAFLOW_TEST_SEED") {
        Ok(text) => text.parse().expect("PEGAFLOW_TEST_SEED is a number"),
        Err(_) => {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            mix(now.as_nanos() as u64)
        }
    };
    println!("{test}: PEGAFLOW_TEST_SEED={seed}");
    seed
}
