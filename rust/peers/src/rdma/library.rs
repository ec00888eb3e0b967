//! `libibverbs.so.1`, found at run time: it comes with the drivers of RDMA devices. Never unloaded.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use super::abi::{CompChannel, Context, Cq, DeviceAttr, Gid, Mr, Opaque, PortAttr, Qp, QpAttr, QpInitAttr};

macro_rules! functions {
    ($($name:ident = $symbol:literal ( $($argument:ty),* $(,)? ) -> $result:ty;)*) => {
        /// Functions of the library, by the names that they have in its manual.
        #[derive(Clone, Copy)]
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Library {
            fn load() -> Result<Self, String> {
                let library = open_library()?;
                Ok(Self {
                    $($name: {
                        let address = find(library, $symbol).ok_or_else(|| missing($symbol))?;
                        type Function = unsafe extern "C" fn($($argument),*) -> $result;
                        // SAFETY: the library's interface gives the function of this name these arguments and result.
                        unsafe { std::mem::transmute::<*mut c_void, Function>(address) }
                    },)*
                })
            }
        }
    };
}

functions! {
    get_device_list = c"ibv_get_device_list"(*mut c_int) -> *mut Opaque;
    free_device_list = c"ibv_free_device_list"(*mut Opaque) -> ();
    get_device_name = c"ibv_get_device_name"(Opaque) -> *const c_char;
    open_device = c"ibv_open_device"(Opaque) -> *mut Context;
    close_device = c"ibv_close_device"(*mut Context) -> c_int;
    query_device = c"ibv_query_device"(*mut Context, *mut DeviceAttr) -> c_int;
    query_port = c"ibv_query_port"(*mut Context, u8, *mut PortAttr) -> c_int;
    query_gid = c"ibv_query_gid"(*mut Context, u8, c_int, *mut Gid) -> c_int;
    alloc_pd = c"ibv_alloc_pd"(*mut Context) -> Opaque;
    dealloc_pd = c"ibv_dealloc_pd"(Opaque) -> c_int;
    reg_mr = c"ibv_reg_mr"(Opaque, *mut c_void, usize, c_int) -> *mut Mr;
    dereg_mr = c"ibv_dereg_mr"(*mut Mr) -> c_int;
    create_comp_channel = c"ibv_create_comp_channel"(*mut Context) -> *mut CompChannel;
    destroy_comp_channel = c"ibv_destroy_comp_channel"(*mut CompChannel) -> c_int;
    create_cq = c"ibv_create_cq"(*mut Context, c_int, Opaque, *mut CompChannel, c_int) -> *mut Cq;
    destroy_cq = c"ibv_destroy_cq"(*mut Cq) -> c_int;
    get_cq_event = c"ibv_get_cq_event"(*mut CompChannel, *mut *mut Cq, *mut Opaque) -> c_int;
    ack_cq_events = c"ibv_ack_cq_events"(*mut Cq, c_uint) -> ();
    create_qp = c"ibv_create_qp"(Opaque, *mut QpInitAttr) -> *mut Qp;
    modify_qp = c"ibv_modify_qp"(*mut Qp, *mut QpAttr, c_int) -> c_int;
    destroy_qp = c"ibv_destroy_qp"(*mut Qp) -> c_int;
    status_text = c"ibv_wc_status_str"(c_uint) -> *const c_char;
}

impl Library {
    /// The library of this machine.
    pub(super) fn get() -> Result<&'static Self, String> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        LIBRARY.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    /// What the library says of a completion's status.
    pub(super) fn status(&self, status: c_uint) -> String {
        // SAFETY: takes any number; the text is never freed.
        let text = unsafe { (self.status_text)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: a terminated string of the library, as was just checked.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

fn open_library() -> Result<*mut c_void, String> {
    // SAFETY: loads a library of the system, whose initialisers are as trusted as the drivers that it loads.
    let library = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() { Err("libibverbs.so.1 not found: install rdma-core".into()) } else { Ok(library) }
}

fn find(library: *mut c_void, symbol: &CStr) -> Option<*mut c_void> {
    // SAFETY: the library is open and the name terminated.
    let address = unsafe { libc::dlsym(library, symbol.as_ptr()) };
    (!address.is_null()).then_some(address)
}

fn missing(symbol: &CStr) -> String {
    format!("libibverbs has no {}: install a newer rdma-core", symbol.to_string_lossy())
}
