//! Facts of the machine that a result belongs to.

use serde_json::{Value, json};

fn line_of(file: &str, name: &str) -> String {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.map_or_else(String::new, |rest| rest.trim_start_matches([' ', '\t', ':']).trim().to_owned())
}

/// Processor, CPUs, memory, kernel, and what else the machine is at.
pub fn machine() -> Value {
    let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default().trim().to_owned();
    json!({
        "cpu": line_of("/proc/cpuinfo", "model name"),
        "cpus": std::thread::available_parallelism().map_or(0, usize::from),
        "memory": line_of("/proc/meminfo", "MemTotal"),
        "kernel": read("/proc/sys/kernel/osrelease"),
        "load": read("/proc/loadavg"),
        "debug_build": cfg!(debug_assertions),
    })
}
