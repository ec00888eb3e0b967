//! Named points in every step that publishes or unpublishes something; tests kill or stop a process there.
//!
//! Unarmed, a point is one relaxed load.

use crate::error::{Error, Result};
use crate::sync::{AtomicUsize, Relaxed};

/// Names of all points, in the order of the steps.
pub const NAMES: &[&str] = &[
    "create.directory_made",
    "create.file_made",
    "create.control_written",
    "create.linked",
    "process.locked",
    "process.reclaimed",
    "process.filled",
    "process.registered",
    "process.inherited",
    "process.device_writes",
    "process.joined",
    "namespace.claimed",
    "namespace.filled",
    "namespace.ready",
    "namespace.weighed",
    "grow.locked",
    "grow.filled",
    "grow.creating",
    "grow.claimed",
    "grow.segment_created",
    "grow.segment_claimed",
    "grow.allocated",
    "grow.headers_cleared",
    "grow.ranged",
    "grow.hinted",
    "grow.ready",
    "grow.announced",
    "drop.unhinted",
    "drop.unranged",
    "drop.headers_cleared",
    "drop.segment_removed",
    "drop.freed",
    "reserve.unhinted",
    "reserve.claimed",
    "reserve.recycled",
    "reserve.keyed",
    "part.copied",
    "part.written",
    "publish.stamped",
    "publish.locked",
    "publish.odd",
    "publish.chained",
    "publish.linked",
    "publish.sealed",
    "publish.even",
    "publish.unlocked",
    "replace.claimed",
    "replace.superseded",
    "chain.linked",
    "chain.extended",
    "lease.marked",
    "lease.released",
    "touch.stamped",
    "evict.listed",
    "evict.locked",
    "evict.claimed",
    "evict.restored",
    "evict.unlinked",
    "evict.freeing",
    "doom.marked",
    "doom.freeing",
    "free.unstamped",
    "free.freed",
    "free.hinted",
    "takeover.locked",
    "takeover.odd",
    "takeover.even",
    "reap.claimed",
    "reap.locks_broken",
    "reap.released",
    "reap.locked",
    "reap.unlinked",
    "reap.freeing",
    "reap.restored",
    "reap.outdated",
    "reap.member_freeing",
    "reap.extents_settled",
    "reap.scanned",
    "reap.freed",
    "quarantine.given_up",
    "quarantine.waiting",
    "quarantine.ended",
    "quarantine.settled",
    "retire.marked",
    "retire.claimed",
    "retire.taken",
    "retire.copied",
    "retire.moving",
    "retire.linked",
    "retire.sealed",
    "retire.moved",
    "retire.dropping",
    "retire.reopened",
    "orphans.expected",
    "orphans.dropped",
    "orphans.settled",
    "reset.bumped",
    "reset.aged",
    "rebuild.wanted",
    "rebuild.locked",
    "rebuild.odd",
    "rebuild.cleared",
    "rebuild.relinked",
    "rebuild.doomed",
    "rebuild.linked",
    "rebuild.renamed",
    "rebuild.done",
    "rebuild.even",
    "ssd.file_made",
    "ssd.linked",
    "ssd.led",
    "ssd.cleared",
    "ssd.opened",
    "ssd.serving",
    "ssd.unserved",
    "ssd.forgotten",
    "ssd.noted",
    "ssd.hinted",
    "ssd.claimed",
    "ssd.asked",
    "ssd.given_back",
    "ssd.taken",
    "ssd.reading",
    "ssd.loaded",
    "ssd.answered",
    "ssd.leased",
    "traffic.file_made",
    "traffic.linked",
    "traffic.sampling",
    "traffic.emptied",
    "gone.file_made",
    "gone.linked",
    "remove.set_aside",
    "remove.file_removed",
];

static ARMED: AtomicUsize = AtomicUsize::new(0);

const STOP: usize = 1 << 16;

/// All names.
pub fn names() -> &'static [&'static str] {
    NAMES
}

/// Arm `name`: this process is killed (`"kill"`) or stopped (`"stop"`) when it gets there.
pub fn arm(name: &str, action: &str) -> Result<()> {
    let index = NAMES
        .iter()
        .position(|known| *known == name)
        .ok_or_else(|| Error::invalid(format!("there is no crash point '{name}': see crash_points()")))?;
    let stop = match action {
        "kill" => 0,
        "stop" => STOP,
        other => return Err(Error::invalid(format!("a crash point can 'kill' or 'stop', not '{other}'"))),
    };
    ARMED.store((index + 1) | stop, Relaxed);
    Ok(())
}

/// Arm what the environment asks for; called when a pool is opened.
pub(crate) fn arm_from_environment() -> Result<()> {
    match std::env::var("PEGAFLOW_CRASH_POINT") {
        Ok(value) => {
            let (name, action) = value.split_once(':').unwrap_or((&value, "kill"));
            arm(name, action)
        }
        Err(_) => Ok(()),
    }
}

/// Pass the point `name`.
#[inline]
pub(crate) fn pass(name: &str) {
    #[cfg(loom)]
    crate::model_words::pass(name);
    let armed = ARMED.load(Relaxed);
    if armed != 0 {
        strike(armed, name);
    }
}

#[cold]
fn strike(armed: usize, name: &str) {
    if NAMES.get((armed & (STOP - 1)) - 1) != Some(&name) {
        return;
    }
    let signal = if armed & STOP == 0 { nix::sys::signal::SIGKILL } else { nix::sys::signal::SIGSTOP };
    ARMED.store(0, Relaxed);
    if nix::sys::signal::raise(signal).is_err() {
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_points_are_refused() {
        assert!(arm("no.such.point", "kill").is_err());
        assert!(arm("grow.ready", "explode").is_err());
    }
}
