//! One CUDA device, by the driver's interface, in the device's primary context: the one that PyTorch uses.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{null_mut, with_exposed_provenance_mut};

use super::driver::{CopyOp, Driver, DriverResult, Event, Kernel, Stream, Way};
use super::kernel_params::{CTA_THREADS, KernelParams};
use super::library::{CopyAttributes, Handle, Library, MemoryLocation};

const PTX: &str = concat!(include_str!("blocks.ptx"), "\0");

const NOT_READY: c_int = 600;
const STREAM_NON_BLOCKING: c_uint = 1;
const EVENT_DISABLE_TIMING: c_uint = 2;
const HOST_PORTABLE: c_uint = 1;
const HOST_MAPPED: c_uint = 2;
const CAPTURE_RELAXED: c_int = 2;
const SOURCE_ORDER_STREAM: c_int = 1;
const ATTRIBUTE_HOST_POINTER_FOR_REGISTERED: c_int = 91;

/// Copies longer than this gain nothing from being handed over together.
const BATCH_COPY_BYTES_MAX: usize = 4 << 20;

/// See the top of this file.
pub(super) struct Device {
    library: &'static Library,
    ordinal: c_int,
    context: Handle,
    module: Handle,
    gather: Handle,
    scatter: Handle,
    priority: c_int,
    kernels_reach_host: bool,
    batch_copies: bool,
}

// SAFETY: handles of the driver may be used by any thread; the driver locks by itself.
unsafe impl Send for Device {}
// SAFETY: as above; nothing here changes after `open`.
unsafe impl Sync for Device {}

impl Device {
    /// Device `ordinal` as this process numbers them, with the kernels loaded.
    pub(super) fn open(ordinal: u32, batch_copies: bool) -> DriverResult<Self> {
        let library = Library::get()?;
        let (mut device, mut context) = (0, null_mut());
        let wanted = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: writes one number.
        library.check("cuDeviceGet", unsafe { (library.device_get)(&mut device, wanted) })?;
        // SAFETY: writes one handle; the device is one that the driver named.
        let status = unsafe { (library.primary_context_retain)(&mut context, device) };
        library.check("cuDevicePrimaryCtxRetain", status)?;
        let mut opened = Self {
            library,
            ordinal: device,
            context,
            module: null_mut(),
            gather: null_mut(),
            scatter: null_mut(),
            priority: 0,
            kernels_reach_host: false,
            batch_copies: batch_copies && library.copy_batch.is_some(),
        };
        let before = opened.enter()?;
        let loaded = opened.load();
        opened.leave(before);
        loaded.map(|()| opened)
    }

    fn load(&mut self) -> DriverResult<()> {
        let library = self.library;
        let (mut greatest, mut reaches) = (0, 0);
        // SAFETY: writes two numbers.
        let status = unsafe { (library.stream_priorities)(&mut self.priority, &mut greatest) };
        library.check("cuCtxGetStreamPriorityRange", status)?;
        let attribute = ATTRIBUTE_HOST_POINTER_FOR_REGISTERED;
        // SAFETY: writes one number.
        let status = unsafe { (library.device_attribute)(&mut reaches, attribute, self.ordinal) };
        self.kernels_reach_host = library.check("cuDeviceGetAttribute", status).is_ok() && reaches == 1;
        // SAFETY: writes one handle; the text is terminated.
        let status = unsafe { (library.module_load)(&mut self.module, PTX.as_ptr().cast()) };
        library.check("cuModuleLoadData", status)?;
        for (name, function) in [(c"pegaflow_gather", &mut self.gather), (c"pegaflow_scatter", &mut self.scatter)] {
            // SAFETY: writes one handle; the module is loaded and the name terminated.
            let status = unsafe { (library.module_function)(function, self.module, name.as_ptr()) };
            library.check("cuModuleGetFunction", status)?;
        }
        Ok(())
    }

    fn copy_one(&self, way: Way, copy: &CopyOp, stream: Stream) -> DriverResult<()> {
        let (library, host) = (self.library, with_exposed_provenance_mut::<c_void>(copy.host));
        match way {
            Way::ToDevice => {
                // SAFETY: the caller of `copy` vouches for both sides until an event behind the copy is done.
                let status =
                    unsafe { (library.copy_to_device)(copy.device, host.cast_const(), copy.bytes, handle(stream.0)) };
                library.check("cuMemcpyHtoDAsync", status)
            }
            Way::ToHost => {
                // SAFETY: as above.
                let status = unsafe { (library.copy_to_host)(host, copy.device, copy.bytes, handle(stream.0)) };
                library.check("cuMemcpyDtoHAsync", status)
            }
        }
    }

    /// All copies in one call. `None` if the driver does not take them so.
    fn copy_batch(&self, way: Way, copies: &[CopyOp], stream: Stream) -> Option<DriverResult<()>> {
        let long = copies.iter().all(|copy| copy.bytes > BATCH_COPY_BYTES_MAX);
        let function = self.library.copy_batch.filter(|_| self.batch_copies && copies.len() > 1 && !long)?;
        let mut hosts: Vec<u64> = copies.iter().map(|copy| copy.host as u64).collect();
        let mut devices: Vec<u64> = copies.iter().map(|copy| copy.device).collect();
        let sizes: Vec<usize> = copies.iter().map(|copy| copy.bytes).collect();
        let (targets, sources) = match way {
            Way::ToDevice => (&mut devices, &mut hosts),
            Way::ToHost => (&mut hosts, &mut devices),
        };
        let attributes = CopyAttributes {
            source_access_order: SOURCE_ORDER_STREAM,
            source: MemoryLocation::default(),
            target: MemoryLocation::default(),
            flags: 0,
        };
        let first = 0usize;
        // SAFETY: three lists of equal length and one set of attributes for all, copied by the call; the caller of
        // `copy` vouches for the memory.
        let status = unsafe {
            function(
                targets.as_ptr(),
                sources.as_ptr(),
                sizes.as_ptr(),
                copies.len(),
                &attributes,
                &first,
                1,
                handle(stream.0),
            )
        };
        Some(self.library.check("cuMemcpyBatchAsync", status))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !self.module.is_null()
            && let Ok(before) = self.enter()
        {
            // SAFETY: loaded by `load`; nothing that uses it is left.
            let _gone_with_the_context = unsafe { (self.library.module_unload)(self.module) };
            self.leave(before);
        }
        // SAFETY: retained by `open`, once.
        let _at_exit_the_driver_is_gone = unsafe { (self.library.primary_context_release)(self.ordinal) };
    }
}

fn handle(number: usize) -> Handle {
    with_exposed_provenance_mut(number)
}

fn number(handle: Handle) -> usize {
    handle.expose_provenance()
}

impl Driver for Device {
    fn enter(&self) -> DriverResult<i32> {
        let library = self.library;
        // SAFETY: the context is retained for as long as `self` lives.
        library.check("cuCtxPushCurrent", unsafe { (library.context_push)(self.context) })?;
        let mut mode = CAPTURE_RELAXED;
        // Somebody may be capturing a graph on another thread; that must neither hinder us nor be hindered by us.
        // SAFETY: exchanges one number of this thread.
        let status = unsafe { (library.capture_mode_exchange)(&mut mode) };
        library.check("cuThreadExchangeStreamCaptureMode", status).inspect_err(|_| self.leave(CAPTURE_RELAXED))?;
        Ok(mode)
    }

    fn leave(&self, before: i32) {
        let (mut mode, mut context) = (before, null_mut());
        // SAFETY: both write one value; they undo what `enter` did to this thread.
        let _nothing_to_do_about_it = unsafe {
            (self.library.capture_mode_exchange)(&mut mode);
            (self.library.context_pop)(&mut context)
        };
    }

    fn create_stream(&self) -> DriverResult<Stream> {
        let mut stream = null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { (self.library.stream_create)(&mut stream, STREAM_NON_BLOCKING, self.priority) };
        self.library.check("cuStreamCreateWithPriority", status)?;
        Ok(Stream(number(stream)))
    }

    fn destroy_stream(&self, stream: Stream) {
        // SAFETY: a stream of ours that is not used again.
        let _best_effort = unsafe { (self.library.stream_destroy)(handle(stream.0)) };
    }

    fn create_event(&self) -> DriverResult<Event> {
        let mut event = null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { (self.library.event_create)(&mut event, EVENT_DISABLE_TIMING) };
        self.library.check("cuEventCreate", status)?;
        Ok(Event(number(event)))
    }

    fn destroy_event(&self, event: Event) {
        // SAFETY: an event of ours that is not used again.
        let _best_effort = unsafe { (self.library.event_destroy)(handle(event.0)) };
    }

    fn record(&self, event: Event, stream: Stream) -> DriverResult<()> {
        self.record_foreign(event, stream.0 as u64)
    }

    fn record_foreign(&self, event: Event, stream: u64) -> DriverResult<()> {
        // SAFETY: an event of ours; the stream is ours or one that the caller named as a stream of this context, 0
        // being its default stream.
        let status = unsafe { (self.library.event_record)(handle(event.0), handle(stream as usize)) };
        self.library.check("cuEventRecord", status)
    }

    fn query(&self, event: Event) -> DriverResult<bool> {
        // SAFETY: an event of ours.
        match unsafe { (self.library.event_query)(handle(event.0)) } {
            NOT_READY => Ok(false),
            status => self.library.check("cuEventQuery", status).map(|()| true),
        }
    }

    fn wait(&self, stream: Stream, event: Event) -> DriverResult<()> {
        // SAFETY: both are ours.
        let status = unsafe { (self.library.stream_wait_event)(handle(stream.0), handle(event.0), 0) };
        self.library.check("cuStreamWaitEvent", status)
    }

    fn allocate(&self, bytes: usize) -> DriverResult<u64> {
        let mut address = 0;
        // SAFETY: writes one address.
        self.library.check("cuMemAlloc", unsafe { (self.library.memory_allocate)(&mut address, bytes) })?;
        Ok(address)
    }

    fn free(&self, address: u64) {
        // SAFETY: allocated by `allocate` and not used again.
        let _best_effort = unsafe { (self.library.memory_free)(address) };
    }

    fn allocate_host(&self, bytes: usize) -> DriverResult<usize> {
        let mut address = null_mut();
        // SAFETY: writes one address.
        let status = unsafe { (self.library.host_allocate)(&mut address, bytes, HOST_PORTABLE) };
        self.library.check("cuMemHostAlloc", status)?;
        Ok(address.expose_provenance())
    }

    fn free_host(&self, address: usize) {
        // SAFETY: allocated by `allocate_host` and not used again.
        let _best_effort = unsafe { (self.library.host_free)(with_exposed_provenance_mut(address)) };
    }

    fn register_host(&self, address: usize, bytes: usize) -> DriverResult<()> {
        let pointer = with_exposed_provenance_mut(address);
        // SAFETY: the caller keeps the range mapped until it is unregistered.
        let status = unsafe { (self.library.host_register)(pointer, bytes, HOST_PORTABLE | HOST_MAPPED) };
        self.library.check("cuMemHostRegister", status)
    }

    fn unregister_host(&self, address: usize) -> DriverResult<()> {
        // SAFETY: registered by `register_host`; no copy uses it any more.
        let status = unsafe { (self.library.host_unregister)(with_exposed_provenance_mut(address)) };
        self.library.check("cuMemHostUnregister", status)
    }

    fn copy(&self, way: Way, copies: &[CopyOp], stream: Stream) -> DriverResult<()> {
        if let Some(outcome) = self.copy_batch(way, copies, stream) {
            return outcome;
        }
        copies.iter().try_for_each(|copy| self.copy_one(way, copy, stream))
    }

    fn batches_copies(&self) -> bool {
        self.batch_copies
    }

    fn launch(&self, kernel: Kernel, ctas: u32, params: &KernelParams, stream: Stream) -> DriverResult<()> {
        let function = match kernel {
            Kernel::Gather => self.gather,
            Kernel::Scatter => self.scatter,
        };
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        let (library, stream) = (self.library, handle(stream.0));
        // SAFETY: the kernel has one parameter of this type, which the call copies; what it points to is the caller's
        // affair as in `copy`.
        let status = unsafe {
            let arguments = arguments.as_mut_ptr();
            (library.launch)(function, ctas, 1, 1, CTA_THREADS, 1, 1, 0, stream, arguments, null_mut())
        };
        library.check("cuLaunchKernel", status)
    }

    fn kernels_reach_host(&self) -> bool {
        self.kernels_reach_host
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("ordinal", &self.ordinal).finish_non_exhaustive()
    }
}
