//! The thread that fetches from one peer: one piece after the other, over one channel. It ends when there is nothing to
//! do for a while.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::peer::Peer;
use crate::fetch::{Attempt, Fetch, OpenChannel, attempt};
use crate::limits::CHANNEL_IDLE_MAX;
use crate::sync::{Relaxed, lock};

/// One piece of a fetch, asked of one peer.
pub(crate) struct Job {
    pub(crate) fetch: Arc<Fetch>,
    /// Number of the peer among the fetch's sources.
    pub(crate) source: usize,
    /// Positions of keys.
    pub(crate) range: Range<usize>,
    pub(crate) is_second_try: bool,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    thread: Option<JoinHandle<()>>,
    is_running: bool,
    is_stopped: bool,
}

/// Jobs of one peer, and who does them.
#[derive(Default)]
pub(crate) struct Lane {
    state: Mutex<State>,
    bell: Condvar,
}

impl Lane {
    /// Do this when what was asked before is done.
    pub(crate) fn push(peer: &Arc<Peer>, job: Job) {
        let lane = &peer.lane;
        let mut state = lock(&lane.state);
        if !state.is_stopped && !state.is_running {
            let owned = Arc::clone(peer);
            match std::thread::Builder::new().name("pega-peer-lane".into()).spawn(move || run(&owned)) {
                Ok(thread) => (state.thread, state.is_running) = (Some(thread), true),
                Err(error) => log::warn!("pegaflow: no thread to fetch from a peer ({error}): check ulimit -u"),
            }
        }
        if !state.is_running || state.is_stopped {
            drop(state);
            job.end(Attempt::default());
            return;
        }
        state.jobs.push_back(job);
        lane.bell.notify_all();
    }

    /// The next job; `None` if the thread is to end.
    fn next(&self) -> Option<Job> {
        let mut state = lock(&self.state);
        let idle = |state: &mut State| state.jobs.is_empty() && !state.is_stopped;
        (state, _) =
            self.bell.wait_timeout_while(state, CHANNEL_IDLE_MAX, idle).unwrap_or_else(PoisonError::into_inner);
        let job = state.jobs.pop_front();
        if job.is_none() {
            state.is_running = false;
        }
        job
    }

    fn is_stopped(&self) -> bool {
        lock(&self.state).is_stopped
    }

    pub(crate) fn stop(&self) {
        lock(&self.state).is_stopped = true;
        self.bell.notify_all();
    }

    /// Wait for the thread to end; `false` if that takes longer than until then.
    pub(crate) fn join(&self, until: Instant) -> bool {
        let Some(thread) = lock(&self.state).thread.take() else { return true };
        while !thread.is_finished() {
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        thread.join().is_ok()
    }
}

impl Job {
    fn end(self, attempt: Attempt) {
        let bytes = self.range.len() as u64 * self.fetch.asked.block_bytes();
        self.fetch.sources[self.source].peer.queued_bytes.fetch_sub(bytes, Relaxed);
        self.fetch.piece_done(self.source, &self.range, self.is_second_try, attempt);
    }
}

fn run(peer: &Arc<Peer>) {
    let mut channel: Option<OpenChannel> = None;
    while let Some(job) = peer.lane.next() {
        // One that has failed may take seconds for each piece until it fails again; others may have them at once.
        let is_there = peer.is_still(&job.fetch.sources[job.source].up);
        if peer.lane.is_stopped() || job.fetch.is_closed() || !is_there {
            job.end(Attempt::default());
            continue;
        }
        let done = catch_unwind(AssertUnwindSafe(|| attempt(&job.fetch, job.source, job.range.clone(), &mut channel)));
        let outcome = done.unwrap_or_else(|_| {
            // Slots that this had reserved stay so until the process ends: who knows what still writes them.
            log::error!(
                "pegaflow: fetching from peer {} has failed by a defect: report what it has logged",
                peer.address
            );
            channel = None;
            Attempt::default()
        });
        job.end(outcome);
    }
}
