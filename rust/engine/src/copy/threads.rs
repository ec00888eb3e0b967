//! Threads that work through jobs in batches: several threads on one job, several jobs in flight, each completed once.

use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::limits::{COPY_THREADS_DEFAULT_MAX, COPY_THREADS_MAX};

use super::queue::{Batch, CopyDone, JobId, JobQueue, NewJob};

/// A set of copy threads. They sleep while there is nothing to copy. Dropping it finishes what is queued and stops
/// them.
pub struct CopyThreads {
    shared: Arc<Shared>,
    handles: Mutex<Vec<JoinHandle<()>>>,
    count: usize,
    process: u32,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<JobQueue>,
    /// Signalled when there may be a batch to claim, and when the threads are to stop.
    work: Condvar,
    /// Signalled when a job completed.
    done: Condvar,
}

impl CopyThreads {
    /// Start `threads` threads; 0 means the smaller of 4 and the number of CPUs that this process may use.
    pub fn new(threads: usize) -> Result<Self> {
        if threads > COPY_THREADS_MAX {
            return Err(Error::invalid(format!(
                "{threads} copy threads are too many: pass at most {COPY_THREADS_MAX}, or 0 for the default"
            )));
        }
        let count = match threads {
            0 => std::thread::available_parallelism().map_or(1, NonZero::get).min(COPY_THREADS_DEFAULT_MAX),
            given => given,
        };
        let set = Self { shared: Arc::default(), handles: Mutex::default(), count, process: std::process::id() };
        for number in 0..count {
            let shared = Arc::clone(&set.shared);
            let handle = std::thread::Builder::new()
                .name(format!("pega-copy-{number}"))
                .spawn(move || shared.work_until_closed())
                .map_err(|error| Error::busy(format!("a copy thread did not start ({error}): raise the task limit")))?;
            set.handles().push(handle);
        }
        Ok(set)
    }

    /// Number of threads.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Queue a job; its outcome comes from [`Self::poll`] or [`Self::wait`].
    pub(super) fn start(&self, new: NewJob) -> Result<JobId> {
        self.check_process()?;
        let batches = new.items.div_ceil(new.batch_items.max(1));
        let job = self.shared.lock().add(new)?;
        if batches == 0 {
            self.shared.done.notify_all();
        }
        self.shared.announce(batches);
        Ok(job)
    }

    /// Do a job and return its outcome; the calling thread takes its share of the batches.
    pub(super) fn run(&self, new: NewJob) -> Result<CopyDone> {
        self.check_process()?;
        let batches = new.items.div_ceil(new.batch_items.max(1));
        let mut queue = self.shared.lock();
        let job = queue.add_awaited(new)?;
        // One batch less: this thread begins at once.
        self.shared.announce(batches.saturating_sub(1));
        let mut failed = Vec::new();
        while let Some(batch) = queue.claim_from(job) {
            queue = self.shared.run_batch(queue, batch, &mut failed);
        }
        loop {
            if let Some(done) = queue.take_awaited(job) {
                return Ok(done);
            }
            queue = self.shared.done.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Jobs that completed since the last call.
    pub fn poll(&self) -> Result<Vec<CopyDone>> {
        self.check_process()?;
        Ok(self.shared.lock().take_done())
    }

    /// Like [`Self::poll`], but waits up to `timeout` for at least one if any job is in flight.
    pub fn wait(&self, timeout: Duration) -> Result<Vec<CopyDone>> {
        self.check_process()?;
        let queue = self.shared.lock();
        let (mut queue, _) = self
            .shared
            .done
            .wait_timeout_while(queue, timeout, |queue| !queue.worth_polling())
            .unwrap_or_else(PoisonError::into_inner);
        Ok(queue.take_done())
    }

    /// Jobs started and not yet returned by [`Self::poll`] or [`Self::wait`].
    pub fn in_flight(&self) -> Result<usize> {
        self.check_process()?;
        Ok(self.shared.lock().jobs_in_flight())
    }

    /// Finish what is queued, then stop the threads. What is done can still be polled for.
    pub fn close(&self) -> Result<()> {
        self.check_process()?;
        self.shared.lock().close();
        self.shared.work.notify_all();
        let handles = std::mem::take(&mut *self.handles());
        for handle in handles {
            // A thread catches the panics of its work, so that there is nothing to report here.
            let _ = handle.join();
        }
        Ok(())
    }

    fn handles(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Threads do not survive `fork()`: in a child nobody would ever finish a job, and locks may be held for ever.
    fn check_process(&self) -> Result<()> {
        if std::process::id() == self.process {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Forked, "this copier was made before fork(): make a new one in the child"))
    }
}

impl Drop for CopyThreads {
    fn drop(&mut self) {
        if self.close().is_err() {
            // In a forked child: there are no threads to join or detach, their handles are not to be touched.
            let handles = self.handles.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(handles).into_iter().for_each(std::mem::forget);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, JobQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wake as many threads as there is work for.
    fn announce(&self, batches: usize) {
        match batches {
            0 => {}
            1 => self.work.notify_one(),
            _ => self.work.notify_all(),
        }
    }

    fn work_until_closed(&self) {
        let mut failed = Vec::new();
        let mut queue = self.lock();
        loop {
            match queue.claim() {
                Some(batch) => queue = self.run_batch(queue, batch, &mut failed),
                None if queue.is_closing() => return,
                None => queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Run a batch without the lock. A panic fails the batch, so that whoever waits for the job is not left hanging.
    fn run_batch<'a>(
        &'a self,
        queue: MutexGuard<'a, JobQueue>,
        batch: Batch,
        failed: &mut Vec<u32>,
    ) -> MutexGuard<'a, JobQueue> {
        drop(queue);
        let outcome = catch_unwind(AssertUnwindSafe(|| batch.work.run(batch.items.clone(), failed)));
        let bytes = outcome.unwrap_or_else(|_| {
            failed.clear();
            failed.extend(batch.items.clone().map(|index| index as u32));
            0
        });
        // Dropped before the job can be seen as done: its owner may then take apart what the work refers to.
        drop(batch.work);
        let mut queue = self.lock();
        if queue.finish(batch.job, failed, bytes) {
            self.done.notify_all();
        }
        queue
    }
}
