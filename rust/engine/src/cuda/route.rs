//! How one piece gets to the other side.
//!
//! Staged: contiguous copies between slots and a ring buffer, a kernel between the buffer and the blocks, ordered by
//! events on the device alone. Direct: one copy per run of bytes. Kernel: a kernel that uses the slots by itself. What
//! is not page-locked always goes staged, through the buffer's partner in host memory.

use std::sync::Arc;

use super::board::Job;
use super::driver::{CopyOp, Driver, DriverError, DriverResult, Event, Kernel, Stream, Way};
use super::events::EventPool;
use super::kernel_params::{KernelBlock, KernelParams};
use super::lane::Tools;
use super::locked_segment::LockedSegment;
use super::options::{Backend, CudaOptions};
use super::plan::{Piece, access_bytes, alignment_of, cut_copy, run_bytes, share_out};
use super::registration::SplitCopies;
use super::ring::{CpuCopy, Ring, by_bounce};
use super::tables::DeviceLayout;
use super::tally::Tally;

/// What is not page-locked goes to the device in so many steps per ring buffer.
const STEPS_PER_BUFFER: usize = 2;

/// What a piece holds while it is on its way.
#[derive(Default)]
pub(super) struct Trip {
    /// The piece is over when all of these are.
    pub(super) fences: Vec<Event>,
    /// Events that are over when the fences are.
    pub(super) passed: Vec<Event>,
    /// What the CPU has to bring from a ring buffer's partner to the slots in the end.
    pub(super) to_slots: Vec<CpuCopy>,
    /// Ring buffer in use, and the event that ends its use.
    ring: Option<(usize, Event)>,
    held: Vec<Arc<LockedSegment>>,
    /// Whether the fences are behind all that was queued.
    fenced: bool,
}

impl Trip {
    /// All its events.
    pub(super) fn events(&self) -> impl Iterator<Item = Event> {
        self.fences.iter().chain(&self.passed).copied()
    }
}

/// Streams and ring of one direction.
pub(super) struct Route {
    way: Way,
    driver: Arc<dyn Driver>,
    kernel_stream: Stream,
    copy_streams: Vec<Stream>,
    ring: Ring,
    pieces_max: usize,
    /// Copy stream that is next in turn.
    turn: usize,
}

impl Route {
    pub(super) fn new(way: Way, driver: &Arc<dyn Driver>, options: &CudaOptions) -> DriverResult<Self> {
        let mut ring = Ring::new(driver, options.ring_buffers, options.ring_buffer_bytes)?;
        let mut streams = Vec::new();
        for _ in 0..=options.copy_streams {
            match driver.create_stream() {
                Ok(stream) => streams.push(stream),
                Err(error) => {
                    streams.into_iter().for_each(|stream| driver.destroy_stream(stream));
                    ring.close();
                    return Err(error);
                }
            }
        }
        let kernel_stream = streams.remove(0);
        let (driver, pieces_max) = (Arc::clone(driver), 2 * options.ring_buffers);
        let route = Self { way, driver, kernel_stream, copy_streams: streams, ring, pieces_max, turn: 0 };
        let kernel = if way == Way::ToDevice { Kernel::Scatter } else { Kernel::Gather };
        // Drivers load kernels at their first launch, which can take long: not while a request waits.
        match route.driver.launch(kernel, 1, &KernelParams::nothing(), kernel_stream) {
            Ok(()) => Ok(route),
            Err(error) => {
                let mut route = route;
                route.close();
                Err(error)
            }
        }
    }

    /// Make what takes long to make before a job waits for it.
    pub(super) fn prepare(&mut self, tally: &Tally) {
        self.ring.prepare(tally);
    }

    /// Pieces on their way at most.
    pub(super) fn pieces_max(&self) -> usize {
        self.pieces_max
    }

    /// Give everything back. Nothing may be on its way.
    pub(super) fn close(&mut self) {
        let streams = self.copy_streams.drain(..).chain([self.kernel_stream]);
        streams.for_each(|stream| self.driver.destroy_stream(stream));
        self.ring.close();
    }

    /// Add an event behind all that was queued so far to the stages of a job.
    pub(super) fn mark_stage(&self, events: &EventPool, job: &mut Job) -> DriverResult<()> {
        for stream in &self.copy_streams {
            let copied = self.mark(events, *stream, &mut job.stage_marks)?;
            self.driver.wait(self.kernel_stream, copied)?;
        }
        self.mark(events, self.kernel_stream, &mut job.stages)?;
        Ok(())
    }

    /// The trip is over: its ring buffer is free.
    pub(super) fn release(&mut self, trip: &Trip) {
        if let Some((index, event)) = trip.ring {
            self.ring.release(index, event);
        }
    }

    /// Whether the trip's fences are behind all that was queued of it.
    pub(super) fn is_fenced(&self, trip: &Trip) -> bool {
        trip.fenced
    }

    /// Put fences behind whatever was queued of a trip that failed underway.
    pub(super) fn fence(&self, events: &EventPool, trip: &mut Trip) -> DriverResult<()> {
        trip.passed.append(&mut trip.fences);
        for stream in self.copy_streams.iter().chain([&self.kernel_stream]) {
            self.mark(events, *stream, &mut trip.fences)?;
        }
        trip.fenced = true;
        Ok(())
    }

    /// Queue all that brings `piece` to the other side. `false`: not before a ring buffer is free; nothing was queued.
    /// After an error, some of it may be queued: see [`Self::fence`].
    pub(super) fn queue(&mut self, tools: &mut Tools, job: &Job, piece: &Piece, trip: &mut Trip) -> DriverResult<bool> {
        let mut packed = tools.registration.split(&piece.packed_copies(self.ring.next().device));
        let backend = self.backend(tools, job);
        if !packed.loose.is_empty() {
            if self.ring.next().busy_until.is_some() {
                return Ok(false);
            }
        } else if backend == Backend::Kernel {
            trip.held = std::mem::take(&mut packed.held);
            self.queue_kernel(tools, job, piece, trip)?;
            trip.fenced = true;
            return Ok(true);
        } else if backend == Backend::Direct {
            let direct = tools.registration.split(&piece.direct_copies(&job.layout));
            if direct.loose.is_empty() {
                trip.held = direct.held;
                self.queue_direct(tools, job, &direct.locked, trip)?;
                trip.fenced = true;
                return Ok(true);
            }
        }
        if self.ring.next().is_open {
            // Its last use failed underway, and some of that may still be running.
            return Ok(false);
        }
        self.queue_staged(tools, job, piece, packed, trip)?;
        trip.ring.into_iter().for_each(|(index, _)| self.ring.close_use(index));
        trip.fenced = true;
        Ok(true)
    }

    fn backend(&self, tools: &Tools, job: &Job) -> Backend {
        let options = &tools.options;
        match options.backend {
            Backend::Auto if run_bytes(&job.layout) >= options.direct_from(self.way, self.driver.batches_copies()) => {
                Backend::Direct
            }
            Backend::Kernel if !self.driver.kernels_reach_host() => Backend::Staged,
            Backend::Auto => Backend::Staged,
            chosen => chosen,
        }
    }

    fn queue_staged(
        &mut self,
        tools: &mut Tools,
        job: &Job,
        piece: &Piece,
        packed: SplitCopies,
        trip: &mut Trip,
    ) -> DriverResult<()> {
        let layout = tools.tables.find(&job.layout, &tools.events)?;
        trip.held = packed.held;
        let ring = self.ring.next().device;
        let bounce = if packed.loose.is_empty() { None } else { Some(self.ring.bounce_of_next(&tools.tally)?) };
        Tally::add(&tools.tally.bytes_bounced, packed.loose.iter().map(|copy| copy.bytes).sum());
        let done = tools.events.take()?;
        trip.fences.push(done);
        let busy = self.ring.next().busy_until;
        trip.ring = Some((self.ring.take_next(done), done));
        let params = params(layout, piece, |position| ring + (position * piece.stride) as u64);
        Tally::add(&tools.tally.pieces_staged, 1);
        match self.way {
            Way::ToDevice => {
                let mut used = self.copy(tools, &packed.locked, busy)?;
                if let Some(bounce) = bounce {
                    used.extend(self.copy_by_cpu(tools, piece, &packed.loose, ring, bounce)?);
                }
                used.sort_unstable();
                used.dedup();
                used.into_iter().try_for_each(|stream| {
                    let copied = self.mark(&tools.events, stream, &mut trip.passed)?;
                    self.driver.wait(self.kernel_stream, copied)
                })?;
                self.launch(tools, job, &params)?;
                self.driver.record(done, self.kernel_stream)
            }
            Way::ToHost => {
                busy.map_or(Ok(()), |event| self.driver.wait(self.kernel_stream, event))?;
                self.launch(tools, job, &params)?;
                let gathered = self.mark(&tools.events, self.kernel_stream, &mut trip.passed)?;
                let mut copies = packed.locked;
                if let Some(bounce) = bounce {
                    trip.to_slots = cpu_copies(self.way, &packed.loose, ring, bounce, piece.stride);
                    copies.extend(by_bounce(&packed.loose, ring, bounce));
                }
                let used = self.copy(tools, &copies, Some(gathered))?;
                for stream in &used[1..] {
                    let copied = self.mark(&tools.events, *stream, &mut trip.passed)?;
                    self.driver.wait(used[0], copied)?;
                }
                self.driver.record(done, used[0])
            }
        }
    }

    /// Bring what is not page-locked to the partner of the free ring buffer, and queue each step's copy to the device
    /// before the next step: the bus works while the CPU does. Returns the streams used.
    fn copy_by_cpu(
        &mut self,
        tools: &mut Tools,
        piece: &Piece,
        loose: &[CopyOp],
        ring: u64,
        bounce: usize,
    ) -> DriverResult<Vec<Stream>> {
        let step_bytes = tools.options.ring_buffer_bytes / STEPS_PER_BUFFER;
        let (mut cut, mut bytes, mut used) = (Vec::new(), 0, Vec::new());
        for copy in loose {
            cut_copy(*copy, |_, left| left.min(step_bytes), |part| cut.push(part));
            bytes += copy.bytes;
        }
        for step in share_out(&cut, bytes.div_ceil(step_bytes)) {
            let by_cpu = cpu_copies(self.way, step, ring, bounce, piece.stride);
            // SAFETY: the slots are leased and were just looked up. The partner is as long as the ring buffer and free,
            // since `queue` saw its last use end.
            if !unsafe { tools.cpu.copy(&by_cpu) } {
                return Err(cpu_failed());
            }
            used.extend(self.copy(tools, &by_bounce(step, ring, bounce), None)?);
        }
        Ok(used)
    }

    fn queue_direct(&mut self, tools: &Tools, job: &Job, copies: &[CopyOp], trip: &mut Trip) -> DriverResult<()> {
        Tally::add(&tools.tally.pieces_direct, 1);
        for stream in self.copy(tools, copies, job.after)? {
            self.mark(&tools.events, stream, &mut trip.fences)?;
        }
        Ok(())
    }

    fn queue_kernel(&mut self, tools: &mut Tools, job: &Job, piece: &Piece, trip: &mut Trip) -> DriverResult<()> {
        let layout = tools.tables.find(&job.layout, &tools.events)?;
        Tally::add(&tools.tally.pieces_kernel, 1);
        let params = params(layout, piece, |position| (piece.blocks[position].slot + piece.from) as u64);
        self.launch(tools, job, &params)?;
        self.mark(&tools.events, self.kernel_stream, &mut trip.fences)?;
        Ok(())
    }

    /// Spread copies over the copy streams, each of which waits for `first`. Returns the streams used, at least one.
    fn copy(&mut self, tools: &Tools, copies: &[CopyOp], first: Option<Event>) -> DriverResult<Vec<Stream>> {
        let mut used = Vec::new();
        for group in share_out(copies, self.copy_streams.len()) {
            let stream = self.copy_streams[self.turn];
            self.turn = (self.turn + 1) % self.copy_streams.len();
            first.map_or(Ok(()), |event| tools.driver.wait(stream, event))?;
            tools.driver.copy(self.way, group, stream)?;
            used.push(stream);
        }
        Ok(used)
    }

    fn launch(&self, tools: &Tools, job: &Job, params: &KernelParams) -> DriverResult<()> {
        if let Some(after) = job.after {
            self.driver.wait(self.kernel_stream, after)?;
        }
        let kernel = if self.way == Way::ToDevice { Kernel::Scatter } else { Kernel::Gather };
        self.driver.launch(kernel, params.ctas(tools.options.ctas), params, self.kernel_stream)
    }

    /// An event behind all that is queued in `stream`, kept in `kept`.
    fn mark(&self, events: &EventPool, stream: Stream, kept: &mut Vec<Event>) -> DriverResult<Event> {
        let event = events.take()?;
        kept.push(event);
        self.driver.record(event, stream)?;
        Ok(event)
    }
}

fn cpu_failed() -> DriverError {
    DriverError { call: "copy by the CPU", code: 0, text: "a copy thread panicked".into() }
}

/// Copies between slots and a ring buffer's partner, none of them over more than one block.
fn cpu_copies(way: Way, loose: &[CopyOp], ring: u64, bounce: usize, stride: usize) -> Vec<CpuCopy> {
    let mut all = Vec::new();
    for copy in loose {
        let offset_of = |host: usize| (copy.device - ring) as usize + (host - copy.host);
        let to_end_of_block = |host: usize, _| stride - offset_of(host) % stride;
        cut_copy(*copy, to_end_of_block, |piece| {
            let offset = (piece.device - ring) as usize;
            let (source, target) = match way {
                Way::ToDevice => (piece.host, bounce + offset),
                Way::ToHost => (bounce + offset, piece.host),
            };
            all.push(CpuCopy { position: offset / stride, source, target, bytes: piece.bytes });
        });
    }
    all
}

/// Parameters of a launch; `packed(i)` is where the first byte that moves of the piece's block `i` lies.
fn params(layout: DeviceLayout, piece: &Piece, packed: impl Fn(usize) -> u64) -> KernelParams {
    let mut params = KernelParams {
        regions: layout.regions,
        first_tile: layout.first_tile,
        from: piece.from as u64,
        to: piece.to as u64,
        region_count: layout.region_count,
        tiles_per_region: layout.tiles_per_region,
        tiles_per_block: layout.tiles_per_block,
        block_count: piece.blocks.len() as u32,
        ..KernelParams::nothing()
    };
    let mut alignment = layout.alignment.min(alignment_of(piece.from)).min(alignment_of(piece.to));
    for (position, (target, block)) in params.blocks.iter_mut().zip(&piece.blocks).enumerate() {
        let address = packed(position);
        alignment = alignment.min(alignment_of(address as usize));
        *target = KernelBlock { packed: address.wrapping_sub(piece.from as u64), id: block.id, unused: 0 };
    }
    params.access_bytes = access_bytes(alignment);
    params
}
