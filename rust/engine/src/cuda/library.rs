//! `libcuda.so.1`, found at run time: the driver that comes with the kernel module. Never unloaded.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use super::driver::{DriverError, DriverResult};

/// CUresult.
pub(super) type Status = c_int;
/// CUdeviceptr.
pub(super) type DeviceAddress = u64;
/// CUcontext, CUstream, CUevent, CUmodule, CUfunction.
pub(super) type Handle = *mut c_void;

/// CUmemLocation.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MemoryLocation {
    pub(super) kind: c_int,
    pub(super) id: c_int,
}

/// CUmemcpyAttributes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyAttributes {
    pub(super) source_access_order: c_int,
    pub(super) source: MemoryLocation,
    pub(super) target: MemoryLocation,
    pub(super) flags: c_uint,
}

macro_rules! functions {
    ($($name:ident = $symbol:literal ( $($argument:ty),* $(,)? );)*) => {
        /// Functions of the driver, by the names that they have in its documentation.
        #[derive(Clone, Copy)]
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> Status,)*
            /// Many copies in one call; from CUDA 13 on.
            pub(super) copy_batch: Option<CopyBatch>,
        }

        impl Library {
            fn load() -> Result<Self, String> {
                let library = open_library()?;
                Ok(Self {
                    $($name: {
                        let address = find(library, $symbol).ok_or_else(|| missing($symbol))?;
                        type Function = unsafe extern "C" fn($($argument),*) -> Status;
                        // SAFETY: the driver's interface gives the function of this name these arguments; `_v2` and
                        // the like pick the version of the interface.
                        unsafe { std::mem::transmute::<Handle, Function>(address) }
                    },)*
                    copy_batch: find(library, c"cuMemcpyBatchAsync_v2").map(|address| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<Handle, CopyBatch>(address) }
                    }),
                })
            }
        }
    };
}

/// cuMemcpyBatchAsync of CUDA 13: targets, sources, sizes, count, attributes, their first indices, count, stream.
pub(super) type CopyBatch = unsafe extern "C" fn(
    *const DeviceAddress,
    *const DeviceAddress,
    *const usize,
    usize,
    *const CopyAttributes,
    *const usize,
    usize,
    Handle,
) -> Status;

functions! {
    init = c"cuInit"(c_uint);
    error_name = c"cuGetErrorName"(Status, *mut *const c_char);
    error_text = c"cuGetErrorString"(Status, *mut *const c_char);
    device_get = c"cuDeviceGet"(*mut c_int, c_int);
    device_attribute = c"cuDeviceGetAttribute"(*mut c_int, c_int, c_int);
    primary_context_retain = c"cuDevicePrimaryCtxRetain"(*mut Handle, c_int);
    primary_context_release = c"cuDevicePrimaryCtxRelease_v2"(c_int);
    context_push = c"cuCtxPushCurrent_v2"(Handle);
    context_pop = c"cuCtxPopCurrent_v2"(*mut Handle);
    capture_mode_exchange = c"cuThreadExchangeStreamCaptureMode"(*mut c_int);
    stream_priorities = c"cuCtxGetStreamPriorityRange"(*mut c_int, *mut c_int);
    stream_create = c"cuStreamCreateWithPriority"(*mut Handle, c_uint, c_int);
    stream_destroy = c"cuStreamDestroy_v2"(Handle);
    stream_wait_event = c"cuStreamWaitEvent"(Handle, Handle, c_uint);
    event_create = c"cuEventCreate"(*mut Handle, c_uint);
    event_destroy = c"cuEventDestroy_v2"(Handle);
    event_record = c"cuEventRecord"(Handle, Handle);
    event_query = c"cuEventQuery"(Handle);
    memory_allocate = c"cuMemAlloc_v2"(*mut DeviceAddress, usize);
    memory_free = c"cuMemFree_v2"(DeviceAddress);
    host_allocate = c"cuMemHostAlloc"(*mut *mut c_void, usize, c_uint);
    host_free = c"cuMemFreeHost"(*mut c_void);
    host_register = c"cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
    host_unregister = c"cuMemHostUnregister"(*mut c_void);
    copy_to_device = c"cuMemcpyHtoDAsync_v2"(DeviceAddress, *const c_void, usize, Handle);
    copy_to_host = c"cuMemcpyDtoHAsync_v2"(*mut c_void, DeviceAddress, usize, Handle);
    module_load = c"cuModuleLoadData"(*mut Handle, *const c_void);
    module_unload = c"cuModuleUnload"(Handle);
    module_function = c"cuModuleGetFunction"(*mut Handle, Handle, *const c_char);
    launch = c"cuLaunchKernel"(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void,
    );
}

impl Library {
    /// The driver of this machine, initialised.
    pub(super) fn get() -> DriverResult<&'static Self> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        let library = LIBRARY.get_or_init(Self::load);
        let library = library.as_ref().map_err(|text| DriverError { call: "dlopen", code: 0, text: text.clone() })?;
        // SAFETY: may be called any number of times, from any thread.
        library.check("cuInit", unsafe { (library.init)(0) })?;
        Ok(library)
    }

    /// `Ok` for success, else the driver's words for the status.
    pub(super) fn check(&self, call: &'static str, status: Status) -> DriverResult<()> {
        if status == 0 {
            return Ok(());
        }
        let words = [self.error_name, self.error_text].map(|function| {
            let mut text = std::ptr::null();
            // SAFETY: writes one pointer, to text that is never freed, or null for a status that it does not know.
            let known = unsafe { function(status, &mut text) } == 0 && !text.is_null();
            // SAFETY: a terminated string of the driver, as it has just said.
            known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        });
        let text = words.into_iter().flatten().collect::<Vec<_>>().join(": ");
        Err(DriverError { call, code: status, text })
    }
}

fn open_library() -> Result<*mut c_void, String> {
    // SAFETY: loads the driver's library, whose initialisers are as trusted as the driver itself.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() { Err("libcuda.so.1 not found: install NVIDIA's driver".into()) } else { Ok(library) }
}

fn find(library: *mut c_void, symbol: &CStr) -> Option<*mut c_void> {
    // SAFETY: the library is open and the name terminated.
    let address = unsafe { libc::dlsym(library, symbol.as_ptr()) };
    (!address.is_null()).then_some(address)
}

fn missing(symbol: &CStr) -> String {
    format!("the driver has no {}: install a newer one", symbol.to_string_lossy())
}
