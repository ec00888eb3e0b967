//! The background threads of an attached pool: one reaps the dead, ends quarantines and rebuilds the index, the other
//! grows namespaces.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::error::{Error, ErrorKind, Result};
use crate::limits::{GROW_RETRY_PAUSE, MAINTENANCE_INTERVAL, REAP_INTERVAL};
use crate::shm::clock::unix_seconds;
use crate::shm::core::{Core, Requests};
use crate::shm::grow::Grown;
use crate::shm::lock::begin_operation;
use crate::shm::namespace::Namespace;
use crate::sync::{Relaxed, SeqCst};

/// Start the threads: one looks around, the other grows namespaces, which may take long and must not keep the dead
/// waiting.
pub(crate) fn start(core: &Arc<Core>) -> Result<Vec<JoinHandle<()>>> {
    let spawn = |name: &str, run: fn(&Core)| {
        let core = Arc::clone(core);
        std::thread::Builder::new().name(name.into()).spawn(move || run(&core))
    };
    let keeper = spawn("pega-pool", keep);
    match (keeper, spawn("pega-grow", grow)) {
        (Ok(keeper), Ok(grower)) => Ok(vec![keeper, grower]),
        (Err(error), _) | (_, Err(error)) => {
            core.ask_to_stop();
            Err(Error::new(
                ErrorKind::Busy,
                format!("cannot start the pool's background threads ({error}): check ulimit -u"),
            ))
        }
    }
}

fn keep(core: &Core) {
    let mut looked_around = None;
    loop {
        if !core.is_member() {
            log::error!(
                "pegaflow: pool {} took this process for dead: it does without the pool from now on",
                core.name
            );
            return;
        }
        let due = |since: Instant| since.elapsed() >= MAINTENANCE_INTERVAL;
        if looked_around.is_none_or(due) {
            core.look_around();
            looked_around = Some(Instant::now());
        } else {
            core.look_for_the_dead();
        }
        let requests = core.lock_requests();
        let idle = |requests: &mut Requests| !requests.stop && !requests.awake;
        let (mut requests, _) =
            core.bell.wait_timeout_while(requests, REAP_INTERVAL, idle).unwrap_or_else(PoisonError::into_inner);
        if requests.stop {
            return;
        }
        if std::mem::take(&mut requests.awake) {
            looked_around = None;
        }
    }
}

fn grow(core: &Core) {
    loop {
        let idle = |requests: &mut Requests| !requests.stop && requests.grow.is_empty();
        let mut requests = core.bell.wait_while(core.lock_requests(), idle).unwrap_or_else(PoisonError::into_inner);
        if requests.stop {
            return;
        }
        let wanted = std::mem::take(&mut requests.grow);
        drop(requests);
        // Who was taken for dead grows nothing any more, and whoever asks is refused.
        for ns in wanted.into_iter().filter(|_| core.is_member()) {
            core.serve_growth(Namespace(ns));
        }
    }
}

impl Core {
    /// One round of everything that does not need to be asked for.
    pub(crate) fn look_around(&self) {
        begin_operation();
        let header = self.control.header();
        header.last_used_unix_s.store(unix_seconds(), Relaxed);
        self.look_for_the_dead();
        self.end_quarantines();
        self.drop_orphans();
        if header.rebuild_wanted.load(SeqCst) != 0
            && let Err(error) = self.rebuild_index()
        {
            log::warn!("pegaflow: {error}");
        }
        self.prune_segments();
    }

    /// What nobody should have to wait for.
    fn look_for_the_dead(&self) {
        begin_operation();
        if self.reap_when_due() > 0 {
            log::info!("pegaflow: cleaned up after dead processes of pool {}", self.name);
            self.drop_orphans();
        }
    }

    /// Add an extent; if the pool is at its capacity, or shared memory at its own, take one that another namespace does
    /// not need.
    fn serve_growth(&self, ns: Namespace) {
        begin_operation();
        match self.grow_quietly(ns) {
            Ok(Grown::Yes) => *self.lock_growth_seen() = None,
            Ok(Grown::InProgress) => self.watch_growth_of_others(),
            Ok(Grown::AtCapacity) => {
                if self.take_from_others(ns) {
                    let _outcome_is_kept = self.grow_quietly(ns);
                }
            }
            Err(kind) => {
                self.pause_growth();
                if kind == ErrorKind::ShmFull {
                    self.grow_by_taking(ns);
                }
            }
        }
    }

    /// Another process is growing the namespace. If it takes too long (is it stopped?), do with what there is.
    fn watch_growth_of_others(&self) {
        let (now, mut seen) = (Instant::now(), self.lock_growth_seen());
        // One that was seen long ago is not this one.
        let known = seen.filter(|(_, last)| now - *last < GROW_RETRY_PAUSE);
        let since = known.map_or(now, |(since, _)| since);
        let takes_long = now - since > GROW_RETRY_PAUSE;
        *seen = (!takes_long).then_some((since, now));
        if takes_long {
            self.pause_growth();
        }
    }

    fn lock_growth_seen(&self) -> MutexGuard<'_, Option<(Instant, Instant)>> {
        self.growth_seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wait until siblings have had a look around. `false` if this process is to stop.
    pub(crate) fn rest(&self) -> bool {
        let requests = self.lock_requests();
        let going_on = |requests: &mut Requests| !requests.stop;
        let rested = self.bell.wait_timeout_while(requests, MAINTENANCE_INTERVAL, going_on);
        begin_operation();
        !rested.unwrap_or_else(PoisonError::into_inner).0.stop
    }

    fn lock_requests(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stop the background threads at their next look.
    pub(crate) fn ask_to_stop(&self) {
        self.lock_requests().stop = true;
        self.bell.notify_all();
    }

    /// Whether the background threads are to end.
    pub(crate) fn is_asked_to_stop(&self) -> bool {
        self.lock_requests().stop
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{OpenOptions, Pool};

    #[test]
    fn growth_pauses_when_one_of_others_takes_long_and_not_when_the_last_one_was_long_ago() {
        let options = OpenOptions { pool_bytes: Some(1 << 20), private: true, ..OpenOptions::default() };
        let pool = Pool::open("p", &options).expect("a private pool");
        let core = pool.core();
        let is_paused = || core.grow_paused_until.lock().expect("no panic").is_some();
        let ago = |pause: Duration| Instant::now().checked_sub(pause).expect("the host runs for longer");
        *core.lock_growth_seen() = Some((ago(3 * GROW_RETRY_PAUSE), ago(2 * GROW_RETRY_PAUSE)));
        core.watch_growth_of_others();
        assert!(!is_paused(), "another growth");
        // However long this thread has no CPU, it was seen just now.
        *core.lock_growth_seen() = Some((ago(3 * GROW_RETRY_PAUSE), Instant::now() + Duration::from_secs(3600)));
        core.watch_growth_of_others();
        assert!(is_paused());
    }
}
