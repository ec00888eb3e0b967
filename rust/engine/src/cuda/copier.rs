//! Copies between the blocks of a KV cache in device memory and the slots of a pool.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::copy::{CopyDone, JobId, KvLayout};
use crate::error::{Error, ErrorKind, Result};
use crate::key::BlockRef;
use crate::limits::COPY_ITEMS_QUEUED_MAX;
use crate::shm::namespace::Namespace;
use crate::slot_space::SlotSpace;

use super::board::Job;
use super::device::Device;
use super::driver::{Driver, DriverError, Entered, Event, OUT_OF_MEMORY, Stream, Way};
use super::engine::{Engine, Shared};
use super::events::EventPool;
use super::followed::stage_ends;
use super::options::CudaOptions;
use super::plan::Cutter;
use super::registration::Registration;
use super::registration_progress::RegistrationProgress;
use super::tally::Tally;

/// Longest wait for a device that does not finish what is queued when its copier is closed.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(30);

/// Copies blocks of one device on its own streams and thread. A job completes once, when its last byte is in place.
///
/// Layouts describe device memory here. While [`Self::problem`] is `None`, the device is done with a job that is
/// reported. Afterwards the slots of failed saves may still be written: they are to be quarantined, not aborted.
pub struct CudaCopier {
    driver: Arc<dyn Driver>,
    shared: Arc<Shared>,
    events: Arc<EventPool>,
    tally: Arc<Tally>,
    registration: Arc<Registration>,
    options: CudaOptions,
    thread: Mutex<Option<JoinHandle<()>>>,
    process: u32,
}

impl CudaCopier {
    /// A copier between the slots of `space` and CUDA device `ordinal`, in the device's primary context. `space` is
    /// held until the thread has ended: what must not end before the last copy does belongs into it.
    pub fn new(space: Arc<dyn SlotSpace>, ordinal: u32, options: CudaOptions) -> Result<Self> {
        options.check()?;
        let device = Device::open(ordinal, options.batch_copies).map_err(|error| device_error(&error))?;
        Self::with_driver(Arc::new(device), space, options)
    }

    pub(super) fn with_driver(
        driver: Arc<dyn Driver>,
        space: Arc<dyn SlotSpace>,
        options: CudaOptions,
    ) -> Result<Self> {
        options.check()?;
        let (events, tally) = (Arc::new(EventPool::new(Arc::clone(&driver))), Arc::<Tally>::default());
        let engine = {
            let _entered = Entered::new(&*driver).map_err(|error| device_error(&error))?;
            Engine::new(&driver, space, &options, Arc::clone(&events), Arc::clone(&tally))
                .map_err(|error| making_failed(&error, options.ring_bytes()))?
        };
        let (shared, registration) = (Arc::clone(engine.shared()), Arc::clone(engine.registration()));
        let thread =
            std::thread::Builder::new().name("pega-cuda".into()).spawn(move || engine.run()).map_err(|error| {
                Error::busy(format!("the transfer thread did not start ({error}): raise the task limit"))
            })?;
        let (thread, process) = (Mutex::new(Some(thread)), std::process::id());
        Ok(Self { driver, shared, events, tally, registration, options, thread, process })
    }

    /// Page-lock the segments of `part` of a namespace in the background, now and as the pool grows.
    pub fn register(&self, namespace: Namespace, part: u32) -> Result<()> {
        self.check_process()?;
        if self.options.register { self.registration.want(namespace, part) } else { Ok(()) }
    }

    /// Undo [`Self::register`]: unlock these segments, in the background.
    pub fn unregister(&self, namespace: Namespace, part: u32) -> Result<()> {
        self.check_process()?;
        self.registration.unwant(namespace, part);
        Ok(())
    }

    /// A step of the model begins (`true`), or has ended as far as the CPU is concerned: while steps follow each other,
    /// page-locking leaves the driver alone most of the time.
    pub fn set_stepping(&self, stepping: bool) {
        self.registration.activity().set_stepping(stepping);
    }

    /// Start copying block `block_ids[i]` into the reserved slot `refs[i]`, for all `i`, once all that is queued in
    /// the CUDA stream `after_stream` by now is done. Parts are marked written as they complete.
    pub fn save(
        &self,
        part: u32,
        layout: &Arc<KvLayout>,
        refs: Vec<BlockRef>,
        block_ids: Vec<u32>,
        after_stream: Option<u64>,
    ) -> Result<JobId> {
        self.start(Way::ToHost, part, layout, refs, block_ids, after_stream, None)
    }

    /// Start copying the leased slot `refs[i]` into block `block_ids[i]`, for all `i`; the blocks are not written
    /// before all that is queued in the CUDA stream `after_stream` by now is done. The ids must differ.
    pub fn load(
        &self,
        part: u32,
        layout: &Arc<KvLayout>,
        refs: Vec<BlockRef>,
        block_ids: Vec<u32>,
        after_stream: Option<u64>,
    ) -> Result<JobId> {
        self.start(Way::ToDevice, part, layout, refs, block_ids, after_stream, None)
    }

    /// Like [`Self::load`], in stages: the first `stage_ends[0]` bytes of all blocks arrive first, then those up to
    /// `stage_ends[1]`, and so on to the end of the blocks. See [`Self::take_queued`].
    pub fn load_in_stages(
        &self,
        part: u32,
        layout: &Arc<KvLayout>,
        refs: Vec<BlockRef>,
        block_ids: Vec<u32>,
        after_stream: Option<u64>,
        stage_ends: &[usize],
    ) -> Result<JobId> {
        self.start(Way::ToDevice, part, layout, refs, block_ids, after_stream, Some(stage_ends))
    }

    /// Loads in stages of which every byte was handed to the device since the last call. From now on
    /// [`Self::wait_stage`] brings a stream behind any of their stages, and only the loss of the device, or of the
    /// leases, can make them fail.
    pub fn take_queued(&self) -> Result<Vec<JobId>> {
        self.check_process()?;
        Ok(self.shared.lock().followed.take_queued())
    }

    /// Let all that is queued in the CUDA stream `stream` from now on wait until stage `stage` of a load is in place.
    /// Nothing has to wait for a load that is over.
    pub fn wait_stage(&self, job: JobId, stage: usize, stream: u64) -> Result<()> {
        self.check_process()?;
        let board = self.shared.lock(); // held, so that the event is not used for something else meanwhile
        if let Some(problem) = &board.problem {
            return Err(Error::new(ErrorKind::Device, problem.clone()));
        }
        let Some(event) = board.followed.event(job, stage)? else { return Ok(()) };
        let _entered = Entered::new(&*self.driver).map_err(|error| device_error(&error))?;
        self.driver.wait(Stream(stream as usize), event).map_err(|error| device_error(&error))
    }

    #[allow(clippy::too_many_arguments, reason = "what callers ask for, once")]
    fn start(
        &self,
        way: Way,
        part: u32,
        layout: &Arc<KvLayout>,
        refs: Vec<BlockRef>,
        block_ids: Vec<u32>,
        after_stream: Option<u64>,
        stages: Option<&[usize]>,
    ) -> Result<JobId> {
        self.check_process()?;
        if refs.len() != block_ids.len() || refs.len() > COPY_ITEMS_QUEUED_MAX {
            return Err(Error::invalid(format!(
                "a copy job has one block id per ref and at most {COPY_ITEMS_QUEUED_MAX}, this one has {} refs and {} \
                 ids: pass lists of equal length",
                refs.len(),
                block_ids.len()
            )));
        }
        layout.check_ids(&block_ids)?;
        let stage_ends = stage_ends(stages, layout)?;
        self.shared.lock().check(refs.len())?;
        // First, so that nobody holds the driver for long from here on.
        self.registration.activity().begin_job();
        self.registration.ask(way, part, &refs);
        // Recorded here rather than by the thread: later the stream holds more than the caller means.
        let (after, error) = match after_stream.map(|stream| self.mark(stream)).transpose() {
            Ok(after) => (after, None),
            Err(error) => (None, Some(error.to_string())),
        };
        let cutter = Cutter::new(refs.len(), stage_ends, self.options.ring_buffer_bytes);
        let layout = Arc::clone(layout);
        let (failed, started) = (Vec::new(), Instant::now());
        let mut job = Job {
            id: 0,
            way,
            part,
            layout,
            refs,
            block_ids,
            after,
            awaited: after,
            cutter,
            followed: stages.is_some(),
            stages: Vec::new(),
            stage_marks: Vec::new(),
            flights: 0,
            failed,
            bytes: 0,
            error: None,
            started,
        };
        if let Some(error) = error {
            job.fail(error);
        }
        let mut board = self.shared.lock();
        if let Err(error) = board.check(job.refs.len()) {
            after.into_iter().for_each(|event| self.events.give(event));
            self.registration.activity().end_jobs(1);
            return Err(error);
        }
        let id = board.add(job);
        drop(board);
        self.shared.bell.notify_one();
        Ok(id)
    }

    fn mark(&self, stream: u64) -> std::result::Result<Event, DriverError> {
        let _entered = Entered::new(&*self.driver)?;
        let event = self.events.take()?;
        self.driver.record_foreign(event, stream).inspect_err(|_| self.events.give(event))?;
        Ok(event)
    }

    /// Jobs that completed since the last call.
    pub fn poll(&self) -> Result<Vec<CopyDone>> {
        self.check_process()?;
        Ok(self.shared.lock().take_done())
    }

    /// Like [`Self::poll`], but waits up to `timeout` for at least one if any job is in flight.
    pub fn wait(&self, timeout: Duration) -> Result<Vec<CopyDone>> {
        self.check_process()?;
        let board = self.shared.lock();
        let (mut board, _) = self
            .shared
            .done
            .wait_timeout_while(board, timeout, |board| !board.worth_polling())
            .unwrap_or_else(PoisonError::into_inner);
        Ok(board.take_done())
    }

    /// Jobs started and not yet returned by [`Self::poll`] or [`Self::wait`].
    pub fn in_flight(&self) -> Result<usize> {
        self.check_process()?;
        Ok(self.shared.lock().jobs_in_flight())
    }

    /// Why the device is of no use any more; `None` while it works.
    pub fn problem(&self) -> Option<String> {
        self.shared.lock().problem.clone()
    }

    /// How far page-locking of segments has come.
    pub fn registration(&self) -> RegistrationProgress {
        self.registration.progress()
    }

    /// Counters since the copier was made, and the device memory that it takes.
    pub fn stats(&self) -> Vec<(&'static str, u64)> {
        let mut stats = self.tally.snapshot();
        stats.push(("ring_bytes", self.options.ring_bytes() as u64));
        stats
    }

    /// Finish what is queued, then stop the thread and give everything back. `Busy` if the device does not finish in
    /// 30 seconds; then the thread goes on and holds everything until it does. What is done can still be polled for.
    pub fn close(&self) -> Result<()> {
        self.check_process()?;
        let mut board = self.shared.lock();
        board.close();
        self.shared.bell.notify_all();
        let (board, _) = self
            .shared
            .done
            .wait_timeout_while(board, CLOSE_WAIT_MAX, |board| !board.finished)
            .unwrap_or_else(PoisonError::into_inner);
        let finished = board.finished;
        drop(board);
        if !finished {
            return Err(Error::busy("the device does not finish its copies, so the copier stays as it is"));
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            log::error!("pegaflow: the transfer thread had panicked");
        }
        Ok(())
    }

    /// Neither threads nor CUDA survive `fork()`.
    fn check_process(&self) -> Result<()> {
        if std::process::id() == self.process {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Forked, "this copier was made before fork(): make a new one in the child"))
    }
}

impl Drop for CudaCopier {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            if error.kind() == ErrorKind::Forked {
                let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
                std::mem::forget(thread);
            } else {
                log::error!("pegaflow: {error}");
            }
        }
    }
}

fn making_failed(error: &DriverError, ring_bytes: usize) -> Error {
    if error.code != OUT_OF_MEMORY {
        return device_error(error);
    }
    Error::new(
        ErrorKind::Device,
        format!(
            "no room on the device for the {} MB that copies go through ({error}): lower gpu_memory_utilization or \
             pegaflow.cuda_ring_size",
            ring_bytes / 1_000_000
        ),
    )
}

fn device_error(error: &DriverError) -> Error {
    Error::new(ErrorKind::Device, format!("CUDA cannot be used for transfers: {error}"))
}
