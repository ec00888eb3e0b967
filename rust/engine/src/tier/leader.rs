//! The thread that serves: it waits until nobody leads, opens the files, and drives the store until it is told to stop,
//! its process was taken for dead, or the disks fail.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ask::TierState;
use super::gauges::Gauges;
use super::hints::Mirror;
use super::options::TierOptions;
use super::requests::Requests;
use super::resets::KnownNamespaces;
use super::segment::Segment;
use super::slots::SlotTarget;
use super::spill::Spill;
use crate::error::{ErrorKind, Result};
use crate::limits::{SSD_LEAD_INTERVAL, SSD_OPEN_RETRY_PAUSE, SSD_OPEN_WAIT_MAX};
use crate::shm::clock::boot_ms;
use crate::shm::core::Core;
use crate::shm::lock::begin_operation;
use crate::ssd::{Event, Store};
use crate::sync::{AcqRel, Relaxed, Release, SeqCst};

/// Opens the files.
pub(crate) type Opener = Box<dyn Fn() -> Result<Store<SlotTarget>> + Send>;

/// Longest wait for a disk in one round: others ask meanwhile.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
/// Pause of a round in which nothing happened, and of one long after anything did.
const IDLE_PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(5)];
/// After so long without anything to do the pauses are longer.
const IDLE_AFTER: Duration = Duration::from_secs(1);

/// Serve until told to stop.
pub(crate) fn run(core: &Arc<Core>, segment: &Arc<Segment>, options: &TierOptions, open: &Opener) {
    let mut retry_at = Instant::now();
    while core.tier.goes_on() && core.is_member() {
        begin_operation();
        if Instant::now() < retry_at || !take_lead(core, segment) {
            core.tier.pause(SSD_LEAD_INTERVAL);
            continue;
        }
        // Outside of what may panic, since others wait for what it holds.
        let mut requests = Requests::new(core);
        let led = catch_unwind(AssertUnwindSafe(|| lead(core, segment, options, open, &mut requests)));
        if let Ok(Err(error)) = &led {
            core.tier.complain(&error.to_string());
            retry_at = Instant::now() + SSD_OPEN_RETRY_PAUSE;
        }
        if core.is_member() {
            requests.end_all(core, segment);
            end_lead(core, segment, if led.is_ok() { TierState::None } else { TierState::Off });
            let _mine = segment.header().leader.compare_exchange(core.me.encode(), 0, AcqRel, Relaxed);
        }
        if led.is_err() {
            core.tier.complain("its SSD thread has failed by a defect: restart it, and report what it has logged");
            return;
        }
    }
}

fn leads(core: &Core, segment: &Segment) -> bool {
    segment.header().leader.load(SeqCst) == core.me.encode()
}

/// Nothing is served any more, unless somebody else leads by now.
pub(super) fn end_lead(core: &Core, segment: &Segment, state: TierState) {
    if leads(core, segment) {
        segment.header().alive_ms.store(0, Relaxed);
        set_state(segment, state);
        segment.clear_epochs();
    }
}

fn take_lead(core: &Core, segment: &Segment) -> bool {
    let leader = &segment.header().leader;
    let word = leader.load(SeqCst);
    if word != 0 && !core.is_dead(word) {
        return false;
    }
    let taken = leader.compare_exchange(word, core.me.encode(), SeqCst, Relaxed).is_ok();
    if taken {
        crate::crash_point::pass("ssd.led");
    }
    taken
}

fn set_state(segment: &Segment, state: TierState) {
    let word = &segment.header().state;
    let term = (word.load(Relaxed) >> 8) + u64::from(state == TierState::Recovering);
    word.store(term << 8 | state as u64, Release);
}

fn lead(
    core: &Arc<Core>,
    segment: &Arc<Segment>,
    options: &TierOptions,
    open: &Opener,
    requests: &mut Requests,
) -> Result<()> {
    segment.header().alive_ms.store(0, Relaxed);
    set_state(segment, TierState::Recovering);
    segment.clear_epochs();
    segment.clear_hints();
    segment.header().waiting_since_ms.store(0, Relaxed);
    segment.header().queued_bytes.store(0, Relaxed);
    crate::crash_point::pass("ssd.cleared");
    let Some(store) = open_in_time(core, open)? else { return Ok(()) };
    core.tier.clear_problem();
    crate::crash_point::pass("ssd.opened");
    store.view().set_watch(Box::new(Mirror(Arc::clone(segment))));
    segment.note_files(store.identity());
    Session {
        core,
        segment,
        store,
        known: KnownNamespaces::default(),
        requests,
        spill: Spill::new(core, options),
        gauges: Gauges::new(),
        recovering: true,
    }
    .run()
}

/// A dead leader's locks go when the kernel has ended its I/O: until then the files are in use. `None`: told to stop.
fn open_in_time(core: &Core, open: &Opener) -> Result<Option<Store<SlotTarget>>> {
    let started = Instant::now();
    loop {
        match open() {
            Ok(store) => return Ok(Some(store)),
            Err(error) if error.kind() != ErrorKind::InUse || started.elapsed() > SSD_OPEN_WAIT_MAX => {
                return Err(error);
            }
            Err(_) => core.tier.pause(Duration::from_millis(10)),
        }
        if !core.tier.goes_on() || !core.is_member() {
            return Ok(None);
        }
    }
}

/// One time of leading.
struct Session<'a> {
    core: &'a Arc<Core>,
    segment: &'a Arc<Segment>,
    store: Store<SlotTarget>,
    known: KnownNamespaces,
    requests: &'a mut Requests,
    spill: Spill,
    gauges: Gauges,
    recovering: bool,
}

impl Session<'_> {
    fn run(mut self) -> Result<()> {
        let mut busy_at = Instant::now();
        while self.core.tier.goes_on() {
            if !self.core.is_member() {
                // Its slots are others' by now: nothing of the pool is touched any more.
                return Ok(());
            }
            if !leads(self.core, self.segment) {
                // Damaged: whoever took the lead waits for the files.
                return self.close();
            }
            begin_operation();
            self.segment.header().alive_ms.store(boot_ms().max(1), Relaxed);
            let forgot = self.segment.follow_resets(self.core, &mut self.known, &mut self.store);
            if let Err(error) = forgot {
                log::warn!("pegaflow: the SSD tier is off: {error}");
                self.go_off();
                return Ok(());
            }
            if self.store.is_off() {
                self.go_off();
                return Ok(());
            }
            if self.recovering {
                self.recover();
            }
            if self.round() {
                busy_at = Instant::now();
            } else {
                let long_idle = busy_at.elapsed() > IDLE_AFTER;
                self.core.tier.pause(IDLE_PAUSES[usize::from(long_idle)]);
            }
        }
        self.close()
    }

    fn recover(&mut self) {
        let progress = self.store.recover_some(BUSY_PAUSE);
        let header = self.segment.header();
        header.zones_done.store(progress.zones_done as u64, Relaxed);
        header.zones.store(progress.zones as u64, Relaxed);
        if progress.zones_done == progress.zones {
            self.recovering = false;
            set_state(self.segment, TierState::Serving);
            crate::crash_point::pass("ssd.serving");
            log::info!("pegaflow: the SSD tier of pool {} has {} blocks", self.core.name, self.store.view().records());
        }
    }

    /// Whether anything happened or is on its way.
    fn round(&mut self) -> bool {
        let mut busy = self.recovering;
        busy |= self.requests.round(self.core, self.segment, &mut self.known, &mut self.store);
        if !self.recovering {
            busy |= self.spill.round(self.core, self.segment, &mut self.known, &mut self.store);
        }
        let in_flight = self.store.is_busy();
        // While there is more to start, what has ended is only taken in.
        let wait = if in_flight && !busy { BUSY_PAUSE } else { Duration::ZERO };
        for event in self.store.poll(wait) {
            busy = true;
            match event {
                Event::Read(ticket, _, outcome) => self.requests.read_ended(self.core, self.segment, ticket, outcome),
                Event::Written(ticket) => self.spill.written(self.segment, ticket, true),
                Event::Lost(ticket) => self.spill.written(self.segment, ticket, false),
            }
        }
        let queued_bytes = self.requests.queued_bytes();
        self.gauges.round(self.segment.header(), &self.store, queued_bytes, self.requests.reads());
        busy || in_flight
    }

    /// The disks failed: nothing is hinted or served any more. Requests are answered with what is there.
    fn go_off(self) {
        let Session { core, segment, store, requests, mut gauges, .. } = self;
        end_lead(core, segment, TierState::Off);
        gauges.round(segment.header(), &store, 0, 0);
        // With the store go the reads, and what they were for can be given back.
        drop(store);
        segment.clear_hints();
        requests.end_all(core, segment);
        while core.tier.goes_on() && core.is_member() && leads(core, segment) {
            begin_operation();
            for taken in segment.take_asked(true) {
                segment.answer(taken.asking, 0);
            }
            segment.free_entries_of_dead(core);
            core.tier.pause(SSD_LEAD_INTERVAL);
        }
    }

    /// Told to stop: what was queued is written.
    fn close(self) -> Result<()> {
        let Session { core, segment, store, requests, .. } = self;
        end_lead(core, segment, TierState::None);
        let closed = store.close();
        requests.end_all(core, segment);
        closed
    }
}
