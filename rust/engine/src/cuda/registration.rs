//! Segments of the pool that are page-locked for the device: in the background, piece by piece.
//!
//! Whoever copies asks which bytes are page-locked already; the rest goes another way. A copy holds the segment that
//! it uses, and a segment is unlocked and unmapped only when nobody holds it.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::shm::namespace::Namespace;
use crate::slot_space::{Segment, SlotSpace};
use crate::sync::{AtomicU64, Relaxed};

use super::driver::{CopyOp, Driver, Entered};
use super::locked_segment::LockedSegment;
use super::plan::cut_copy;

/// How often the thread looks for new segments and for those out of use.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// While memory is being locked, other threads wait for the driver, and a thread that asks again at once is served
/// first. So the driver is left alone after each chunk for this many times as long as the chunk took.
const PAUSE_RATIO: u32 = 2;
const PAUSE_MIN: Duration = Duration::from_micros(500);

/// Copies by whether their host side is page-locked.
#[derive(Default)]
pub(super) struct SplitCopies {
    /// Each within one page-locked range.
    pub(super) locked: Vec<CopyOp>,
    /// Not page-locked.
    pub(super) loose: Vec<CopyOp>,
    /// To be held until the copies are done.
    pub(super) held: Vec<Arc<LockedSegment>>,
}

/// Where page-locking stands.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RegistrationProgress {
    /// Segments seen.
    pub segments: usize,
    /// Their bytes.
    pub bytes_seen: u64,
    /// Bytes of them that are page-locked.
    pub bytes_registered: u64,
    /// Seconds since page-locking began, without those in which there was nothing to do.
    pub seconds: f64,
    /// Seconds of these in which the driver was busy with it, and other threads waited if they needed the driver.
    pub driver_seconds: f64,
    /// Why there will be no more, if so.
    pub problem: Option<String>,
}

#[derive(Default)]
struct Wanted {
    parts: Vec<(Namespace, u32)>,
    changed: bool,
    stop: bool,
    problem: Option<String>,
}

struct Shared {
    driver: Arc<dyn Driver>,
    space: Arc<dyn SlotSpace>,
    chunk_bytes: usize,
    wanted: Mutex<Wanted>,
    bell: Condvar,
    segments: RwLock<BTreeMap<usize, Arc<LockedSegment>>>,
    nanoseconds: AtomicU64,
    driver_nanoseconds: AtomicU64,
}

/// The segments, and the thread that looks after them.
pub(super) struct Registration {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Registration {
    /// Nothing is page-locked before [`Self::want`].
    pub(super) fn new(driver: Arc<dyn Driver>, space: Arc<dyn SlotSpace>, chunk_bytes: usize) -> Self {
        let shared = Shared {
            driver,
            space,
            chunk_bytes,
            wanted: Mutex::default(),
            bell: Condvar::new(),
            segments: RwLock::default(),
            nanoseconds: AtomicU64::new(0),
            driver_nanoseconds: AtomicU64::new(0),
        };
        Self { shared: Arc::new(shared), thread: Mutex::default() }
    }

    /// Page-lock the segments of `part` of a namespace, now and as the pool grows.
    pub(super) fn want(&self, namespace: Namespace, part: u32) -> Result<()> {
        let mut wanted = self.shared.lock();
        if !wanted.parts.contains(&(namespace, part)) {
            wanted.parts.push((namespace, part));
            wanted.changed = true;
            self.shared.bell.notify_all();
        }
        drop(wanted);
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let started = std::thread::Builder::new().name("pega-register".into()).spawn(move || shared.run());
            *thread = Some(started.map_err(|error| {
                Error::busy(format!(
                    "the thread that page-locks segments did not start ({error}): raise the task limit"
                ))
            })?);
        }
        Ok(())
    }

    /// Cut copies where page-locked ranges end. Copies that a segment seen by the thread does not hold are loose.
    pub(super) fn split(&self, copies: &[CopyOp]) -> SplitCopies {
        let segments = self.shared.segments.read().unwrap_or_else(PoisonError::into_inner);
        let mut split = SplitCopies::default();
        for copy in copies {
            let below = segments.range(..=copy.host).next_back().map(|(_, segment)| segment);
            let segment = below.filter(|found| copy.host + copy.bytes <= found.end());
            let Some(segment) = segment else {
                split.loose.push(*copy);
                continue;
            };
            let locked_bytes = segment.locked_end().saturating_sub(copy.host).min(copy.bytes);
            let locked = CopyOp { bytes: locked_bytes, ..*copy };
            cut_copy(locked, |host, bytes| segment.run(host, bytes), |piece| split.locked.push(piece));
            if locked_bytes < copy.bytes {
                split.loose.push(CopyOp {
                    host: copy.host + locked_bytes,
                    device: copy.device + locked_bytes as u64,
                    bytes: copy.bytes - locked_bytes,
                });
            }
            if locked_bytes > 0 && !split.held.iter().any(|held| Arc::ptr_eq(held, segment)) {
                split.held.push(Arc::clone(segment));
            }
        }
        split
    }

    /// Where page-locking stands.
    pub(super) fn progress(&self) -> RegistrationProgress {
        let segments = self.shared.segments.read().unwrap_or_else(PoisonError::into_inner);
        RegistrationProgress {
            segments: segments.len(),
            bytes_seen: segments.values().map(|one| one.bytes() as u64).sum(),
            bytes_registered: segments.values().map(|one| one.locked_bytes() as u64).sum(),
            seconds: seconds(&self.shared.nanoseconds),
            driver_seconds: seconds(&self.shared.driver_nanoseconds),
            problem: self.shared.lock().problem.clone(),
        }
    }

    /// Stop, and unlock what no copy holds.
    pub(super) fn close(&self) {
        self.shared.lock().stop = true;
        self.shared.bell.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            log::error!("pegaflow: the thread that page-locks segments had panicked");
        }
        let segments = std::mem::take(&mut *self.shared.write_segments());
        drop(segments);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_segments(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<usize, Arc<LockedSegment>>> {
        self.segments.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let entered = Entered::new(&*self.driver);
        if let Err(error) = &entered {
            self.give_up(&error.to_string());
        }
        let (mut version, mut unannounced, mut leaving) = (None, false, Vec::new());
        loop {
            let now = self.space.segments_version();
            let mut wanted = self.lock();
            if wanted.stop {
                return;
            }
            if std::mem::take(&mut wanted.changed) || version != Some(now) {
                let parts = wanted.parts.clone();
                drop(wanted);
                version = Some(now);
                leaving.extend(self.follow(&parts));
                continue;
            }
            drop(wanted);
            let started = Instant::now();
            if entered.is_ok()
                && let Some(busy) = unlock_next(&mut leaving).or_else(|| self.lock_next())
            {
                unannounced = true;
                let pause = Instant::now() + PAUSE_MIN.max(busy * PAUSE_RATIO);
                self.touch_ahead();
                self.rest(pause.saturating_duration_since(Instant::now()), |_| true);
                self.nanoseconds.fetch_add(started.elapsed().as_nanos() as u64, Relaxed);
                self.driver_nanoseconds.fetch_add(busy.as_nanos() as u64, Relaxed);
                continue;
            }
            if std::mem::take(&mut unannounced) {
                self.announce();
            }
            self.rest(LOOK_INTERVAL, |wanted| !wanted.changed);
        }
    }

    /// Sleep for so long, while `idle` and not told to stop.
    fn rest(&self, duration: Duration, idle: impl Fn(&Wanted) -> bool) {
        let go_on = |wanted: &mut Wanted| !wanted.stop && idle(wanted);
        drop(self.bell.wait_timeout_while(self.lock(), duration, go_on).unwrap_or_else(PoisonError::into_inner));
    }

    /// Take in new segments. Returns those out of use.
    fn follow(&self, parts: &[(Namespace, u32)]) -> impl Iterator<Item = Arc<LockedSegment>> + use<> {
        let listed: BTreeMap<usize, Segment> = parts
            .iter()
            .flat_map(|(namespace, part)| self.space.segments(*namespace, *part))
            .map(|segment| (segment.address, segment))
            .collect();
        let mut segments = self.write_segments();
        let (kept, gone): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut *segments).into_iter().partition(|(address, _)| listed.contains_key(address));
        *segments = kept;
        for (address, segment) in listed {
            segments
                .entry(address)
                .or_insert_with(|| Arc::new(LockedSegment::new(Arc::clone(&self.driver), segment, self.chunk_bytes)));
        }
        gone.into_values()
    }

    /// Page-lock one more chunk. Returns how long that kept the driver busy; `None` if there is or will be no other.
    fn lock_next(&self) -> Option<Duration> {
        if self.lock().problem.is_some() {
            return None;
        }
        self.next()?.lock_chunk().map_err(|error| self.give_up(&error.to_string())).ok()
    }

    /// Make the next chunk quicker to lock.
    fn touch_ahead(&self) {
        if let Some(next) = self.next() {
            next.touch_next();
        }
    }

    /// A segment that is not locked to its end.
    fn next(&self) -> Option<Arc<LockedSegment>> {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        segments.values().find(|segment| segment.locked_bytes() < segment.bytes()).map(Arc::clone)
    }

    fn announce(&self) {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        let gigabytes = segments.values().map(|one| one.locked_bytes()).sum::<usize>() as f64 / 1e9;
        let seconds = seconds(&self.nanoseconds);
        log::info!("pegaflow: {gigabytes:.2} GB of the pool are page-locked, after {seconds:.2} s of work so far");
    }

    fn give_up(&self, reason: &str) {
        log::warn!(
            "pegaflow: memory of the pool cannot be page-locked ({reason}); copies go through small buffers, which is \
             slower: raise the limit of locked memory (ulimit -l)"
        );
        self.lock().problem = Some(reason.to_owned());
    }
}

/// Unlock one chunk of a segment that no copy holds any more, or let go of it. Returns how long that kept the driver
/// busy; `None` if there is none.
fn unlock_next(leaving: &mut Vec<Arc<LockedSegment>>) -> Option<Duration> {
    // Nobody can come to hold it anew: it is out of the list.
    let free = leaving.iter().position(|segment| Arc::strong_count(segment) == 1)?;
    if leaving[free].locked_bytes() > 0 {
        return Some(leaving[free].unlock_chunk());
    }
    leaving.swap_remove(free);
    Some(Duration::ZERO)
}

fn seconds(nanoseconds: &AtomicU64) -> f64 {
    Duration::from_nanos(nanoseconds.load(Relaxed)).as_secs_f64()
}
