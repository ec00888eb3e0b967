//! The background thread of an attached pool: grows namespaces, reaps the dead, ends quarantines, rebuilds the index.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::error::{Error, ErrorKind, Result};
use crate::limits::{GROW_RETRY_PAUSE, MAINTENANCE_INTERVAL};
use crate::shm::clock::unix_seconds;
use crate::shm::core::Core;
use crate::shm::grow::Grown;
use crate::shm::lock::begin_operation;
use crate::shm::namespace::Namespace;
use crate::sync::{Relaxed, SeqCst};

/// Start the thread.
pub(crate) fn start(core: &Arc<Core>) -> Result<JoinHandle<()>> {
    let core = Arc::clone(core);
    std::thread::Builder::new().name("pega-pool".into()).spawn(move || run(&core)).map_err(|error| {
        Error::new(ErrorKind::Busy, format!("cannot start the pool's background thread ({error}): check ulimit -u"))
    })
}

fn run(core: &Core) {
    let mut grow = Vec::new();
    loop {
        if !core.is_member() {
            log::error!(
                "pegaflow: pool {} took this process for dead: it does without the pool from now on",
                core.name
            );
            return;
        }
        core.look_around();
        for ns in grow.drain(..) {
            core.serve_growth(Namespace(ns));
        }
        let requests = core.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let idle =
            |requests: &mut crate::shm::core::Requests| !requests.stop && !requests.awake && requests.grow.is_empty();
        let (mut requests, _) =
            core.bell.wait_timeout_while(requests, MAINTENANCE_INTERVAL, idle).unwrap_or_else(PoisonError::into_inner);
        if requests.stop {
            return;
        }
        requests.awake = false;
        grow.extend(std::mem::take(&mut requests.grow));
    }
}

impl Core {
    /// One round of everything that does not need to be asked for.
    pub(crate) fn look_around(&self) {
        begin_operation();
        let header = self.control.header();
        header.last_used_unix_s.store(unix_seconds(), Relaxed);
        if self.reap() > 0 {
            log::info!("pegaflow: cleaned up after dead processes of pool {}", self.name);
        }
        self.end_quarantines();
        self.drop_orphans();
        if header.rebuild_wanted.load(SeqCst) != 0
            && let Err(error) = self.rebuild_index()
        {
            log::warn!("pegaflow: {error}");
        }
        self.prune_segments();
    }

    /// Add an extent; if the pool is at its capacity, take one that another namespace does not need.
    fn serve_growth(&self, ns: Namespace) {
        begin_operation();
        match self.grow_quietly(ns) {
            Some(Grown::Yes) => *self.lock_growth_seen() = None,
            Some(Grown::InProgress) => self.watch_growth_of_others(),
            Some(Grown::AtCapacity) => {
                let starving = self.extents(ns).is_empty();
                if self.retire_empty(ns) > 0 || self.take_extent(ns, starving) {
                    self.grow_quietly(ns);
                }
            }
            None => self.pause_growth(),
        }
    }

    /// Another process is growing the namespace. If it takes too long (is it stopped?), do with what there is.
    fn watch_growth_of_others(&self) {
        let since = *self.lock_growth_seen().get_or_insert_with(Instant::now);
        if since.elapsed() > GROW_RETRY_PAUSE {
            *self.lock_growth_seen() = None;
            self.pause_growth();
        }
    }

    fn lock_growth_seen(&self) -> MutexGuard<'_, Option<Instant>> {
        self.growth_seen_since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stop the background thread at its next look.
    pub(crate) fn ask_to_stop(&self) {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).stop = true;
        self.bell.notify_all();
    }
}
