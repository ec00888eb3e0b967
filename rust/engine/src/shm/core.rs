//! What one process holds of one pool. The operations on it are spread over the files of this folder by role.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::Instant;

use crate::error::{Error, ErrorKind, Result};
use crate::key::BlockRef;
use crate::limits::WEIGHT_MILLI_DEFAULT;
use crate::shm::accounts::Counted;
use crate::shm::control::Control;
use crate::shm::evict::EvictQueue;
use crate::shm::extent::{Extents, SegmentKey};
use crate::shm::file::Place;
use crate::shm::free::FreeCursor;
#[cfg(not(loom))]
use crate::shm::gone::Gone;
use crate::shm::home::Home;
use crate::shm::lease::Pins;
use crate::shm::liveness::LockFile;
use crate::shm::lock::{SlowHolders, begin_operation};
use crate::shm::mapping::Mapping;
use crate::shm::namespace::Namespace;
use crate::shm::process::{Member, load};
use crate::shm::reserve::Pending;
use crate::shm::stats::Stats;
use crate::sync::{AtomicU64, LocalU32, LocalU64};
#[cfg(not(loom))]
use crate::tier::TierSeat;
#[cfg(not(loom))]
use crate::traffic::TrafficSeat;

/// What the background thread is asked to do.
#[derive(Default)]
pub(crate) struct Requests {
    pub(crate) grow: BTreeSet<u32>,
    pub(crate) awake: bool,
    pub(crate) stop: bool,
}

/// Extents of each namespace that was asked for.
pub(crate) type ExtentCache = HashMap<u32, Arc<Extents>>;

/// One attached pool.
pub(crate) struct Core {
    pub(crate) name: String,
    pub(crate) place: Place,
    /// Where its segments are.
    pub(crate) home: Home,
    pub(crate) control: Control,
    pub(crate) lock_file: LockFile,
    pub(crate) me: Member,
    /// Thousandths of this instance's weight.
    pub(crate) weight_milli: LocalU64,
    /// Number of the policy by which this process stores blocks.
    pub(crate) policy: LocalU32,
    /// Names of what went; `None` if there is no room for them.
    #[cfg(not(loom))]
    pub(crate) gone: Option<Gone>,
    pub(crate) stats: Stats,
    pub(crate) pins: Pins,
    pub(crate) pending: Mutex<HashMap<BlockRef, Pending>>,
    pub(crate) segments: RwLock<HashMap<SegmentKey, Arc<Mapping>>>,
    pub(crate) extent_cache: Mutex<ExtentCache>,
    pub(crate) used_segments: Mutex<(u64, (usize, bool))>,
    pub(crate) free_cursors: Mutex<HashMap<u32, FreeCursor>>,
    /// By namespace and by the row for which room is made.
    pub(crate) evict_queues: Mutex<HashMap<(u32, u32), EvictQueue>>,
    pub(crate) counted_shares: Mutex<Option<Counted>>,
    pub(crate) grow_error: Mutex<Option<String>>,
    pub(crate) grow_paused_until: Mutex<Option<Instant>>,
    /// Since when the pool has grown smaller for want of memory, and its bytes before.
    pub(crate) memory_awaited: Mutex<Option<(Instant, u64)>>,
    /// Since when another process has been growing what this one wants to grow, and when that was seen last.
    pub(crate) growth_seen: Mutex<Option<(Instant, Instant)>>,
    /// Node near which memory of each part is to lie, by namespace, where it is known.
    pub(crate) nodes: Mutex<HashMap<u32, Vec<Option<u32>>>>,
    /// Segments for which that did not work.
    pub(crate) placing_failures: AtomicU64,
    /// Until when no extent of another namespace is looked for, but for a namespace that has none.
    pub(crate) moves_paused_until: Mutex<Option<Instant>>,
    pub(crate) reaping: Mutex<()>,
    /// Dead leaders of living followers, epochs by row, for which this process has done what there is to do meanwhile.
    pub(crate) settled_leaders: Mutex<HashMap<u32, u64>>,
    /// Dead members by row that could not be settled: epoch, and when that was tried last.
    pub(crate) unsettled: Mutex<HashMap<u32, (u64, Instant)>>,
    pub(crate) slow_holders: SlowHolders,
    pub(crate) requests: Mutex<Requests>,
    #[cfg(not(loom))]
    pub(crate) tier: TierSeat,
    #[cfg(not(loom))]
    pub(crate) traffic: TrafficSeat,
    pub(crate) bell: Condvar,
}

impl Core {
    pub(crate) fn new(name: &str, place: Place, home: Home, control: Control, lock_file: LockFile, me: Member) -> Self {
        let slots_max = control.geometry().slots_max as usize;
        Self {
            name: name.to_owned(),
            place,
            home,
            control,
            lock_file,
            me,
            weight_milli: LocalU64::new(WEIGHT_MILLI_DEFAULT),
            policy: LocalU32::new(0),
            #[cfg(not(loom))]
            gone: None,
            stats: Stats::default(),
            pins: Pins::new(slots_max),
            pending: Mutex::default(),
            segments: RwLock::default(),
            extent_cache: Mutex::default(),
            used_segments: Mutex::new((u64::MAX, (0, true))),
            free_cursors: Mutex::default(),
            evict_queues: Mutex::default(),
            counted_shares: Mutex::default(),
            grow_error: Mutex::default(),
            grow_paused_until: Mutex::default(),
            memory_awaited: Mutex::default(),
            growth_seen: Mutex::default(),
            nodes: Mutex::default(),
            placing_failures: AtomicU64::new(0),
            moves_paused_until: Mutex::default(),
            reaping: Mutex::default(),
            settled_leaders: Mutex::default(),
            unsettled: Mutex::default(),
            slow_holders: SlowHolders::default(),
            requests: Mutex::default(),
            #[cfg(not(loom))]
            tier: TierSeat::default(),
            #[cfg(not(loom))]
            traffic: TrafficSeat::default(),
            bell: Condvar::new(),
        }
    }

    /// Every operation starts here: a forked child must not touch the parent's locks and leases.
    pub(crate) fn check_usable(&self) -> Result<()> {
        begin_operation();
        if self.lock_file.forked() {
            return Err(Error::new(
                ErrorKind::Forked,
                format!("pool '{}' was opened before fork(): open it again in this process", self.name),
            ));
        }
        if !self.is_member() {
            return Err(Error::new(
                ErrorKind::Closed,
                format!(
                    "pool '{}' took this process for dead and has given its place away, since its lock was lost (does \
                     something here close descriptors that it did not open?): open the pool again",
                    self.name
                ),
            ));
        }
        Ok(())
    }

    /// Whether the row of this process still is its own. While it holds its lock nobody takes it, however long it
    /// stands still; but a process that closes descriptors of others loses the lock without knowing.
    pub(crate) fn is_member(&self) -> bool {
        let (epoch, state) = load(&self.control.processes()[self.me.row as usize]);
        !self.lock_file.forked() && epoch == self.me.epoch && state.may_live()
    }

    /// Have the background thread grow `ns`.
    pub(crate) fn ask_to_grow(&self, ns: Namespace) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        if requests.grow.insert(ns.0) {
            self.bell.notify_all();
        }
    }

    /// Have the background thread look around now.
    pub(crate) fn wake(&self) {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).awake = true;
        self.bell.notify_all();
    }
}

impl Drop for Core {
    /// Leave the pool, once no thread of this process can copy for it any more. The same steps as after a death; what
    /// followers still write stays until they are gone.
    fn drop(&mut self) {
        // In a model nothing leaves a pool by going out of scope: it says when a process does.
        if !cfg!(loom) && self.is_member() {
            self.reap_row(self.me);
        }
    }
}
