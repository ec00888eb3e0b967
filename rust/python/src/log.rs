//! The engine's log lines, on standard error like vLLM's.
//!
//! Not through Python's logging: lines come from threads that must never wait for the interpreter's lock, and may
//! come while it shuts down. `PEGAFLOW_LOG` (off, error, warn, info, debug) says how much; info by default, which is a
//! line when something that takes seconds is done, or when a dead process was cleaned up after.

use std::io::Write;

use ::log::{LevelFilter, Log, Metadata, Record};

struct Stderr;

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= ::log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            // Where standard error is closed there is nobody to tell.
            let _nobody_listens = writeln!(std::io::stderr(), "{} {}", record.level(), record.args());
        }
    }

    fn flush(&self) {}
}

/// Start logging; once per process.
pub(crate) fn start() {
    let wanted = std::env::var("PEGAFLOW_LOG").ok().and_then(|level| level.parse().ok());
    if ::log::set_logger(&Stderr).is_ok() {
        ::log::set_max_level(wanted.unwrap_or(LevelFilter::Info));
    }
}
