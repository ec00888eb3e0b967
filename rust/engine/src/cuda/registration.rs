//! Segments of the pool that are page-locked for the device: in the background, chunk by chunk.
//!
//! Whoever copies asks which bytes are page-locked already; the rest goes another way. A copy holds the segment that
//! it uses, and a segment is unlocked and unmapped only when nobody holds it. `registrar` is the thread that does it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};
use std::thread::JoinHandle;

use crate::error::{Error, Result};
use crate::key::BlockRef;
use crate::shm::backing::helpers;
use crate::shm::namespace::Namespace;
use crate::slot_space::SlotSpace;

use super::activity::Activity;
use super::driver::{CopyOp, Driver, Way};
use super::locked_segment::LockedSegment;
use super::registration_progress::{RegistrationProgress, Work};

/// Jobs whose chunks are to be locked first; of more, the oldest are forgotten.
const ASKED_JOBS_MAX: usize = 64;

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

/// A job whose chunks are to be locked before all others.
pub(super) struct AskedJob {
    pub(super) way: Way,
    pub(super) part: u32,
    pub(super) refs: Vec<BlockRef>,
}

/// What the thread is told.
#[derive(Default)]
pub(super) struct Wanted {
    pub(super) parts: Vec<(Namespace, u32)>,
    pub(super) changed: bool,
    pub(super) asked: VecDeque<AskedJob>,
    pub(super) stop: bool,
    pub(super) problem: Option<String>,
}

/// What callers and the thread share.
pub(super) struct Shared {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) space: Arc<dyn SlotSpace>,
    pub(super) chunk_bytes: usize,
    pub(super) touch_threads: usize,
    pub(super) activity: Activity,
    pub(super) wanted: Mutex<Wanted>,
    pub(super) bell: Condvar,
    pub(super) segments: RwLock<BTreeMap<usize, Arc<LockedSegment>>>,
    pub(super) work: Work,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write_segments(&self) -> RwLockWriteGuard<'_, BTreeMap<usize, Arc<LockedSegment>>> {
        self.segments.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that are locked, and bytes of all segments.
    pub(super) fn bytes(&self) -> (u64, u64) {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        let add = |sums: (u64, u64), one: &Arc<LockedSegment>| {
            (sums.0 + one.locked_bytes() as u64, sums.1 + one.bytes() as u64)
        };
        segments.values().fold((0, 0), add)
    }
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
            touch_threads: helpers(),
            activity: Activity::default(),
            wanted: Mutex::default(),
            bell: Condvar::new(),
            segments: RwLock::default(),
            work: Work::default(),
        };
        Self { shared: Arc::new(shared), thread: Mutex::default() }
    }

    /// What else goes on, which the thread heeds.
    pub(super) fn activity(&self) -> &Activity {
        &self.shared.activity
    }

    /// Page-lock the segments of `part` of a namespace, now and as the pool grows.
    pub(super) fn want(&self, namespace: Namespace, part: u32) -> Result<()> {
        self.change(|parts| {
            if !parts.contains(&(namespace, part)) {
                parts.push((namespace, part));
            }
        });
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

    /// Undo [`Self::want`]: unlock these segments, in the background.
    pub(super) fn unwant(&self, namespace: Namespace, part: u32) {
        self.change(|parts| parts.retain(|known| *known != (namespace, part)));
    }

    fn change(&self, change: impl FnOnce(&mut Vec<(Namespace, u32)>)) {
        let mut wanted = self.shared.lock();
        change(&mut wanted.parts);
        wanted.changed = true;
        drop(wanted);
        self.shared.bell.notify_all();
    }

    /// A job is about to copy these blocks: lock their chunks before all others.
    pub(super) fn ask(&self, way: Way, part: u32, refs: &[BlockRef]) {
        let (locked, seen) = self.shared.bytes();
        if locked == seen {
            return;
        }
        let mut wanted = self.shared.lock();
        if wanted.problem.is_some() {
            return;
        }
        if wanted.asked.len() >= ASKED_JOBS_MAX {
            wanted.asked.pop_front();
        }
        wanted.asked.push_back(AskedJob { way, part, refs: refs.to_vec() });
        drop(wanted);
        self.shared.bell.notify_all();
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
            if split.add(segment, copy) && !split.held.iter().any(|held| Arc::ptr_eq(held, segment)) {
                split.held.push(Arc::clone(segment));
            }
        }
        split
    }

    /// Where page-locking stands.
    pub(super) fn progress(&self) -> RegistrationProgress {
        let (bytes_registered, bytes_seen) = self.shared.bytes();
        let (seconds, driver_seconds, bytes_total) = self.shared.work.sums();
        RegistrationProgress {
            segments: self.shared.segments.read().unwrap_or_else(PoisonError::into_inner).len(),
            bytes_seen,
            bytes_registered,
            bytes_total,
            seconds,
            driver_seconds,
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

impl SplitCopies {
    /// Add a copy that lies in `segment`. Returns whether some of it is page-locked.
    fn add(&mut self, segment: &LockedSegment, copy: &CopyOp) -> bool {
        let (mut done, mut any_locked, mut was_loose) = (0, false, false);
        while done < copy.bytes {
            let host = copy.host + done;
            let (bytes, locked) = segment.run(host, copy.bytes - done);
            match self.loose.last_mut() {
                _ if locked => self.locked.push(CopyOp { host, device: copy.device + done as u64, bytes }),
                Some(last) if was_loose => last.bytes += bytes,
                _ => self.loose.push(CopyOp { host, device: copy.device + done as u64, bytes }),
            }
            any_locked |= locked;
            was_loose = !locked;
            done += bytes;
        }
        any_locked
    }
}
