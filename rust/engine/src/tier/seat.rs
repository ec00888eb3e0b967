//! What one process has to do with the tier of its pool: the mapped file, and the thread that serves if it may.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::leader::{Opener, run};
use super::options::TierOptions;
use super::segment::Segment;
use super::slots::SlotTarget;
use crate::error::{Error, ErrorKind, Result};
use crate::limits::SSD_STOP_WAIT_MAX;
use crate::shm::pool::Pool;
use crate::ssd::Store;

#[derive(Default)]
struct Signal {
    stop: bool,
    awake: bool,
}

/// The place of the tier in a [`Core`].
#[derive(Default)]
pub(crate) struct TierSeat {
    pub(crate) segment: OnceLock<Arc<Segment>>,
    /// Why this process cannot lead.
    pub(crate) problem: Mutex<Option<String>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    signal: Mutex<Signal>,
    bell: Condvar,
}

impl TierSeat {
    fn signal(&self) -> MutexGuard<'_, Signal> {
        self.signal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Have the thread of this process, if it has one, look around now.
    pub(crate) fn wake(&self) {
        self.signal().awake = true;
        self.bell.notify_all();
    }

    /// Whether the thread may go on.
    pub(crate) fn goes_on(&self) -> bool {
        !self.signal().stop
    }

    /// Wait until somebody of this process wants something, or for so long.
    pub(crate) fn pause(&self, time: Duration) {
        let idle = |signal: &mut Signal| !signal.stop && !signal.awake;
        let (mut signal, _) =
            self.bell.wait_timeout_while(self.signal(), time, idle).unwrap_or_else(PoisonError::into_inner);
        signal.awake = false;
    }

    /// Remember why this process cannot lead, and say it unless that was said before.
    pub(crate) fn complain(&self, problem: &str) {
        let mut known = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        if known.as_deref() != Some(problem) {
            log::warn!("pegaflow: this process does without the SSD tier for now: {problem}");
            *known = Some(problem.to_owned());
        }
    }

    /// Nothing is in the way any more.
    pub(crate) fn clear_problem(&self) {
        *self.problem.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// A thread that was stopped may have a successor.
    #[cfg(test)]
    pub(crate) fn allow_again(&self) {
        *self.signal() = Signal::default();
    }

    /// End the thread. A disk that hangs is not waited for: the thread ends when it answers, or with the process.
    pub(crate) fn stop(&self, name: &str) {
        self.signal().stop = true;
        self.bell.notify_all();
        let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        let started = Instant::now();
        while !thread.is_finished() {
            if started.elapsed() > SSD_STOP_WAIT_MAX {
                log::warn!("pegaflow: the disks of pool {name} do not answer: it is left without waiting for them");
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if thread.join().is_err() {
            log::error!("pegaflow: the SSD thread of pool {name} had panicked");
        }
    }
}

impl Pool {
    /// Keep blocks of this pool in files: from now on a thread of this process leads its SSD tier when nobody else
    /// does. Only the first call in a process counts. The thread opens the files; [`Pool::ssd`] tells how that went.
    pub fn serve_ssd(&self, options: TierOptions) -> Result<()> {
        let mut options = options;
        options.store.name = self.name().to_owned();
        let store = options.store.clone();
        self.serve_ssd_from(options, Box::new(move || Store::<SlotTarget>::open(store.clone())))
    }

    /// As [`Self::serve_ssd`], with another way to open the files.
    pub(crate) fn serve_ssd_from(&self, options: TierOptions, open: Opener) -> Result<()> {
        self.core().check_usable()?;
        let capacity_bytes = options.check()?;
        let core = Arc::clone(self.shared_core());
        let mut thread = core.tier.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_some() {
            return Ok(());
        }
        let segment = match core.tier_segment() {
            Some(segment) => Arc::clone(segment),
            None => {
                let segment = Arc::new(Segment::open_or_create(&core.place, capacity_bytes)?);
                Arc::clone(core.tier.segment.get_or_init(|| segment))
            }
        };
        let owned = Arc::clone(&core);
        let started =
            std::thread::Builder::new().name("pega-ssd".into()).spawn(move || run(&owned, &segment, &options, &open));
        *thread = Some(started.map_err(|error| {
            Error::new(ErrorKind::Busy, format!("cannot start the pool's SSD thread ({error}): check ulimit -u"))
        })?);
        Ok(())
    }
}
