//! What the transfer engine asks of a CUDA driver. `device` asks the real one; tests ask a fake.

use std::fmt;

use super::kernel_params::KernelParams;

/// A queue of work on the device; work in one stream runs in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Stream(pub(super) usize);

/// A place in a stream that can be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Event(pub(super) usize);

/// Which of the two kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    /// Fragments to packed form.
    Gather,
    /// Packed form to fragments.
    Scatter,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Host to device.
    ToDevice,
    /// Device to host.
    ToHost,
}

/// One contiguous copy between page-locked host memory and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopyOp {
    /// Address in host memory.
    pub(super) host: usize,
    /// Address in device memory.
    pub(super) device: u64,
    /// Length.
    pub(super) bytes: usize,
}

/// A call of the driver that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DriverError {
    /// Name of the call.
    pub(super) call: &'static str,
    /// CUresult.
    pub(super) code: i32,
    /// The driver's own words for the code.
    pub(super) text: String,
}

/// Result of a driver call.
pub(super) type DriverResult<T> = std::result::Result<T, DriverError>;

/// CUresult: no memory left on the device, or none that can be page-locked.
pub(super) const OUT_OF_MEMORY: i32 = 2;
/// CUresult: an address that the device may not access; ends the context.
#[cfg(test)]
pub(super) const ILLEGAL_ADDRESS: i32 = 700;
/// CUresult: one of the arguments is not possible.
#[cfg(test)]
pub(super) const INVALID_VALUE: i32 = 1;

/// Codes after which a context never works again: driver gone, device or context lost, memory errors, failed kernels.
const STICKY: [i32; 22] =
    [3, 4, 46, 100, 101, 201, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 809, 911, 999];

impl DriverError {
    /// Whether nothing on this device can work any more.
    pub(super) fn is_sticky(&self) -> bool {
        STICKY.contains(&self.code)
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} answered {} ({})", self.call, self.code, self.text)
    }
}

/// A driver and one of its devices. Calls that queue work return before it is done.
///
/// Handles and addresses that a caller passes must be ones that it got from the same driver and has not given back.
pub(super) trait Driver: Send + Sync {
    /// Let this thread make the other calls until [`Self::leave`]. Calls nest. Returns what `leave` needs.
    fn enter(&self) -> DriverResult<i32>;
    /// Undo [`Self::enter`].
    fn leave(&self, before: i32);

    /// A stream of the lowest priority that waits for no other.
    fn create_stream(&self) -> DriverResult<Stream>;
    /// Give a stream back; what is queued in it still runs.
    fn destroy_stream(&self, stream: Stream);
    /// An event, nowhere yet.
    fn create_event(&self) -> DriverResult<Event>;
    /// Give an event back.
    fn destroy_event(&self, event: Event);
    /// Put the event behind all that is queued in the stream.
    fn record(&self, event: Event, stream: Stream) -> DriverResult<()>;
    /// Put the event behind all that is queued in a stream of somebody else, named by its handle.
    fn record_foreign(&self, event: Event, stream: u64) -> DriverResult<()>;
    /// Whether all before the event is done; `true` if it is nowhere.
    fn query(&self, event: Event) -> DriverResult<bool>;
    /// Let what is queued in the stream from now on wait for the event as it is now.
    fn wait(&self, stream: Stream, event: Event) -> DriverResult<()>;

    /// Device memory, aligned to at least 256 bytes.
    fn allocate(&self, bytes: usize) -> DriverResult<u64>;
    /// Give device memory back.
    fn free(&self, address: u64);
    /// Page-locked host memory.
    fn allocate_host(&self, bytes: usize) -> DriverResult<usize>;
    /// Give page-locked host memory back.
    fn free_host(&self, address: usize);
    /// Page-lock memory that is already there.
    fn register_host(&self, address: usize, bytes: usize) -> DriverResult<()>;
    /// Undo [`Self::register_host`].
    fn unregister_host(&self, address: usize) -> DriverResult<()>;

    /// Queue copies that may run in any order. Both sides must stay as they are until an event behind them is done.
    fn copy(&self, way: Way, copies: &[CopyOp], stream: Stream) -> DriverResult<()>;
    /// Whether `copy` costs one call rather than one for each copy.
    fn batches_copies(&self) -> bool;
    /// Queue a kernel.
    fn launch(&self, kernel: Kernel, ctas: u32, params: &KernelParams, stream: Stream) -> DriverResult<()>;
    /// Whether kernels can use page-locked host memory by its address in this process.
    fn kernels_reach_host(&self) -> bool;
}

/// A thread's permission to call the driver.
pub(super) struct Entered<'a> {
    driver: &'a dyn Driver,
    before: i32,
}

impl<'a> Entered<'a> {
    /// Enter, until this is dropped.
    pub(super) fn new(driver: &'a dyn Driver) -> DriverResult<Self> {
        let before = driver.enter()?;
        Ok(Self { driver, before })
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.driver.leave(self.before);
    }
}
