//! Bytes for the target `tier` of `rust/engine/tests/hostile`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pegaflow_fuzz::{LazyTarget, make, run};

static TARGET: LazyTarget = LazyTarget::new(|| make("tier"));

fuzz_target!(|data: &[u8]| run(&TARGET, data));
