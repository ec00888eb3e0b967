//! Random numbers that a seed repeats; `PEGAFLOW_TEST_SEED` chooses it.

pub(crate) struct Numbers(u64);

impl Numbers {
    /// From the environment, or anew for each run; the seed is in the output of a test that fails.
    pub(crate) fn new() -> Self {
        let chosen = std::env::var("PEGAFLOW_TEST_SEED").ok().and_then(|text| text.parse().ok());
        let seed = chosen.unwrap_or_else(|| {
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64
        });
        println!("PEGAFLOW_TEST_SEED={seed}");
        Self(seed | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end
    }
}
