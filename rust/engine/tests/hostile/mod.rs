//! Entry points that take any bytes: files of a pool before and while a process uses it, stored values, and everything
//! that is parsed. Each has to end, with an error or correct service. The fuzz targets call them, and so does a test
//! with random bytes of a printed seed. Each has files of its own in a directory of tmpfs.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "a module for tests")]

pub mod bytes;
pub mod control;
pub mod files;
pub mod objects;
pub mod parsers;
pub mod pool;
pub mod tier;

use std::path::Path;

/// Names of the targets.
pub const TARGETS: [&str; 5] = ["control", "pool", "tier", "objects", "parsers"];

/// What one target needs from input to input.
pub enum Target {
    Control(control::Target),
    Pool(pool::Target),
    Tier(tier::Target),
    Objects(objects::Target),
    Parsers,
}

impl Target {
    /// Prepare target `name` with files in the empty directory `dir`.
    pub fn new(name: &str, dir: &Path) -> Self {
        match name {
            "control" => Self::Control(control::Target::new(dir)),
            "pool" => Self::Pool(pool::Target::new(dir)),
            "tier" => Self::Tier(tier::Target::new(dir)),
            "objects" => Self::Objects(objects::Target::new(dir)),
            "parsers" => Self::Parsers,
            other => panic!("no target {other}: there are {TARGETS:?}"),
        }
    }

    /// Take one input.
    pub fn run(&mut self, data: &[u8]) {
        match self {
            Self::Control(target) => target.run(data),
            Self::Pool(target) => target.run(data),
            Self::Tier(target) => target.run(data),
            Self::Objects(target) => target.run(data),
            Self::Parsers => parsers::run(data),
        }
    }
}
