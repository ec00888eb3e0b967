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
use crate::sync::{Acquire, AtomicU64, AtomicUsize, Relaxed, Release};

use super::driver::{CopyOp, Driver, Entered};
use super::plan::cut_copy;

/// How often the thread looks for new segments and for those out of use.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// A segment and how much of it is page-locked: always from its beginning.
pub(super) struct LockedSegment {
    driver: Arc<dyn Driver>,
    segment: Segment,
    chunk_bytes: usize,
    locked_bytes: AtomicUsize,
}

impl LockedSegment {
    /// Bytes from `host` on, at most `bytes`, that are page-locked by one call.
    fn run(&self, host: usize, bytes: usize) -> usize {
        let offset = host - self.segment.address;
        let chunk_end = (offset / self.chunk_bytes + 1) * self.chunk_bytes;
        // Acquire: pairs with the store after the driver's call.
        let end = chunk_end.min(self.locked_bytes.load(Acquire));
        end.saturating_sub(offset).min(bytes)
    }

    fn left(&self) -> usize {
        self.segment.bytes - self.locked_bytes.load(Relaxed)
    }
}

impl Drop for LockedSegment {
    fn drop(&mut self) {
        // Tried without the driver's leave as well: what stays registered can never be unmapped.
        let _entered = Entered::new(&*self.driver);
        for offset in (0..*self.locked_bytes.get_mut()).step_by(self.chunk_bytes) {
            if let Err(error) = self.driver.unregister_host(self.segment.address + offset) {
                log::warn!("pegaflow: a segment stays mapped, since it cannot be unlocked: {error}");
                std::mem::forget(self.segment.clone());
            }
        }
    }
}

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
    /// Seconds spent on page-locking.
    pub seconds: f64,
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
            let segment = below.filter(|found| copy.host + copy.bytes <= found.segment.address + found.segment.bytes);
            let Some(segment) = segment else {
                split.loose.push(*copy);
                continue;
            };
            let locked_end = segment.segment.address + segment.locked_bytes.load(Acquire);
            let locked_bytes = locked_end.saturating_sub(copy.host).min(copy.bytes);
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
            bytes_seen: segments.values().map(|one| one.segment.bytes as u64).sum(),
            bytes_registered: segments.values().map(|one| one.locked_bytes.load(Relaxed) as u64).sum(),
            seconds: Duration::from_nanos(self.shared.nanoseconds.load(Relaxed)).as_secs_f64(),
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
        let (mut version, mut unannounced) = (None, false);
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
                self.follow(&parts);
                continue;
            }
            drop(wanted);
            if entered.is_ok() && self.lock_next() {
                unannounced = true;
                continue;
            }
            if std::mem::take(&mut unannounced) {
                self.announce();
            }
            let wanted = self.lock();
            let idle = |wanted: &mut Wanted| !wanted.stop && !wanted.changed;
            drop(self.bell.wait_timeout_while(wanted, LOOK_INTERVAL, idle).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Take in new segments, let go of those out of use.
    fn follow(&self, parts: &[(Namespace, u32)]) {
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
            segments.entry(address).or_insert_with(|| {
                let driver = Arc::clone(&self.driver);
                Arc::new(LockedSegment { driver, segment, chunk_bytes: self.chunk_bytes, locked_bytes: 0.into() })
            });
        }
        drop(segments);
        // Unlocking takes a while: not while copies wait for the list.
        drop(gone);
    }

    /// Page-lock one more chunk. `false` if there is none or there will be none.
    fn lock_next(&self) -> bool {
        if self.lock().problem.is_some() {
            return false;
        }
        let next = {
            let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
            segments.values().find(|segment| segment.left() > 0).map(Arc::clone)
        };
        let Some(next) = next else { return false };
        let offset = next.locked_bytes.load(Relaxed);
        let bytes = next.left().min(self.chunk_bytes);
        let started = Instant::now();
        let outcome = self.driver.register_host(next.segment.address + offset, bytes);
        self.nanoseconds.fetch_add(started.elapsed().as_nanos() as u64, Relaxed);
        match outcome {
            Ok(()) => next.locked_bytes.store(offset + bytes, Release),
            Err(error) => self.give_up(&error.to_string()),
        }
        true
    }

    fn announce(&self) {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        let bytes: usize = segments.values().map(|one| one.locked_bytes.load(Relaxed)).sum();
        let seconds = Duration::from_nanos(self.nanoseconds.load(Relaxed)).as_secs_f64();
        let gigabytes = bytes as f64 / 1e9;
        log::info!(
            "pegaflow: {gigabytes:.2} GB of the pool in {} segments are page-locked, {seconds:.2} s of work so far",
            segments.len()
        );
    }

    fn give_up(&self, reason: &str) {
        log::warn!(
            "pegaflow: memory of the pool cannot be page-locked ({reason}); copies go through small buffers, which is \
             slower: raise the limit of locked memory (ulimit -l)"
        );
        self.lock().problem = Some(reason.to_owned());
    }
}
