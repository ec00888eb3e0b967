//! What callers and the transfer thread tell each other: jobs to do, jobs done. Knows no driver.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use crate::copy::{CopyDone, JobId, KvLayout};
use crate::error::{Error, ErrorKind, Result};
use crate::key::BlockRef;
use crate::limits::{COPY_ITEMS_QUEUED_MAX, COPY_JOBS_IN_FLIGHT_MAX};

use super::driver::{Event, Way};
use super::followed::FollowedLoads;
use super::plan::Cutter;

/// A job, as it was asked for and as far as it got.
pub(super) struct Job {
    pub(super) id: JobId,
    /// `ToHost` saves, `ToDevice` loads.
    pub(super) way: Way,
    pub(super) part: u32,
    pub(super) layout: Arc<KvLayout>,
    pub(super) refs: Vec<BlockRef>,
    pub(super) block_ids: Vec<u32>,
    /// Blocks are not touched before this.
    pub(super) after: Option<Event>,
    /// The same, until it was seen to be over.
    pub(super) awaited: Option<Event>,
    pub(super) cutter: Cutter,
    /// Whether each stage gets an event, so that somebody may follow the job before it is over.
    pub(super) followed: bool,
    /// Those events, of the stages that were queued; and events that are over when they are.
    pub(super) stages: Vec<Event>,
    pub(super) stage_marks: Vec<Event>,
    /// Pieces that the device is working on.
    pub(super) flights: usize,
    pub(super) failed: Vec<u32>,
    pub(super) bytes: u64,
    pub(super) error: Option<String>,
    pub(super) started: Instant,
}

impl Job {
    /// Whether nothing of it is left to do.
    pub(super) fn is_over(&self) -> bool {
        self.flights == 0 && !self.cutter.has_more()
    }

    /// Give up what was not begun, with the reason. What is in flight stays so.
    pub(super) fn fail(&mut self, error: String) {
        self.failed.extend(self.cutter.stop().map(|index| index as u32));
        self.error.get_or_insert(error);
    }

    /// Nothing of it is to be trusted.
    pub(super) fn fail_whole(&mut self, error: String) {
        self.fail(error);
        self.failed = (0..self.refs.len() as u32).collect();
        self.bytes = 0;
    }

    fn into_done(mut self) -> CopyDone {
        self.failed.sort_unstable();
        self.failed.dedup();
        CopyDone {
            job: self.id,
            failed: self.failed,
            bytes: self.bytes,
            seconds: self.started.elapsed().as_secs_f64(),
            error: self.error,
        }
    }
}

/// Jobs between callers and the transfer thread.
#[derive(Default)]
pub(super) struct Board {
    job_last: JobId,
    new: VecDeque<Job>,
    done: Vec<CopyDone>,
    jobs_in_flight: usize,
    blocks_queued: usize,
    closing: bool,
    /// Loads in stages.
    pub(super) followed: FollowedLoads,
    /// Set by the thread as the last thing that it does.
    pub(super) finished: bool,
    /// Why the device is of no use any more.
    pub(super) problem: Option<String>,
}

impl Board {
    /// Whether a job of so many blocks may be added.
    pub(super) fn check(&self, blocks: usize) -> Result<()> {
        if self.closing {
            return Err(Error::new(ErrorKind::Closed, "the copier is closed: make a new one"));
        }
        if self.jobs_in_flight >= COPY_JOBS_IN_FLIGHT_MAX {
            return Err(Error::busy(format!(
                "{COPY_JOBS_IN_FLIGHT_MAX} copy jobs are in flight or not fetched yet: poll for those that are done"
            )));
        }
        if self.blocks_queued.saturating_add(blocks) > COPY_ITEMS_QUEUED_MAX {
            return Err(Error::busy(format!(
                "more than {COPY_ITEMS_QUEUED_MAX} blocks would be queued for copying: wait for running jobs"
            )));
        }
        Ok(())
    }

    /// Add a job, numbered here. Call [`Self::check`] under the same lock.
    pub(super) fn add(&mut self, mut job: Job) -> JobId {
        self.job_last += 1;
        job.id = self.job_last;
        self.jobs_in_flight += 1;
        self.blocks_queued += job.refs.len();
        if job.followed {
            self.followed.publish(job.id, Vec::new(), false);
        }
        self.new.push_back(job);
        self.job_last
    }

    /// Jobs that the thread has not seen.
    pub(super) fn take_new(&mut self) -> VecDeque<Job> {
        std::mem::take(&mut self.new)
    }

    /// Whether the thread should look.
    pub(super) fn has_new(&self) -> bool {
        !self.new.is_empty()
    }

    /// Post an outcome.
    pub(super) fn post(&mut self, job: Job) {
        self.blocks_queued -= job.refs.len();
        self.followed.forget(job.id);
        self.done.push(job.into_done());
    }

    /// Outcomes not fetched yet, in order of completion.
    pub(super) fn take_done(&mut self) -> Vec<CopyDone> {
        self.jobs_in_flight -= self.done.len();
        std::mem::take(&mut self.done)
    }

    /// Whether [`Self::take_done`] has something, or never will before another job is added.
    pub(super) fn worth_polling(&self) -> bool {
        !self.done.is_empty() || self.jobs_in_flight == 0
    }

    /// Jobs added and not fetched yet.
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
