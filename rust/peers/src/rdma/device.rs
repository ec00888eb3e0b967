//! An RDMA device of this host, opened.

use std::ffi::CStr;
use std::sync::Arc;

use pegaflow_engine::{Error, ErrorKind, Result};

use super::abi::{Context, DeviceAttr, Gid, LINK_LAYER_ETHERNET, Opaque, PORT_ACTIVE, PortAttr};
use super::library::Library;
use crate::limits::RDMA_READ_BYTES_MAX;
use crate::proto;

/// One port of an RDMA device of this host, to be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Name of the device, such as `mlx5_0`.
    pub device: String,
    /// Number of the port, from 1.
    pub port: u8,
    /// Which of the port's addresses.
    pub gid_index: u8,
    /// Bytes of the path MTU, at most: 256 to 4096.
    pub mtu_bytes: u32,
    /// NUMA node, if it is known.
    pub node: Option<u32>,
}

/// A device, with one protection domain for all that this process does on it.
pub(super) struct Device {
    pub(super) library: &'static Library,
    pub(super) context: *mut Context,
    pub(super) domain: Opaque,
    pub(super) nic: Nic,
    pub(super) gid: Gid,
    pub(super) lid: u16,
    /// Addressed by GID, as all Ethernet is.
    pub(super) routed: bool,
    /// Code of the path MTU: 1 is 256 bytes, and each further one twice as many.
    pub(super) mtu: u32,
    /// Bytes of one READ.
    pub(super) read_bytes_max: u64,
    /// READs that one queue pair may have on its way; as the one who asks and as the one who answers.
    pub(super) reads_asked_max: u8,
    /// See `reads_asked_max`.
    pub(super) reads_answered_max: u8,
    /// Requests that one queue pair can hold, and completions of one queue.
    pub(super) requests_max: u32,
}

// SAFETY: libibverbs says that all its functions may be called from any thread at any time; what of an object is not
// to be used twice at once is the matter of those who hold it.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Devices of those `nics` that can be used; for each other one a line says why. None at all where there is no RDMA.
pub(super) fn open_all(nics: &[Nic]) -> Vec<Arc<Device>> {
    let mut devices = Vec::new();
    for nic in nics {
        match Device::open(nic) {
            Ok(device) => devices.push(Arc::new(device)),
            Err(error) => log::warn!("pegaflow: no RDMA by {} port {}: {error}", nic.device, nic.port),
        }
    }
    devices
}

impl Device {
    fn open(nic: &Nic) -> Result<Self> {
        let library = Library::get().map_err(|error| Error::new(ErrorKind::Device, error))?;
        let context = open_context(library, &nic.device)?;
        // From here on `Drop` closes it.
        let mut device = Self {
            library,
            context,
            domain: std::ptr::null_mut(),
            nic: nic.clone(),
            gid: Gid::default(),
            lid: 0,
            routed: true,
            mtu: 1,
            read_bytes_max: 0,
            reads_asked_max: 1,
            reads_answered_max: 1,
            requests_max: 1,
        };
        device.ask_port()?;
        device.ask_limits()?;
        // SAFETY: the device is open.
        device.domain = unsafe { (library.alloc_pd)(context) };
        if device.domain.is_null() {
            return Err(failed("ibv_alloc_pd"));
        }
        Ok(device)
    }

    fn port(&self) -> Result<PortAttr> {
        // SAFETY: plain numbers, for which zero is a value.
        let mut port: PortAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the device is open, and the library fills the structure.
        if unsafe { (self.library.query_port)(self.context, self.nic.port, &mut port) } != 0 {
            return Err(failed("ibv_query_port"));
        }
        Ok(port)
    }

    /// Whether its link is up now.
    pub(super) fn is_up(&self) -> bool {
        self.port().is_ok_and(|port| port.state == PORT_ACTIVE)
    }

    fn ask_port(&mut self) -> Result<()> {
        let port = self.port()?;
        if port.state != PORT_ACTIVE {
            return Err(Error::new(ErrorKind::Device, "the port is not active: connect it or leave it out"));
        }
        // SAFETY: as above.
        let asked =
            unsafe { (self.library.query_gid)(self.context, self.nic.port, self.nic.gid_index.into(), &mut self.gid) };
        if asked != 0 || self.gid == Gid::default() {
            return Err(Error::new(ErrorKind::Device, format!("the port has no GID {}", self.nic.gid_index)));
        }
        self.lid = port.lid;
        self.routed = port.link_layer == LINK_LAYER_ETHERNET;
        self.mtu = mtu_code(self.nic.mtu_bytes).min(port.active_mtu);
        self.read_bytes_max = u64::from(port.max_msg_sz).clamp(1 << 12, RDMA_READ_BYTES_MAX);
        Ok(())
    }

    fn ask_limits(&mut self) -> Result<()> {
        // SAFETY: plain numbers, for which zero is a value.
        let mut limits: DeviceAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the device is open, and the library fills the structure.
        if unsafe { (self.library.query_device)(self.context, &mut limits) } != 0 {
            return Err(failed("ibv_query_device"));
        }
        self.reads_asked_max = limits.max_qp_init_rd_atom.clamp(1, 128) as u8;
        self.reads_answered_max = limits.max_qp_rd_atom.clamp(1, 128) as u8;
        self.requests_max = limits.max_qp_wr.min(limits.max_cqe).max(1) as u32;
        Ok(())
    }

    /// What peers are told.
    pub(super) fn describe(&self) -> proto::Nic {
        proto::Nic {
            device: self.nic.device.clone(),
            port: self.nic.port.into(),
            gid: self.gid.0.to_vec(),
            lid: self.lid.into(),
            mtu_bytes: mtu_bytes(self.mtu),
            node: self.nic.node.map_or(-1, |node| node as i32),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !self.domain.is_null() {
            // SAFETY: ours, and everything made in it has held this value and is gone.
            unsafe { (self.library.dealloc_pd)(self.domain) };
        }
        // SAFETY: as above.
        unsafe { (self.library.close_device)(self.context) };
    }
}

fn open_context(library: &Library, name: &str) -> Result<*mut Context> {
    let mut count = 0;
    // SAFETY: fills the count; null if the kernel knows nothing of RDMA.
    let list = unsafe { (library.get_device_list)(&mut count) };
    if list.is_null() {
        return Err(failed("ibv_get_device_list"));
    }
    let mut context = std::ptr::null_mut();
    for at in 0..count.max(0) as usize {
        // SAFETY: inside the list, which has so many entries; names are terminated strings that live as long as it.
        let (device, known) = unsafe {
            let device = *list.add(at);
            (device, CStr::from_ptr((library.get_device_name)(device)))
        };
        if known.to_str() == Ok(name) {
            // SAFETY: a device of the list.
            context = unsafe { (library.open_device)(device) };
            break;
        }
    }
    // SAFETY: ours; an open device does not need it.
    unsafe { (library.free_device_list)(list) };
    if context.is_null() {
        return Err(Error::new(ErrorKind::Device, format!("there is no device {name}, or it cannot be opened")));
    }
    Ok(context)
}

/// An error of a call that leaves its reason in `errno`.
pub(super) fn failed(call: &str) -> Error {
    Error::new(ErrorKind::Device, format!("{call} failed: {}", std::io::Error::last_os_error()))
}

/// Code of the largest MTU that is not larger.
pub(super) fn mtu_code(bytes: u32) -> u32 {
    (bytes.clamp(256, 4096) / 256).ilog2() + 1
}

pub(super) fn mtu_bytes(code: u32) -> u32 {
    128 << code.clamp(1, 5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_mtus_are_those_of_the_largest_that_fits() {
        let codes = [(0, 1), (256, 1), (511, 1), (512, 2), (1024, 3), (1500, 3), (4096, 5), (9000, 5)];
        for (bytes, code) in codes {
            assert_eq!(mtu_code(bytes), code);
        }
        assert_eq!([1, 2, 3, 4, 5].map(mtu_bytes), [256, 512, 1024, 2048, 4096]);
    }

    #[test]
    fn a_host_without_the_device_has_no_rdma_by_it() {
        let nic = Nic { device: "no_such_device".into(), port: 1, gid_index: 0, mtu_bytes: 4096, node: None };
        assert!(open_all(&[nic]).is_empty());
    }
}
