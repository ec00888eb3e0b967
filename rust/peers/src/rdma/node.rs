//! Which NUMA node memory lies on.

use std::ffi::{c_int, c_ulong, c_void};

/// MPOL_F_NODE | MPOL_F_ADDR of `get_mempolicy`: the node of the page at an address.
const NODE_OF_ADDRESS: c_ulong = 3;

/// Node of the page at `address`, which is mapped; `None` if the kernel does not say.
pub(super) fn node_of(address: usize) -> Option<u32> {
    let mut node: c_int = -1;
    let address: *const c_void = std::ptr::with_exposed_provenance(address);
    let none = std::ptr::null_mut::<c_ulong>();
    // SAFETY: the call writes one number; it reads one byte at the address, or fails if nothing is mapped there.
    let code =
        unsafe { libc::syscall(libc::SYS_get_mempolicy, &mut node, none, 0 as c_ulong, address, NODE_OF_ADDRESS) };
    (code == 0).then(|| u32::try_from(node).ok()).flatten()
}
