//! Jobs of the copy threads: which batch of which job is next, and what became of it. Knows no threads.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, ErrorKind, Result};
use crate::limits::{COPY_ITEMS_QUEUED_MAX, COPY_JOBS_IN_FLIGHT_MAX};

/// Number of a job, unique among the jobs of one set of threads.
pub type JobId = u64;

/// Something to do for each of a number of items, in any order and on any thread.
pub(super) trait Work: Send + Sync {
    /// Do the items of `batch`. Adds the index of each one that failed to `failed`; returns the bytes of the others.
    fn run(&self, batch: Range<usize>, failed: &mut Vec<u32>) -> u64;
}

/// A job before it is queued.
pub(super) struct NewJob {
    pub(super) work: Arc<dyn Work>,
    /// Number of items.
    pub(super) items: usize,
    /// Items that one thread takes at once.
    pub(super) batch_items: usize,
    /// Whether somebody waits for it: begun before all that nobody waits for.
    pub(super) urgent: bool,
}

/// Outcome of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct CopyDone {
    /// The job's number.
    pub job: JobId,
    /// Indices of the items that failed, ascending.
    pub failed: Vec<u32>,
    /// Bytes moved, those of failed items left out.
    pub bytes: u64,
    /// Seconds since the job was started.
    pub seconds: f64,
    /// Why items failed, where the reason is not that they were stale or damaged.
    pub error: Option<String>,
}

impl CopyDone {
    /// Whether no item failed.
    pub fn ok(&self) -> bool {
        self.failed.is_empty()
    }
}

/// Some items of a job, for one thread.
pub(super) struct Batch {
    pub(super) job: JobId,
    pub(super) work: Arc<dyn Work>,
    pub(super) items: Range<usize>,
}

struct Active {
    new: NewJob,
    /// Fetched by its number alone, by the thread that started it.
    awaited: bool,
    next_item: usize,
    batches_running: usize,
    failed: Vec<u32>,
    bytes: u64,
    started: Instant,
}

/// The queue: jobs wait in `urgent` or `background` until all their batches are handed out, stay in `active` until
/// the last batch is finished, and end in `done` (or `done_awaited`) until they are fetched.
#[derive(Default)]
pub(super) struct JobQueue {
    job_last: JobId,
    active: HashMap<JobId, Active>,
    urgent: VecDeque<JobId>,
    background: VecDeque<JobId>,
    done: VecDeque<CopyDone>,
    done_awaited: HashMap<JobId, CopyDone>,
    jobs_in_flight: usize,
    items_queued: usize,
    closing: bool,
}

impl JobQueue {
    /// Add a job whose outcome goes to whoever calls [`Self::take_done`].
    pub(super) fn add(&mut self, new: NewJob) -> Result<JobId> {
        self.check_open()?;
        if self.jobs_in_flight >= COPY_JOBS_IN_FLIGHT_MAX {
            return Err(Error::busy(format!(
                "{COPY_JOBS_IN_FLIGHT_MAX} copy jobs are in flight or not fetched yet: poll for those that are done"
            )));
        }
        if self.items_queued.saturating_add(new.items) > COPY_ITEMS_QUEUED_MAX {
            return Err(Error::busy(format!(
                "more than {COPY_ITEMS_QUEUED_MAX} blocks would be queued for copying: wait for running jobs"
            )));
        }
        self.jobs_in_flight += 1;
        Ok(self.insert(new, false))
    }

    /// Add a job whose outcome only [`Self::take_awaited`] returns. Its caller waits, so that callers bound them.
    pub(super) fn add_awaited(&mut self, new: NewJob) -> Result<JobId> {
        self.check_open()?;
        Ok(self.insert(new, true))
    }

    fn check_open(&self) -> Result<()> {
        match self.closing {
            false => Ok(()),
            true => Err(Error::new(ErrorKind::Closed, "the copier is closed: make a new one")),
        }
    }

    fn insert(&mut self, new: NewJob, awaited: bool) -> JobId {
        self.job_last += 1;
        let job = self.job_last;
        let (empty, urgent) = (new.items == 0, new.urgent);
        self.items_queued += new.items;
        let active = Active {
            new,
            awaited,
            next_item: 0,
            batches_running: 0,
            failed: Vec::new(),
            bytes: 0,
            started: Instant::now(),
        };
        self.active.insert(job, active);
        if empty {
            self.complete(job);
        } else {
            let queue = if urgent { &mut self.urgent } else { &mut self.background };
            queue.push_back(job);
        }
        job
    }

    /// The next batch of the job that is first in line.
    pub(super) fn claim(&mut self) -> Option<Batch> {
        let job = *self.urgent.front().or(self.background.front())?;
        self.claim_from(job)
    }

    /// The next batch of one job.
    pub(super) fn claim_from(&mut self, job: JobId) -> Option<Batch> {
        let active = self.active.get_mut(&job)?;
        let start = active.next_item;
        if start == active.new.items {
            return None;
        }
        let end = active.new.items.min(start + active.new.batch_items.max(1));
        active.next_item = end;
        active.batches_running += 1;
        if end == active.new.items {
            let queue = if active.new.urgent { &mut self.urgent } else { &mut self.background };
            queue.retain(|&waiting| waiting != job);
        }
        Some(Batch { job, work: Arc::clone(&active.new.work), items: start..end })
    }

    /// Take what became of a batch; `true` if that completes its job.
    pub(super) fn finish(&mut self, job: JobId, failed: &mut Vec<u32>, bytes: u64) -> bool {
        let active = self.active.get_mut(&job).expect("a job is active until its last batch is finished");
        active.failed.append(failed);
        active.bytes += bytes;
        active.batches_running -= 1;
        let completes = active.batches_running == 0 && active.next_item == active.new.items;
        if completes {
            self.complete(job);
        }
        completes
    }

    fn complete(&mut self, job: JobId) {
        let Some(mut active) = self.active.remove(&job) else { return };
        self.items_queued -= active.new.items;
        active.failed.sort_unstable();
        let done = CopyDone {
            job,
            failed: active.failed,
            bytes: active.bytes,
            seconds: active.started.elapsed().as_secs_f64(),
            error: None,
        };
        if active.awaited {
            self.done_awaited.insert(job, done);
        } else {
            self.done.push_back(done);
        }
    }

    /// Outcomes not fetched yet, in order of completion.
    pub(super) fn take_done(&mut self) -> Vec<CopyDone> {
        self.jobs_in_flight -= self.done.len();
        self.done.drain(..).collect()
    }

    /// Outcome of an awaited job, once.
    pub(super) fn take_awaited(&mut self, job: JobId) -> Option<CopyDone> {
        self.done_awaited.remove(&job)
    }

    /// Whether [`Self::take_done`] has something, or never will before another job is added.
    pub(super) fn worth_polling(&self) -> bool {
        !self.done.is_empty() || self.jobs_in_flight == 0
    }

    /// Jobs added and not fetched yet, awaited ones left out.
    pub(super) fn jobs_in_flight(&self) -> usize {
        self.jobs_in_flight
    }

    /// Accept no more jobs.
    pub(super) fn close(&mut self) {
        self.closing = true;
    }

    /// Whether no more jobs are accepted.
    pub(super) fn is_closing(&self) -> bool {
        self.closing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing;

    impl Work for Nothing {
        fn run(&self, _: Range<usize>, _: &mut Vec<u32>) -> u64 {
            0
        }
    }

    fn job(items: usize, batch_items: usize, urgent: bool) -> NewJob {
        NewJob { work: Arc::new(Nothing), items, batch_items, urgent }
    }

    #[test]
    fn a_job_completes_with_its_last_batch_and_once() {
        let mut queue = JobQueue::default();
        let id = queue.add(job(5, 2, false)).unwrap();
        let batches: Vec<_> = std::iter::from_fn(|| queue.claim()).map(|batch| batch.items).collect();
        assert_eq!(batches, [0..2, 2..4, 4..5]);
        assert!(!queue.finish(id, &mut vec![3], 10));
        assert!(!queue.finish(id, &mut vec![], 20));
        assert!(queue.take_done().is_empty());
        assert!(queue.finish(id, &mut vec![1], 30));
        let done = queue.take_done();
        assert_eq!((done.len(), done[0].job, &done[0].failed[..], done[0].bytes), (1, id, &[1, 3][..], 60));
        assert!(queue.take_done().is_empty());
        assert_eq!(queue.jobs_in_flight(), 0);
    }

    #[test]
    fn a_job_of_no_items_is_done_at_once() {
        let mut queue = JobQueue::default();
        let id = queue.add(job(0, 8, true)).unwrap();
        assert!(queue.claim().is_none());
        assert_eq!(queue.take_done()[0].job, id);
    }

    #[test]
    fn urgent_jobs_are_begun_before_background_jobs_and_each_kind_in_order() {
        let mut queue = JobQueue::default();
        let ids: Vec<_> =
            [false, true, false, true].map(|urgent| queue.add(job(1, 1, urgent)).unwrap()).into_iter().collect();
        let order: Vec<_> = std::iter::from_fn(|| queue.claim()).map(|batch| batch.job).collect();
        assert_eq!(order, [ids[1], ids[3], ids[0], ids[2]]);
    }

    #[test]
    fn awaited_jobs_are_not_seen_by_those_who_poll() {
        let mut queue = JobQueue::default();
        let id = queue.add_awaited(job(1, 1, true)).unwrap();
        assert_eq!(queue.jobs_in_flight(), 0);
        assert_eq!(queue.claim_from(id).unwrap().items, 0..1);
        assert!(queue.claim().is_none());
        assert!(queue.finish(id, &mut vec![], 1));
        assert!(queue.take_done().is_empty());
        assert_eq!(queue.take_awaited(id).unwrap().job, id);
        assert!(queue.take_awaited(id).is_none());
    }

    #[test]
    fn jobs_beyond_the_bound_are_refused_until_some_are_fetched() {
        let mut queue = JobQueue::default();
        for _ in 0..COPY_JOBS_IN_FLIGHT_MAX {
            queue.add(job(0, 1, false)).unwrap();
        }
        assert_eq!(queue.add(job(0, 1, false)).unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(queue.take_done().len(), COPY_JOBS_IN_FLIGHT_MAX);
        queue.add(job(0, 1, false)).unwrap();
    }

    #[test]
    fn blocks_beyond_the_bound_are_refused_until_some_are_copied() {
        let mut queue = JobQueue::default();
        let id = queue.add(job(COPY_ITEMS_QUEUED_MAX, COPY_ITEMS_QUEUED_MAX, false)).unwrap();
        assert_eq!(queue.add(job(1, 1, false)).unwrap_err().kind(), ErrorKind::Busy);
        queue.claim().unwrap();
        queue.finish(id, &mut vec![], 1);
        queue.add(job(1, 1, false)).unwrap();
    }

    #[test]
    fn a_closing_queue_takes_no_jobs_but_hands_out_what_it_has() {
        let mut queue = JobQueue::default();
        queue.add(job(1, 1, false)).unwrap();
        queue.close();
        assert_eq!(queue.add(job(1, 1, false)).unwrap_err().kind(), ErrorKind::Closed);
        assert!(queue.claim().is_some());
    }
}
