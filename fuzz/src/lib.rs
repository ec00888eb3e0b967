//! What the fuzz targets share: the entry points of the engine's tests, and a directory for their files.

#[path = "../../rust/engine/tests/hostile/mod.rs"]
mod hostile;

use std::path::Path;
use std::sync::{LazyLock, Mutex};

use hostile::Target;

/// A target that is made when its first input comes.
pub type LazyTarget = LazyLock<Mutex<Target>>;

/// Make target `name`, with files below `PEGAFLOW_FUZZ_DIR`.
pub fn make(name: &str) -> Mutex<Target> {
    let dir = std::env::var("PEGAFLOW_FUZZ_DIR").expect("PEGAFLOW_FUZZ_DIR names an empty directory of a tmpfs");
    Mutex::new(Target::new(name, Path::new(&dir)))
}

/// Give it one input.
pub fn run(target: &LazyTarget, data: &[u8]) {
    target.lock().expect("a failure ends the process").run(data);
}
