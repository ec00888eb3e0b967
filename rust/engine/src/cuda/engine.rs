//! The transfer thread of one device: takes jobs from the board, keeps both lanes full, posts what is over.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::slot_space::SlotSpace;

use super::board::{Board, Job};
use super::driver::{Driver, DriverError, DriverResult, Entered, Way};
use super::events::EventPool;
use super::lane::{Lane, Tools};
use super::options::CudaOptions;
use super::registration::Registration;
use super::ring::CpuCopier;
use super::tables::LayoutTables;
use super::tally::Tally;

/// How often a device is asked what it has done when it soon has nothing left to do.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// The same while it has more to do than it can do in that time: one piece takes some 300 us.
const POLL_INTERVAL_BUSY: Duration = Duration::from_micros(200);

/// The kernel rounds sleeps up by this much; its default is as long as the sleep itself.
const TIMER_SLACK_NS: libc::c_ulong = 1_000;

/// What callers and the thread share.
pub(super) struct Shared {
    pub(super) board: Mutex<Board>,
    /// Signalled when the thread should look.
    pub(super) bell: Condvar,
    /// Signalled when a job is over or the thread has ended.
    pub(super) done: Condvar,
}

impl Shared {
    pub(super) fn new() -> Self {
        Self { board: Mutex::default(), bell: Condvar::new(), done: Condvar::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All that the thread owns.
pub(super) struct Engine {
    shared: Arc<Shared>,
    tools: Tools,
    /// Loads first: somebody waits for them.
    lanes: [Lane; 2],
    /// Why the device is of no use any more.
    lost: Option<String>,
}

impl Engine {
    /// Make everything on the device. The calling thread has entered the driver.
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        space: Arc<dyn SlotSpace>,
        options: &CudaOptions,
        events: Arc<EventPool>,
        tally: Arc<Tally>,
    ) -> DriverResult<Self> {
        let registration = Registration::new(Arc::clone(driver), Arc::clone(&space), options.register_chunk_bytes);
        let mut loads = Lane::new(Way::ToDevice, driver, options)?;
        let rest = Lane::new(Way::ToHost, driver, options).and_then(|mut saves| {
            let tables = LayoutTables::new(driver).inspect_err(|_| saves.close())?;
            Ok((saves, tables))
        });
        let (saves, tables) = rest.inspect_err(|_| loads.close())?;
        let tools = Tools {
            driver: Arc::clone(driver),
            space,
            events,
            registration: Arc::new(registration),
            tally,
            options: options.clone(),
            tables,
            cpu: CpuCopier::default(),
        };
        Ok(Self { shared: Arc::new(Shared::new()), tools, lanes: [loads, saves], lost: None })
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(super) fn registration(&self) -> &Arc<Registration> {
        &self.tools.registration
    }

    /// Work until the board is closed and nothing is left to do; then give everything back.
    pub(super) fn run(mut self) {
        sharpen_timer();
        let driver = Arc::clone(&self.tools.driver);
        let entered = Entered::new(&*driver);
        if let Err(error) = &entered {
            self.lose(error);
        } else {
            self.lanes.iter_mut().for_each(|lane| lane.prepare(&self.tools));
        }
        while self.take_jobs() {
            let outcome = catch_unwind(AssertUnwindSafe(|| self.advance()));
            match outcome.unwrap_or_else(|_| Err(self.stop_after_defect())) {
                Ok(over) => {
                    self.publish();
                    self.post(over);
                }
                Err(error) => self.lose(&error),
            }
        }
        let shared = Arc::clone(&self.shared);
        // Before anybody is told that the thread has ended: this may be the last that keeps the pool attached.
        drop(self);
        drop(entered);
        shared.lock().finished = true;
        shared.done.notify_all();
    }

    /// Wait for something to do and take new jobs. `false`: nothing is left and nothing will come.
    fn take_jobs(&mut self) -> bool {
        let busy = self.lanes.iter().any(Lane::is_busy);
        let mut board = self.shared.lock();
        if busy {
            let rest = self.rest();
            if !rest.is_zero() && !board.has_new() {
                board = self.shared.bell.wait_timeout(board, rest).unwrap_or_else(PoisonError::into_inner).0;
            }
        } else {
            let idle = |board: &mut Board| !board.has_new() && !board.is_closing();
            board = self.shared.bell.wait_while(board, idle).unwrap_or_else(PoisonError::into_inner);
        }
        let new = board.take_new();
        let go_on = busy || !new.is_empty() || !board.is_closing();
        drop(board);
        for mut job in new {
            if let Some(reason) = &self.lost {
                job.fail_whole(reason.clone());
                self.post(vec![job]);
            } else {
                self.lanes[usize::from(job.way == Way::ToHost)].push(job);
            }
        }
        go_on
    }

    /// How long to sleep while something is under way.
    fn rest(&self) -> Duration {
        let now = Instant::now();
        let rest_of = |lane: &Lane| match lane.rests_until() {
            Some(until) => until.saturating_duration_since(now),
            None if lane.has_plenty() => POLL_INTERVAL_BUSY,
            None => POLL_INTERVAL,
        };
        self.lanes.iter().filter(|lane| lane.is_busy()).map(rest_of).min().unwrap_or(POLL_INTERVAL)
    }

    fn advance(&mut self) -> DriverResult<Vec<Job>> {
        let mut over = Vec::new();
        if self.lost.is_none() {
            for lane in &mut self.lanes {
                over.extend(lane.advance(&mut self.tools)?);
            }
        }
        Ok(over)
    }

    /// Tell of the stages that were queued.
    fn publish(&mut self) {
        let staged = self.lanes.iter_mut().flat_map(Lane::take_staged).collect::<Vec<_>>();
        if !staged.is_empty() {
            let mut board = self.shared.lock();
            staged.into_iter().for_each(|staged| board.followed.publish(staged.job, staged.events, staged.all));
            drop(board);
            self.shared.done.notify_all();
        }
    }

    fn post(&self, over: Vec<Job>) {
        if over.is_empty() {
            return;
        }
        self.tools.registration.activity().end_jobs(over.len());
        let mut board = self.shared.lock();
        for mut job in over {
            let events = job.after.take().into_iter().chain(job.stages.drain(..)).chain(job.stage_marks.drain(..));
            events.for_each(|event| self.tools.events.give(event));
            board.post(job);
        }
        drop(board);
        self.shared.done.notify_all();
    }

    /// This thread has panicked, but the device still does what was queued, and nobody knows all of that any more: it
    /// is waited for, since those who hear of failed jobs use the blocks and slots for something else.
    fn stop_after_defect(&mut self) -> DriverError {
        let drain = || self.lanes.iter_mut().try_for_each(|lane| lane.drain(&self.tools));
        if !matches!(catch_unwind(AssertUnwindSafe(drain)), Ok(Ok(()))) {
            log::error!("pegaflow: the device cannot be waited for");
        }
        DriverError { call: "the transfer thread", code: 0, text: "a defect, see stderr".into() }
    }

    /// The device is lost: fail all there is and all that comes.
    fn lose(&mut self, error: &DriverError) {
        let reason = format!("the CUDA device is lost, nothing is copied any more: {error}");
        log::error!("pegaflow: {reason}");
        self.lost = Some(reason.clone());
        self.shared.lock().problem = Some(reason.clone());
        let lanes = self.lanes.iter_mut();
        let over = lanes.flat_map(|lane| lane.abandon(&self.tools.events, &reason)).collect();
        self.post(over);
    }
}

impl Drop for Engine {
    /// Give everything back: no job is left, or the thread never started.
    fn drop(&mut self) {
        let _entered = Entered::new(&*self.tools.driver);
        self.tools.registration.close();
        self.lanes.iter_mut().for_each(Lane::close);
        self.tools.tables.close();
        self.tools.events.clear();
    }
}

fn sharpen_timer() {
    // SAFETY: takes two numbers and only changes this thread's timers.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, TIMER_SLACK_NS) };
}
