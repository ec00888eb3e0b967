//! Queue pairs to one peer, and the reads over them: planned, posted, awaited, and ended before anyone else gets the
//! slots.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use pegaflow_engine::checksum::part_checksum;
use pegaflow_engine::slot_space::SlotSpace;
use pegaflow_engine::{Error, ErrorKind, Result};

use super::node::node_of;
use super::queue_pair::{QueuePair, ReadRequest};
use super::remote::RemoteSegments;
use super::segments::{Registration, Segments};
use super::wait;
use crate::limits::{RDMA_DRAIN_TIME_MAX, RDMA_LOOKS_MAX};
use crate::slot::Target;
use crate::transport::{Channel, PartRead, ReadOutcome, TransportKind};

/// One connection of a channel.
pub(super) struct Lane {
    pub(super) pair: QueuePair,
    /// Number of our device.
    pub(super) device: usize,
    /// Number of the server's port.
    pub(super) their_nic: usize,
}

/// A part that is to be read, in one or several READs.
struct Job {
    /// Its place among the parts of the call.
    at: usize,
    pieces_left: usize,
    failed: bool,
}

/// All of one call.
struct Plan {
    jobs: Vec<Job>,
    /// READs to be posted, by lane, with the number of their job.
    unposted: Vec<VecDeque<(ReadRequest, usize)>>,
    /// Jobs by the numbers of their READs under way.
    posted: BTreeMap<u64, usize>,
    /// Jobs whose bytes are all there and not yet looked at.
    finished: VecDeque<usize>,
    /// Keeps the keys of our segments good until everything has ended.
    _registrations: BTreeMap<u32, Arc<[Registration]>>,
}

impl Plan {
    fn is_over(&self) -> bool {
        self.posted.is_empty() && self.unposted.iter().all(VecDeque::is_empty)
    }

    fn complete(&mut self, id: u64, result: Result<()>, failure: &mut Option<Error>) {
        let Some(number) = self.posted.remove(&id) else { return };
        let job = &mut self.jobs[number];
        job.pieces_left -= 1;
        job.failed |= result.is_err();
        if job.pieces_left == 0 && !job.failed {
            self.finished.push_back(number);
        }
        if let (Err(error), None) = (result, &*failure) {
            *failure = Some(error);
        }
    }
}

pub(super) struct RdmaChannel {
    lanes: Vec<Lane>,
    /// NUMA nodes of our devices.
    nodes: Vec<Option<u32>>,
    remote: RemoteSegments,
    space: Arc<dyn SlotSpace>,
    segments: Arc<Segments>,
    read_bytes_max: u64,
    /// Number of the next READ; none is used twice.
    next_id: u64,
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
}

impl RdmaChannel {
    pub(super) fn new(
        lanes: Vec<Lane>,
        nodes: Vec<Option<u32>>,
        remote: RemoteSegments,
        space: Arc<dyn SlotSpace>,
        segments: Arc<Segments>,
        read_bytes_max: u64,
    ) -> Self {
        Self { lanes, nodes, remote, space, segments, read_bytes_max, next_id: 1, broken: None }
    }

    /// Which READs there are to be, and over which lane each goes. Parts that cannot be read are left out.
    fn plan(&mut self, parts: &[PartRead]) -> Result<Plan> {
        self.remote.learn(parts)?;
        self.segments.follow()?;
        let mut plan = Plan {
            jobs: Vec::new(),
            unposted: self.lanes.iter().map(|_| VecDeque::new()).collect(),
            posted: BTreeMap::new(),
            finished: VecDeque::new(),
            _registrations: BTreeMap::new(),
        };
        let mut queued = vec![0; self.lanes.len()];
        let mut nodes = BTreeMap::new();
        for (at, read) in parts.iter().enumerate() {
            let target = Target::new(&*self.space, read.target, read.part, read.bytes);
            let Some(address) = target.and_then(|target| target.address()) else { continue };
            let Some(number) = self.segments.number_at(address.addr()) else { continue };
            let keys = match plan._registrations.get(&number) {
                Some(keys) => Arc::clone(keys),
                None => {
                    let Some(known) = self.segments.registered(number)? else { continue };
                    plan._registrations.insert(number, Arc::clone(&known.registrations));
                    known.registrations
                }
            };
            let node = *nodes.entry(number).or_insert_with(|| self.node_of(address.addr()));
            let lane = self.lane_for(node, &queued);
            let Some((remote, key)) = self.remote.find(read, self.lanes[lane].their_nic) else { continue };
            let local_key = keys[self.lanes[lane].device].local_key();
            queued[lane] += read.bytes;
            let job = plan.jobs.len();
            let mut pieces = 0;
            for offset in (0..read.bytes).step_by(self.read_bytes_max as usize) {
                let request = ReadRequest {
                    id: self.next_id,
                    local_address: address.expose_provenance() as u64 + offset,
                    local_key,
                    remote_address: remote + offset,
                    remote_key: key,
                    bytes: (read.bytes - offset).min(self.read_bytes_max) as u32,
                };
                self.next_id += 1;
                pieces += 1;
                plan.unposted[lane].push_back((request, job));
            }
            plan.jobs.push(Job { at, pieces_left: pieces, failed: false });
        }
        Ok(plan)
    }

    /// Node of a slot, if it makes a difference.
    fn node_of(&self, address: usize) -> Option<u32> {
        self.nodes.iter().any(|node| *node != self.nodes[0]).then(|| node_of(address)).flatten()
    }

    /// The lane with the least to do; of those near the slot, if there are any.
    fn lane_for(&self, node: Option<u32>, queued: &[u64]) -> usize {
        let near = |lane: usize| node.is_some() && self.nodes[self.lanes[lane].device] == node;
        (0..self.lanes.len()).min_by_key(|&lane| (!near(lane), queued[lane])).unwrap_or(0)
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
            self.post(plan)?;
            let before = plan.posted.len();
            self.poll(plan)?;
            // Devices work on while this thread looks at what has come.
            self.take_finished(plan, parts, arrived, 1);
            if plan.is_over() && plan.finished.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(Error::new(ErrorKind::Busy, "a peer's blocks did not come by RDMA in time"));
            }
            looks = if plan.posted.len() < before || !plan.finished.is_empty() { 0 } else { looks + 1 };
            if looks > RDMA_LOOKS_MAX {
                self.sleep(plan, deadline)?;
                looks = 0;
            }
        }
    }

    fn post(&mut self, plan: &mut Plan) -> Result<()> {
        for (lane, unposted) in self.lanes.iter_mut().zip(&mut plan.unposted) {
            while lane.pair.room() > 0
                && let Some((request, job)) = unposted.front()
            {
                lane.pair.post(request)?;
                plan.posted.insert(request.id, *job);
                unposted.pop_front();
            }
        }
        Ok(())
    }

    fn poll(&mut self, plan: &mut Plan) -> Result<()> {
        let mut failure = None;
        for lane in &mut self.lanes {
            lane.pair.poll(|id, result| plan.complete(id, result, &mut failure))?;
        }
        failure.map_or(Ok(()), Err)
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
        let until = Instant::now() + RDMA_DRAIN_TIME_MAX;
        let mut flushed = self.lanes.iter_mut().all(|lane| lane.pair.flush().is_ok());
        while flushed && self.lanes.iter().any(|lane| lane.pair.is_busy()) {
            let mut failures = None;
            for lane in &mut self.lanes {
                flushed &= lane.pair.poll(|id, result| plan.complete(id, result, &mut failures)).is_ok();
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
