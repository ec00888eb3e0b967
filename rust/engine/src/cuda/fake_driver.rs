//! A CUDA driver for tests: device memory is host memory, and queued work runs in small portions, in any order that
//! streams and events allow, whenever somebody asks for an event.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use super::driver::{
    CopyOp, Driver, DriverError, DriverResult, Event, ILLEGAL_ADDRESS, INVALID_VALUE, Kernel, OUT_OF_MEMORY, Stream,
    Way,
};
use super::kernel_params::{KernelParams, KernelRegion};

/// A repeatable source of odd numbers.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

enum Work {
    Copy(Way, CopyOp),
    Launch(Kernel, Box<KernelParams>),
    Record(usize, u64),
    Wait(usize, u64),
}

#[derive(Default)]
struct EventState {
    recorded: u64,
    reached: u64,
}

/// What the fake holds; public to tests where they have to look or to set traps.
#[derive(Default)]
pub(super) struct FakeState {
    streams: BTreeMap<usize, VecDeque<Work>>,
    events: BTreeMap<usize, EventState>,
    next_handle: usize,
    device_memory: BTreeMap<usize, Vec<u64>>,
    host_memory: BTreeMap<usize, Vec<u64>>,
    /// Device memory that tests own: address and length.
    pub(super) caches: Vec<(usize, usize)>,
    pub(super) registered: BTreeMap<usize, usize>,
    /// Addresses in the order in which they were registered.
    pub(super) registrations: Vec<usize>,
    /// Whether registering takes until this is over.
    pub(super) registering_held: bool,
    entered: i64,
    /// Streams in which nothing runs.
    pub(super) held: BTreeSet<usize>,
    /// Call and how many times it still works, then how it fails.
    pub(super) traps: HashMap<&'static str, (usize, i32)>,
    /// Set once the context is broken.
    pub(super) sticky: Option<i32>,
    pub(super) calls: HashMap<&'static str, usize>,
    /// Bytes that can be page-locked by registration.
    pub(super) lockable_bytes: Option<usize>,
    random: Option<Random>,
}

/// See the top of this file.
#[derive(Default)]
pub(super) struct FakeDriver {
    pub(super) state: Mutex<FakeState>,
    pub(super) blind_kernels: bool,
}

/// A stream of somebody else.
pub(super) const FOREIGN_STREAM: u64 = 1;

impl FakeDriver {
    pub(super) fn new(seed: u64) -> Self {
        let fake = Self::default();
        let mut state = fake.lock();
        state.random = Some(Random(seed));
        state.next_handle = 100;
        state.streams.insert(FOREIGN_STREAM as usize, VecDeque::new());
        drop(state);
        fake
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, FakeState> {
        self.state.lock().unwrap()
    }

    /// Let `call` fail with `code` after it worked `works` times.
    pub(super) fn trap(&self, call: &'static str, works: usize, code: i32) {
        self.lock().traps.insert(call, (works, code));
    }

    /// Names of calls and how often each was made.
    pub(super) fn calls(&self) -> HashMap<&'static str, usize> {
        self.lock().calls.clone()
    }

    /// Panic if anything was not given back.
    pub(super) fn assert_nothing_is_left(&self) {
        let state = self.lock();
        assert_eq!(state.streams.len(), 1, "streams are left");
        assert!(state.events.is_empty(), "{} events are left", state.events.len());
        assert!(state.device_memory.is_empty(), "device memory is left");
        assert!(state.host_memory.is_empty(), "host memory is left");
        assert!(state.registered.is_empty(), "registrations are left: {:?}", state.registered);
        assert_eq!(state.entered, 0, "a thread did not leave");
    }

    fn call(&self, name: &'static str) -> DriverResult<MutexGuard<'_, FakeState>> {
        let mut state = self.lock();
        *state.calls.entry(name).or_default() += 1;
        let fail = |code| Err(DriverError { call: name, code, text: "set up by the test".into() });
        if let Some(code) = state.sticky {
            return fail(code);
        }
        if let Some((works, code)) = state.traps.get_mut(name) {
            if *works > 0 {
                *works -= 1;
            } else {
                let code = *code;
                state.traps.remove(name);
                if code >= ILLEGAL_ADDRESS {
                    state.sticky = Some(code);
                }
                return fail(code);
            }
        }
        Ok(state)
    }

    fn handle(state: &mut FakeState) -> usize {
        state.next_handle += 1;
        state.next_handle
    }

    fn allocate_in(memory: &mut BTreeMap<usize, Vec<u64>>, bytes: usize) -> usize {
        let mut buffer = vec![0xA5A5_A5A5_A5A5_A5A5u64; bytes.div_ceil(8) + 32];
        let address = buffer.as_mut_ptr().expose_provenance().next_multiple_of(256);
        memory.insert(address, buffer);
        address
    }
}

impl FakeState {
    /// Run up to `most` pieces of work.
    fn run_some(&mut self, most: usize) {
        for _ in 0..most {
            let ready: Vec<usize> = self.streams.keys().copied().filter(|stream| self.is_ready(*stream)).collect();
            if ready.is_empty() {
                return;
            }
            let pick = self.random.as_mut().map_or(0, |random| random.below(ready.len()));
            let work = self.streams.get_mut(&ready[pick]).and_then(VecDeque::pop_front);
            match work {
                Some(Work::Copy(way, copy)) => self.copy(way, copy),
                Some(Work::Launch(kernel, params)) => self.launch(kernel, &params),
                Some(Work::Record(event, number)) => {
                    // A destroyed event is no longer of interest.
                    if let Some(state) = self.events.get_mut(&event) {
                        state.reached = state.reached.max(number);
                    }
                }
                Some(Work::Wait(..)) | None => {}
            }
        }
    }

    fn is_ready(&self, stream: usize) -> bool {
        let passes = |work: &Work| match work {
            Work::Wait(event, number) => self.events.get(event).is_none_or(|state| state.reached >= *number),
            _ => true,
        };
        !self.held.contains(&stream) && self.streams[&stream].front().is_some_and(passes)
    }

    fn copy(&mut self, way: Way, copy: CopyOp) {
        self.assert_on_device(copy.device as usize, copy.bytes);
        assert_eq!(self.locked_run(copy.host, copy.bytes), Some(copy.bytes), "host memory was unlocked under a copy");
        let (source, target) = match way {
            Way::ToDevice => (copy.host, copy.device as usize),
            Way::ToHost => (copy.device as usize, copy.host),
        };
        move_bytes(source, target, copy.bytes);
    }

    fn launch(&mut self, kernel: Kernel, params: &KernelParams) {
        if params.block_count == 0 {
            return;
        }
        for block in &params.blocks[..params.block_count as usize] {
            for number in 0..params.region_count as usize {
                let row = params.regions as usize + number * size_of::<KernelRegion>();
                self.assert_on_device(row, size_of::<KernelRegion>());
                // SAFETY: just seen to lie in memory of this fake.
                let region = unsafe { std::ptr::with_exposed_provenance::<KernelRegion>(row).read_unaligned() };
                let begin = region.offset.max(params.from);
                let end = (region.offset + region.length).min(params.to);
                if begin >= end {
                    continue;
                }
                let spread = region.address + u64::from(block.id) * region.stride + begin - region.offset;
                let packed = block.packed.wrapping_add(begin);
                for value in [spread, packed, end - begin] {
                    assert_eq!(value % u64::from(params.access_bytes), 0, "an access is not aligned");
                }
                let (spread, packed, bytes) = (spread as usize, packed as usize, (end - begin) as usize);
                self.assert_on_device(spread, bytes);
                if self.locked_run(packed, bytes).is_none() {
                    self.assert_on_device(packed, bytes);
                }
                match kernel {
                    Kernel::Gather => move_bytes(spread, packed, bytes),
                    Kernel::Scatter => move_bytes(packed, spread, bytes),
                }
            }
        }
    }

    fn assert_on_device(&self, address: usize, bytes: usize) {
        let own = self.device_memory.range(..=address).next_back().map(|(start, buffer)| (*start, buffer.len() * 8));
        let inside = |(start, length): (usize, usize)| address >= start && address + bytes <= start + length;
        let found = own.is_some_and(inside) || self.caches.iter().copied().any(inside);
        assert!(found, "{bytes} bytes at {address:#x} are not device memory");
    }

    /// Page-locked bytes from `host` on; `None` if there are none.
    fn locked_run(&self, host: usize, bytes: usize) -> Option<usize> {
        let own = self.host_memory.range(..=host).next_back().map(|(start, buffer)| (*start, buffer.len() * 8));
        let registered = self.registered.range(..=host).next_back().map(|(start, length)| (*start, *length));
        let run = |(start, length): (usize, usize)| (start + length).saturating_sub(host).min(bytes);
        let longest = own.map_or(0, run).max(registered.map_or(0, run));
        (longest > 0).then_some(longest)
    }
}

fn move_bytes(source: usize, target: usize, bytes: usize) {
    // SAFETY: callers have seen both ranges to lie in memory that the fake or the test owns.
    unsafe {
        let source = std::ptr::with_exposed_provenance::<u8>(source);
        source.copy_to_nonoverlapping(std::ptr::with_exposed_provenance_mut(target), bytes);
    }
}

impl Driver for FakeDriver {
    fn enter(&self) -> DriverResult<i32> {
        self.call("enter")?.entered += 1;
        Ok(7)
    }

    fn leave(&self, before: i32) {
        assert_eq!(before, 7);
        self.lock().entered -= 1;
    }

    fn create_stream(&self) -> DriverResult<Stream> {
        let mut state = self.call("create_stream")?;
        let stream = Self::handle(&mut state);
        state.streams.insert(stream, VecDeque::new());
        Ok(Stream(stream))
    }

    fn destroy_stream(&self, stream: Stream) {
        let mut state = self.lock();
        let left = state.streams.remove(&stream.0).expect("a stream that exists");
        let pending = left.iter().any(|work| matches!(work, Work::Copy(..)));
        assert!(!pending || state.sticky.is_some(), "a stream was destroyed with copies in it");
    }

    fn create_event(&self) -> DriverResult<Event> {
        let mut state = self.call("create_event")?;
        let event = Self::handle(&mut state);
        state.events.insert(event, EventState::default());
        Ok(Event(event))
    }

    fn destroy_event(&self, event: Event) {
        self.lock().events.remove(&event.0).expect("an event that exists");
    }

    fn record(&self, event: Event, stream: Stream) -> DriverResult<()> {
        let mut state = self.call("record")?;
        let number = {
            let event = state.events.get_mut(&event.0).expect("an event that exists");
            event.recorded += 1;
            event.recorded
        };
        state.streams.get_mut(&stream.0).expect("a stream that exists").push_back(Work::Record(event.0, number));
        Ok(())
    }

    fn record_foreign(&self, event: Event, stream: u64) -> DriverResult<()> {
        drop(self.call("record_foreign")?);
        self.record(event, Stream(stream as usize))
    }

    fn query(&self, event: Event) -> DriverResult<bool> {
        let mut state = self.call("query")?;
        let most = state.random.as_mut().map_or(1, |random| random.below(4));
        state.run_some(most);
        let event = &state.events[&event.0];
        Ok(event.reached >= event.recorded)
    }

    fn wait(&self, stream: Stream, event: Event) -> DriverResult<()> {
        let mut state = self.call("wait")?;
        let number = state.events[&event.0].recorded;
        state.streams.get_mut(&stream.0).expect("a stream that exists").push_back(Work::Wait(event.0, number));
        Ok(())
    }

    fn allocate(&self, bytes: usize) -> DriverResult<u64> {
        let mut state = self.call("allocate")?;
        Ok(Self::allocate_in(&mut state.device_memory, bytes) as u64)
    }

    fn free(&self, address: u64) {
        self.lock().device_memory.remove(&(address as usize)).expect("device memory that exists");
    }

    fn allocate_host(&self, bytes: usize) -> DriverResult<usize> {
        let mut state = self.call("allocate_host")?;
        Ok(Self::allocate_in(&mut state.host_memory, bytes))
    }

    fn free_host(&self, address: usize) {
        self.lock().host_memory.remove(&address).expect("host memory that exists");
    }

    fn register_host(&self, address: usize, bytes: usize) -> DriverResult<()> {
        let mut state = self.call("register_host")?;
        while state.registering_held {
            drop(state);
            std::thread::sleep(Duration::from_millis(1));
            state = self.lock();
        }
        state.registrations.push(address);
        let sum: usize = state.registered.values().sum();
        if state.lockable_bytes.is_some_and(|most| sum + bytes > most) {
            return Err(DriverError { call: "register_host", code: OUT_OF_MEMORY, text: "no more".into() });
        }
        assert!(state.registered.insert(address, bytes).is_none(), "registered twice");
        Ok(())
    }

    fn unregister_host(&self, address: usize) -> DriverResult<()> {
        self.lock().registered.remove(&address).expect("a registration that exists");
        Ok(())
    }

    fn copy(&self, way: Way, copies: &[CopyOp], stream: Stream) -> DriverResult<()> {
        let mut state = self.call("copy")?;
        for copy in copies {
            // As the real driver: a copy must not cross from one registration to the next.
            if state.locked_run(copy.host, copy.bytes) != Some(copy.bytes) {
                return Err(DriverError {
                    call: "copy",
                    code: INVALID_VALUE,
                    text: "host memory is not locked".into(),
                });
            }
            state.streams.get_mut(&stream.0).expect("a stream that exists").push_back(Work::Copy(way, *copy));
        }
        Ok(())
    }

    fn batches_copies(&self) -> bool {
        true
    }

    fn launch(&self, kernel: Kernel, ctas: u32, params: &KernelParams, stream: Stream) -> DriverResult<()> {
        assert!(ctas > 0);
        let mut state = self.call("launch")?;
        let work = Work::Launch(kernel, Box::new(params.clone()));
        state.streams.get_mut(&stream.0).expect("a stream that exists").push_back(work);
        Ok(())
    }

    fn kernels_reach_host(&self) -> bool {
        !self.blind_kernels
    }
}
