//! One direction of transfer: jobs in order, cut into pieces, several pieces on their way at a time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::copy::JobId;
use crate::limits::FOLLOWED_PIECES_MAX;
use crate::slot_space::SlotSpace;

use super::board::Job;
use super::driver::{Driver, DriverError, DriverResult, Event, Way};
use super::events::EventPool;
use super::moving::MovingTime;
use super::options::CudaOptions;
use super::plan::{Piece, PieceBlock, packed_stride};
use super::registration::Registration;
use super::ring::{CpuCopier, CpuCopy};
use super::route::{Route, Trip};
use super::tables::LayoutTables;
use super::tally::Tally;

/// What both lanes use.
pub(super) struct Tools {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) space: Arc<dyn SlotSpace>,
    pub(super) events: Arc<EventPool>,
    pub(super) registration: Arc<Registration>,
    pub(super) tally: Arc<Tally>,
    pub(super) options: CudaOptions,
    pub(super) tables: LayoutTables,
    pub(super) cpu: CpuCopier,
}

/// More pieces than the device gets done between two looks.
const PLENTY_PIECES: usize = 4;

/// How often a device is asked that everybody waits for.
const DRAIN_INTERVAL: Duration = Duration::from_micros(200);

/// A piece that the device is working on.
struct Flight {
    job: u64,
    piece: Piece,
    trip: Trip,
    /// Whether it failed and only waits for what was queued of it.
    failed: bool,
}

/// How far a followed job was handed to the device.
pub(super) struct Staged {
    pub(super) job: JobId,
    /// One event per stage.
    pub(super) events: Vec<Event>,
    /// Whether no stage is left, and nothing failed.
    pub(super) all: bool,
}

/// See the top of this file.
pub(super) struct Lane {
    way: Way,
    route: Route,
    flights: VecDeque<Flight>,
    /// A piece that has to wait for a ring buffer, and its job.
    waiting: Option<(u64, Piece)>,
    jobs: VecDeque<Job>,
    staged: Vec<Staged>,
    /// Not before this, lest saves move more bytes than they may.
    paced_until: Option<Instant>,
    moving: MovingTime,
    query_failed: bool,
}

impl Lane {
    pub(super) fn new(way: Way, driver: &Arc<dyn Driver>, options: &CudaOptions) -> DriverResult<Self> {
        Ok(Self {
            way,
            route: Route::new(way, driver, options)?,
            flights: VecDeque::new(),
            waiting: None,
            jobs: VecDeque::new(),
            staged: Vec::new(),
            paced_until: None,
            moving: MovingTime::default(),
            query_failed: false,
        })
    }

    /// Make what takes long to make before a job waits for it.
    pub(super) fn prepare(&mut self, tools: &Tools) {
        self.route.prepare(&tools.tally);
    }

    /// Add a job behind the others.
    pub(super) fn push(&mut self, job: Job) {
        self.jobs.push_back(job);
    }

    /// Take in what is done, queue what can be queued, return the jobs that are over. An error is the end of the
    /// device.
    pub(super) fn advance(&mut self, tools: &mut Tools) -> DriverResult<Vec<Job>> {
        self.land_all(tools)?;
        while self.submit(tools)? {}
        self.note_moving(tools)?;
        let mut over = Vec::new();
        while self.jobs.front().is_some_and(Job::is_over) {
            over.extend(self.jobs.pop_front());
        }
        Ok(over)
    }

    /// Count the time for which bytes are on their way: pieces were queued, and what they wait for is over.
    fn note_moving(&mut self, tools: &Tools) -> DriverResult<()> {
        let first = self.flights.front().map(|flight| flight.job);
        let job = self.jobs.iter_mut().find(|job| Some(job.id) == first);
        let moves = match job {
            None => false,
            Some(job) => {
                if let Some(event) = job.awaited {
                    match tools.driver.query(event) {
                        Ok(true) => job.awaited = None,
                        Err(error) if error.is_sticky() => return Err(error),
                        // It is only counted: the next look asks again.
                        Ok(false) | Err(_) => {}
                    }
                }
                job.awaited.is_none()
            }
        };
        let tally = &tools.tally;
        let counter = if self.way == Way::ToHost { &tally.save_moving_us } else { &tally.load_moving_us };
        Tally::add(counter, self.moving.look(moves, Instant::now()));
        Ok(())
    }

    /// Followed jobs that were handed to the device further than before.
    pub(super) fn take_staged(&mut self) -> Vec<Staged> {
        std::mem::take(&mut self.staged)
    }

    /// Whether there is a job.
    pub(super) fn is_busy(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// Whether the device has enough to do that it need not be asked soon.
    pub(super) fn has_plenty(&self) -> bool {
        self.waiting.is_none() && self.flights.len() >= PLENTY_PIECES
    }

    /// When to look again, if not at once when the device has done something.
    pub(super) fn rests_until(&self) -> Option<Instant> {
        self.paced_until.filter(|_| self.flights.is_empty())
    }

    /// Wait until the device has done all that was queued in this direction, noted or not. An error is the end of the
    /// device.
    pub(super) fn drain(&mut self, tools: &Tools) -> DriverResult<()> {
        let mut trip = Trip::default();
        let outcome = loop {
            let over = match self.route.is_fenced(&trip) {
                true => trip.fences.last().map_or(Ok(true), |event| tools.driver.query(*event)),
                false => self.route.fence(&tools.events, &mut trip).map(|()| false),
            };
            match over {
                Ok(true) if trip.fences.is_empty() => break Ok(()),
                Ok(true) => trip.passed.extend(trip.fences.pop()),
                Err(error) if error.is_sticky() => break Err(error),
                Ok(false) | Err(_) => std::thread::sleep(DRAIN_INTERVAL),
            }
        };
        trip.events().for_each(|event| tools.events.give(event));
        outcome
    }

    /// The device is done, or lost: all jobs, failed. What is still queued never runs.
    pub(super) fn abandon(&mut self, events: &EventPool, reason: &str) -> Vec<Job> {
        for flight in self.flights.drain(..) {
            flight.trip.events().for_each(|event| events.give(event));
        }
        self.waiting = None;
        self.staged.clear();
        let mut jobs: Vec<Job> = self.jobs.drain(..).collect();
        jobs.iter_mut().for_each(|job| {
            job.flights = 0;
            job.fail_whole(reason.to_owned());
        });
        jobs
    }

    /// Give everything back. There must be no job.
    pub(super) fn close(&mut self) {
        self.route.close();
    }

    fn land_all(&mut self, tools: &mut Tools) -> DriverResult<()> {
        while let Some(flight) = self.flights.front_mut() {
            if flight.failed && !self.route.is_fenced(&flight.trip) {
                // Whatever was queued before the failure still runs; it is waited for as soon as that is possible.
                match self.route.fence(&tools.events, &mut flight.trip) {
                    Err(error) if !error.is_sticky() => return Ok(()),
                    outcome => outcome?,
                }
            }
            while let Some(event) = flight.trip.fences.last() {
                match tools.driver.query(*event) {
                    Ok(true) => flight.trip.passed.extend(flight.trip.fences.pop()),
                    Ok(false) => return Ok(()),
                    Err(error) if error.is_sticky() => return Err(error),
                    Err(error) => return self.note_query(&error),
                }
            }
            self.query_failed = false;
            if let Some(flight) = self.flights.pop_front() {
                self.land(tools, flight);
            }
        }
        Ok(())
    }

    /// An answer that says nothing about the work that was asked for: ask again.
    fn note_query(&mut self, error: &DriverError) -> DriverResult<()> {
        if !std::mem::replace(&mut self.query_failed, true) {
            log::warn!("pegaflow: a transfer cannot be asked for its state, asking again: {error}");
        }
        Ok(())
    }

    /// The device is done with a piece.
    fn land(&mut self, tools: &mut Tools, flight: Flight) {
        let Flight { job, piece, trip, failed } = flight;
        self.route.release(&trip);
        trip.events().for_each(|event| tools.events.give(event));
        let Some(job) = self.jobs.iter_mut().find(|other| other.id == job) else { return };
        job.flights -= 1;
        let indices = || piece.blocks.iter().map(|block| block.index as u32);
        if failed || !bring_to_slots(tools, job, &piece, &trip.to_slots) {
            job.failed.extend(indices());
            return;
        }
        for block in &piece.blocks {
            let known_failed = piece.from > 0 && job.failed.contains(&(block.index as u32));
            let ok = !known_failed && (!piece.last || complete(self.way, tools, job, block));
            if ok {
                job.bytes += (piece.to - piece.from) as u64;
            } else {
                job.failed.push(block.index as u32);
            }
        }
        let counter = if self.way == Way::ToHost { &tools.tally.bytes_saved } else { &tools.tally.bytes_loaded };
        Tally::add(counter, piece.bytes());
    }

    /// Queue one piece. `false`: there is none, or not now.
    fn submit(&mut self, tools: &mut Tools) -> DriverResult<bool> {
        if self.flights.len() >= self.pieces_max() || self.is_paced() {
            return Ok(false);
        }
        let Some((id, piece)) = self.waiting.take().or_else(|| self.next_piece(tools)) else { return Ok(false) };
        let Some(job) = self.jobs.iter_mut().find(|job| job.id == id) else { return Ok(true) };
        if piece.blocks.is_empty() {
            return Ok(true);
        }
        let mut trip = Trip::default();
        let failed = match self.route.queue(tools, job, &piece, &mut trip) {
            Ok(true) => !mark_stage(&self.route, &tools.events, job, piece.stages, &mut self.staged),
            Ok(false) => {
                self.waiting = Some((id, piece));
                return Ok(false);
            }
            Err(error) => {
                job.fail(error.to_string());
                true
            }
        };
        job.flights += 1;
        self.pace(&tools.options, piece.bytes());
        self.flights.push_back(Flight { job: id, piece, trip, failed });
        Ok(true)
    }

    /// Pieces on their way at most: nobody looks after a followed job's pieces one by one.
    fn pieces_max(&self) -> usize {
        let next = self.waiting.as_ref().map(|(id, _)| *id);
        let job = self.jobs.iter().find(|job| next.map_or(job.cutter.has_more(), |id| job.id == id));
        if job.is_some_and(|job| job.followed) { FOLLOWED_PIECES_MAX } else { self.route.pieces_max() }
    }

    fn pace(&mut self, options: &CudaOptions, bytes: usize) {
        let rate = options.save_bytes_per_second_max;
        if self.way == Way::ToHost && rate > 0 {
            let now = Instant::now();
            let start = self.paced_until.map_or(now, |until| until.max(now));
            self.paced_until = Some(start + Duration::from_secs_f64(bytes as f64 / rate as f64));
        }
    }

    fn is_paced(&self) -> bool {
        self.paced_until.is_some_and(|until| Instant::now() < until)
    }

    /// Cut the next piece and find its slots; those that are stale fail here.
    fn next_piece(&mut self, tools: &Tools) -> Option<(u64, Piece)> {
        let job = self.jobs.iter_mut().find(|job| job.cutter.has_more())?;
        let cut = job.cutter.cut()?;
        let block_bytes = job.layout.block_bytes();
        let mut blocks = Vec::with_capacity(cut.count);
        for index in cut.first..cut.first + cut.count {
            let found = match self.way {
                Way::ToHost => tools.space.write_target(job.refs[index], job.part),
                Way::ToDevice => tools.space.read_source(job.refs[index], job.part),
            };
            match found.filter(|slot| slot.bytes == block_bytes) {
                Some(slot) => {
                    blocks.push(PieceBlock { index, id: job.block_ids[index], slot: slot.address.expose_provenance() });
                }
                None => job.failed.push(index as u32),
            }
        }
        let (last, stages) = (cut.to == block_bytes, job.cutter.stages_cut());
        let stride = packed_stride(cut.to - cut.from);
        Some((job.id, Piece { blocks, from: cut.from, to: cut.to, last, stages, stride }))
    }
}

/// A piece was queued, and with it perhaps a stage of a followed job: put an event behind it. `false`: that failed.
fn mark_stage(route: &Route, events: &EventPool, job: &mut Job, stages: usize, staged: &mut Vec<Staged>) -> bool {
    if !job.followed || stages <= job.stages.len() {
        return true;
    }
    if let Err(error) = route.mark_stage(events, job) {
        job.fail_whole(error.to_string());
        return false;
    }
    let all = !job.cutter.has_more() && job.failed.is_empty() && job.error.is_none();
    staged.push(Staged { job: job.id, events: job.stages.clone(), all });
    true
}

/// Bring what came by a ring buffer's partner to its slots, but not to slots that are no longer reserved for it.
fn bring_to_slots(tools: &mut Tools, job: &Job, piece: &Piece, copies: &[CpuCopy]) -> bool {
    if copies.is_empty() {
        return true;
    }
    let is_reserved = |block: &PieceBlock| {
        let slot = tools.space.write_target(job.refs[block.index], job.part);
        slot.is_some_and(|slot| slot.address.addr() == block.slot)
    };
    let reserved: Vec<bool> = piece.blocks.iter().map(is_reserved).collect();
    let wanted: Vec<CpuCopy> = copies.iter().filter(|copy| reserved[copy.position]).copied().collect();
    // SAFETY: the device is done with the partner, which stays ours until the flight is gone. The slots are reserved,
    // so nobody else touches them; the copies were planned within them.
    unsafe { tools.cpu.copy(&wanted) }
}

/// The last byte of a block has arrived: say so, or see that it is still the block that was asked for.
fn complete(way: Way, tools: &Tools, job: &Job, block: &PieceBlock) -> bool {
    match way {
        Way::ToHost => tools.space.mark_part(job.refs[block.index], job.part, None),
        // The lease ought to keep the block, but its holder may have been declared dead meanwhile.
        Way::ToDevice => tools.space.is_readable(job.refs[block.index]),
    }
}
