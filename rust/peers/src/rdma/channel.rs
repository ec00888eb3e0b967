//! Queue pairs to one peer, and the reads over them: planned, posted, awaited, and ended before anyone else gets the
//! slots.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use pegaflow_engine::checksum::part_checksum;
use pegaflow_engine::slot_space::SlotSpace;
use pegaflow_engine::{Error, ErrorKind, Result};

use super::client::TheirEnds;
use super::node::node_of;
use super::queue_pair::{QueuePair, ReadRequest};
use super::remote::RemoteSegments;
use super::segments::{Registration, Segments};
use super::wait;
use crate::limits::{RDMA_DRAIN_TIME_MAX, RDMA_LOOKS_MAX, RDMA_WORN_TIME_MAX};
use crate::slot::Target;
use crate::transport::{Channel, PartRead, ReadOutcome, TransportKind};

/// One connection of a channel.
pub(super) struct Lane {
    pub(super) pair: QueuePair,
    /// Number of our device, and number of the server's port.
    pub(super) way: (usize, usize),
    /// Since when nothing is read over it any more.
    dead_since: Option<Instant>,
}

impl Lane {
    pub(super) fn new(pair: QueuePair, way: (usize, usize)) -> Self {
        Self { pair, way, dead_since: None }
    }

    fn is_dead(&self) -> bool {
        self.dead_since.is_some()
    }
}

/// A part that is to be read, in one or several READs.
struct Job {
    /// Its place among the parts of the call.
    at: usize,
    /// Of the slot's part.
    address: u64,
    /// Keys of our segment, by device. They stay good until everything has ended.
    keys: Arc<[Registration]>,
    pieces_left: usize,
}

/// What one READ brings.
#[derive(Clone, Copy)]
struct Piece {
    job: usize,
    offset: u64,
    bytes: u64,
}

/// All of one call.
struct Plan {
    jobs: Vec<Job>,
    /// What is to be posted, by lane.
    unposted: Vec<VecDeque<Piece>>,
    /// What is under way, by the numbers of the READs.
    posted: BTreeMap<u64, Piece>,
    /// What lanes have not brought that are dead now.
    stranded: Vec<Piece>,
    /// Jobs whose bytes are all there and not yet looked at.
    finished: VecDeque<usize>,
}

impl Plan {
    fn is_over(&self) -> bool {
        self.posted.is_empty() && self.stranded.is_empty() && self.unposted.iter().all(VecDeque::is_empty)
    }

    fn complete(&mut self, id: u64, is_there: bool) {
        let Some(piece) = self.posted.remove(&id) else { return };
        if !is_there {
            self.stranded.push(piece);
            return;
        }
        let job = &mut self.jobs[piece.job];
        job.pieces_left -= 1;
        if job.pieces_left == 0 {
            self.finished.push_back(piece.job);
        }
    }
}

pub(super) struct RdmaChannel {
    lanes: Vec<Lane>,
    /// Behind `lanes`: the ends that read go first.
    _their_ends: TheirEnds,
    /// NUMA nodes of our devices.
    nodes: Vec<Option<u32>>,
    remote: RemoteSegments,
    space: Arc<dyn SlotSpace>,
    segments: Arc<Segments>,
    read_bytes_max: u64,
    /// Number of the next READ; none is used twice.
    next_id: u64,
    /// Since when not everything is used that could be.
    worn_since: Option<Instant>,
    broken: Option<Error>,
}

impl Channel for RdmaChannel {
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }

    fn read(&mut self, parts: &[PartRead], deadline: Instant) -> ReadOutcome {
        let mut arrived = vec![None; parts.len()];
        let mut quiet = true;
        if self.broken.is_none() {
            match self.plan(parts) {
                Ok(mut plan) => {
                    if let Err(error) = self.run(&mut plan, parts, deadline, &mut arrived) {
                        self.broken = Some(error);
                        quiet = self.drain(&mut plan);
                        self.take_finished(&mut plan, parts, &mut arrived, usize::MAX);
                    }
                }
                Err(error) => self.broken = Some(error),
            }
        }
        ReadOutcome { arrived, quiet, broken: self.broken.clone() }
    }

    fn is_worn(&self) -> bool {
        self.worn_since.is_some_and(|since| since.elapsed() >= RDMA_WORN_TIME_MAX)
    }

    fn keep(&mut self) {
        self.worn_since = Some(Instant::now());
    }
}

impl RdmaChannel {
    /// `is_whole`: there is a lane on each way that there could be.
    pub(super) fn new(
        (lanes, their_ends): (Vec<Lane>, TheirEnds),
        is_whole: bool,
        nodes: Vec<Option<u32>>,
        remote: RemoteSegments,
        space: Arc<dyn SlotSpace>,
        segments: Arc<Segments>,
        read_bytes_max: u64,
    ) -> Self {
        let worn_since = (!is_whole).then(Instant::now);
        Self {
            lanes,
            _their_ends: their_ends,
            nodes,
            remote,
            space,
            segments,
            read_bytes_max,
            next_id: 1,
            worn_since,
            broken: None,
        }
    }

    /// Which READs there are to be, and over which lane each goes. Parts that cannot be read are left out.
    fn plan(&mut self, parts: &[PartRead]) -> Result<Plan> {
        self.remote.learn(parts)?;
        self.segments.follow()?;
        let mut plan = Plan {
            jobs: Vec::new(),
            unposted: self.lanes.iter().map(|_| VecDeque::new()).collect(),
            posted: BTreeMap::new(),
            stranded: Vec::new(),
            finished: VecDeque::new(),
        };
        let mut queued = vec![0; self.lanes.len()];
        let (mut nodes, mut registered) = (BTreeMap::new(), BTreeMap::new());
        for (at, read) in parts.iter().enumerate() {
            let target = Target::new(&*self.space, read.target, read.part, read.bytes);
            let Some(address) = target.and_then(|target| target.address()) else { continue };
            let Some(number) = self.segments.number_at(address.addr()) else { continue };
            let keys = match registered.get(&number) {
                Some(keys) => Arc::clone(keys),
                None => {
                    let Some(known) = self.segments.registered(number)? else { continue };
                    registered.insert(number, Arc::clone(&known.registrations));
                    known.registrations
                }
            };
            let node = *nodes.entry(number).or_insert_with(|| self.node_of(address.addr()));
            let lane = self.lane_for(node, &queued);
            if self.remote.find(read, self.lanes[lane].way.1).is_none() {
                continue;
            }
            queued[lane] += read.bytes;
            let (job, before) = (plan.jobs.len(), plan.unposted[lane].len());
            plan.unposted[lane].extend((0..read.bytes).step_by(self.read_bytes_max as usize).map(|offset| {
                let bytes = (read.bytes - offset).min(self.read_bytes_max);
                Piece { job, offset, bytes }
            }));
            let pieces_left = plan.unposted[lane].len() - before;
            plan.jobs.push(Job { at, address: address.expose_provenance() as u64, keys, pieces_left });
        }
        Ok(plan)
    }

    /// Node of a slot, if it makes a difference.
    fn node_of(&self, address: usize) -> Option<u32> {
        self.nodes.iter().any(|node| *node != self.nodes[0]).then(|| node_of(address)).flatten()
    }

    /// The lane with the least to do; of those near the slot, if there are any. None that is dead.
    fn lane_for(&self, node: Option<u32>, queued: &[u64]) -> usize {
        let near = |lane: &Lane| node.is_some() && self.nodes[lane.way.0] == node;
        let living = self.lanes.iter().enumerate().filter(|(_, lane)| !lane.is_dead());
        living.min_by_key(|(number, lane)| (!near(lane), queued[*number])).map_or(0, |(number, _)| number)
    }

    /// Read everything. An error: the channel cannot be used again, and something may still be under way.
    fn run(
        &mut self,
        plan: &mut Plan,
        parts: &[PartRead],
        deadline: Instant,
        arrived: &mut [Option<u64>],
    ) -> Result<()> {
        let mut looks = 0;
        loop {
            self.post(plan, parts)?;
            let before = plan.posted.len();
            self.poll(plan)?;
            // Devices work on while this thread looks at what has come.
            self.take_finished(plan, parts, arrived, 1);
            if plan.is_over() && plan.finished.is_empty() {
                return Ok(());
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(Error::new(ErrorKind::Busy, "a peer's blocks did not come by RDMA in time"));
            }
            let until = self.last_moment(deadline);
            if now >= until {
                return Err(Error::new(
                    ErrorKind::Device,
                    "an RDMA device does not end what it reads from a dead port",
                ));
            }
            looks = if plan.posted.len() < before || !plan.finished.is_empty() { 0 } else { looks + 1 };
            if looks > RDMA_LOOKS_MAX {
                self.sleep(plan, until)?;
                looks = 0;
            }
        }
    }

    fn post(&mut self, plan: &mut Plan, parts: &[PartRead]) -> Result<()> {
        for number in 0..self.lanes.len() {
            if let Err(error) = self.post_to(number, plan, parts) {
                self.give_way_up(self.lanes[number].way, error, plan)?;
            }
        }
        Ok(())
    }

    fn post_to(&mut self, number: usize, plan: &mut Plan, parts: &[PartRead]) -> Result<()> {
        let lane = &mut self.lanes[number];
        while lane.pair.room() > 0
            && let Some(piece) = plan.unposted[number].front()
        {
            let job = &plan.jobs[piece.job];
            if let Some((remote_address, remote_key)) = self.remote.find(&parts[job.at], lane.way.1) {
                lane.pair.post(&ReadRequest {
                    id: self.next_id,
                    local_address: job.address + piece.offset,
                    local_key: job.keys[lane.way.0].local_key(),
                    remote_address: remote_address + piece.offset,
                    remote_key,
                    bytes: piece.bytes as u32,
                })?;
                plan.posted.insert(self.next_id, *piece);
                self.next_id += 1;
            }
            plan.unposted[number].pop_front();
        }
        Ok(())
    }

    /// Take what has completed. What failed goes another way.
    fn poll(&mut self, plan: &mut Plan) -> Result<()> {
        let mut failures = Vec::new();
        for lane in &mut self.lanes {
            let mut failure = None;
            lane.pair.poll(|id, result| {
                plan.complete(id, result.is_ok());
                failure = failure.take().or(result.err());
            })?;
            failures.extend(failure.filter(|_| !lane.is_dead()).map(|error| (lane.way, error)));
        }
        for (way, error) in failures {
            self.give_way_up(way, error, plan)?;
        }
        for piece in std::mem::take(&mut plan.stranded) {
            let queued: Vec<u64> = plan.unposted.iter().map(|pieces| pieces.len() as u64).collect();
            plan.unposted[self.lane_for(None, &queued)].push_back(piece);
        }
        Ok(())
    }

    /// Read nothing more from this port over there by this one of ours: all that is under way there ends in error, and
    /// only then goes another way. An error: there is none.
    fn give_way_up(&mut self, way: (usize, usize), error: Error, plan: &mut Plan) -> Result<()> {
        let is_of_it = |lane: &Lane| lane.way == way && !lane.is_dead();
        if !self.lanes.iter().any(is_of_it) {
            return Ok(());
        }
        for (number, lane) in self.lanes.iter_mut().enumerate().filter(|(_, lane)| is_of_it(lane)) {
            lane.dead_since = Some(Instant::now());
            plan.stranded.extend(plan.unposted[number].drain(..));
            lane.pair.flush()?;
        }
        if self.lanes.iter().all(Lane::is_dead) {
            return Err(error);
        }
        log::info!("pegaflow: a peer is read from by fewer RDMA ports for a while: {error}");
        self.worn_since.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Until when completions are waited for.
    fn last_moment(&self, deadline: Instant) -> Instant {
        last_moment(self.lanes.iter().map(|lane| (lane.dead_since, lane.pair.is_busy())), deadline)
    }

    /// Wait for a completion, `until` at most.
    fn sleep(&mut self, plan: &mut Plan, until: Instant) -> Result<()> {
        let mut descriptors = Vec::new();
        for lane in &mut self.lanes {
            if lane.pair.is_busy() {
                descriptors.push(lane.pair.arm()?);
            }
        }
        // What completed before the notice was asked for gives none.
        let before = plan.posted.len();
        self.poll(plan)?;
        if plan.posted.len() == before {
            wait::readable(&descriptors, until);
        }
        self.lanes.iter_mut().for_each(|lane| lane.pair.take_notices());
        Ok(())
    }

    /// Hash up to `count` parts that are all there, and report them.
    fn take_finished(&self, plan: &mut Plan, parts: &[PartRead], arrived: &mut [Option<u64>], count: usize) {
        for _ in 0..count {
            let Some(number) = plan.finished.pop_front() else { return };
            let at = plan.jobs[number].at;
            let read = &parts[at];
            let target = Target::new(&*self.space, read.target, read.part, read.bytes);
            let checksum = |mut target: Target<'_>| {
                let bytes = target.bytes();
                target.piece(0, bytes).map(|bytes| part_checksum(read.part, bytes))
            };
            arrived[at] = target.and_then(checksum);
        }
    }

    /// End everything that is under way. Whether that worked: if not, devices may still write into slots.
    fn drain(&mut self, plan: &mut Plan) -> bool {
        plan.unposted.iter_mut().for_each(VecDeque::clear);
        plan.stranded.clear();
        let until = Instant::now() + RDMA_DRAIN_TIME_MAX;
        let mut flushed = self.lanes.iter_mut().all(|lane| lane.pair.flush().is_ok());
        while flushed && self.lanes.iter().any(|lane| lane.pair.is_busy()) {
            for lane in &mut self.lanes {
                flushed &= lane.pair.poll(|id, result| plan.complete(id, result.is_ok())).is_ok();
            }
            if Instant::now() >= until {
                flushed = false;
            }
            std::thread::sleep(DRAIN_LOOK);
        }
        if flushed && plan.posted.is_empty() {
            return true;
        }
        log::warn!("pegaflow: reads of an RDMA device do not end: its queue pairs are destroyed");
        end_within(std::mem::take(&mut self.lanes), RDMA_DRAIN_TIME_MAX)
    }
}

/// `deadline`, or before it when a lane that is dead since then and busy has had the time that there is for ending.
fn last_moment(lanes: impl Iterator<Item = (Option<Instant>, bool)>, deadline: Instant) -> Instant {
    let ends =
        lanes.filter_map(|(dead_since, is_busy)| dead_since.filter(|_| is_busy).map(|at| at + RDMA_DRAIN_TIME_MAX));
    ends.min().map_or(deadline, |end| end.min(deadline))
}

/// How often is looked whether everything has ended.
const DRAIN_LOOK: Duration = Duration::from_micros(200);

/// Destroy queue pairs, on a thread of its own since the device may never answer. Whether they all were within `time`.
fn end_within(lanes: Vec<Lane>, time: Duration) -> bool {
    let (tell, told) = mpsc::channel();
    let thread = std::thread::Builder::new().name("pega-peer-end".into()).spawn(move || {
        // All of them, even if the first cannot be.
        let failures = lanes.into_iter().filter_map(|mut lane| (!lane.pair.end()).then_some(lane)).count();
        let _nobody_may_wait = tell.send(failures == 0);
    });
    thread.is_ok() && told.recv_timeout(time).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_lane_that_does_not_end_is_not_waited_for_until_the_deadline() {
        let now = Instant::now();
        let (deadline, earlier) = (now + RDMA_DRAIN_TIME_MAX * 10, now + RDMA_DRAIN_TIME_MAX / 2);
        let moment = |lanes: &[(Option<Instant>, bool)]| last_moment(lanes.iter().copied(), deadline);
        assert_eq!(moment(&[(None, true), (None, false)]), deadline);
        assert_eq!(moment(&[(None, true), (Some(now), false)]), deadline, "all of it has ended");
        assert_eq!(moment(&[(None, true), (Some(earlier), true), (Some(now), true)]), now + RDMA_DRAIN_TIME_MAX);
        assert_eq!(moment(&[(Some(deadline), true)]), deadline);
    }
}
