//! Structures of libibverbs' binary interface, `IBVERBS_1.1`, as far as they are used. They have been the same since
//! 2007 but for what was added in their spare bytes; sizes and places are compared when this is compiled, and with
//! the C header itself by a test.

use std::ffi::{c_int, c_uint, c_void};
use std::mem::offset_of;

/// What only the library looks into.
pub(super) type Opaque = *mut c_void;

/// union ibv_gid.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Gid(pub(super) [u8; 16]);

/// struct ibv_device_attr.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DeviceAttr {
    pub(super) firmware: [u8; 64],
    pub(super) guids: [u64; 2],
    pub(super) max_mr_size: u64,
    pub(super) page_size_cap: u64,
    pub(super) vendor: [u32; 3],
    pub(super) max_qp: c_int,
    pub(super) max_qp_wr: c_int,
    pub(super) device_cap_flags: c_uint,
    pub(super) max_sge: c_int,
    pub(super) max_sge_rd: c_int,
    pub(super) max_cq: c_int,
    pub(super) max_cqe: c_int,
    pub(super) max_mr: c_int,
    pub(super) max_pd: c_int,
    pub(super) max_qp_rd_atom: c_int,
    pub(super) max_ee_rd_atom: c_int,
    pub(super) max_res_rd_atom: c_int,
    pub(super) max_qp_init_rd_atom: c_int,
    pub(super) rest: [c_int; 16],
    pub(super) max_pkeys: u16,
    pub(super) local_ca_ack_delay: u8,
    pub(super) phys_port_cnt: u8,
}

/// struct ibv_port_attr.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct PortAttr {
    pub(super) state: c_uint,
    pub(super) max_mtu: c_uint,
    pub(super) active_mtu: c_uint,
    pub(super) gid_tbl_len: c_int,
    pub(super) port_cap_flags: u32,
    pub(super) max_msg_sz: u32,
    pub(super) counters: [u32; 2],
    pub(super) pkey_tbl_len: u16,
    pub(super) lid: u16,
    pub(super) sm_lid: u16,
    pub(super) small: [u8; 8],
    pub(super) link_layer: u8,
    pub(super) flags: u8,
    pub(super) port_cap_flags2: u16,
}

/// struct ibv_wc.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct WorkCompletion {
    pub(super) wr_id: u64,
    pub(super) status: c_uint,
    pub(super) opcode: c_uint,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    pub(super) immediate: u32,
    pub(super) qp_num: u32,
    pub(super) src_qp: u32,
    pub(super) flags: c_uint,
    pub(super) pkey_index: u16,
    pub(super) slid: u16,
    pub(super) sl: u8,
    pub(super) dlid_path_bits: u8,
}

/// struct ibv_qp_cap.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct QpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

/// struct ibv_qp_init_attr.
#[repr(C)]
pub(super) struct QpInitAttr {
    pub(super) context: Opaque,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: Opaque,
    pub(super) cap: QpCap,
    pub(super) kind: c_uint,
    pub(super) all_signaled: c_int,
}

/// struct ibv_global_route.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct GlobalRoute {
    pub(super) dgid: Gid,
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
}

/// struct ibv_ah_attr.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct AhAttr {
    pub(super) grh: GlobalRoute,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) src_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

/// struct ibv_qp_attr.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct QpAttr {
    pub(super) qp_state: c_uint,
    pub(super) cur_qp_state: c_uint,
    pub(super) path_mtu: c_uint,
    pub(super) path_mig_state: c_uint,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: c_uint,
    pub(super) cap: QpCap,
    pub(super) ah_attr: AhAttr,
    pub(super) alt_ah_attr: AhAttr,
    pub(super) pkey_index: u16,
    pub(super) alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    pub(super) sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) alt_port_num: u8,
    pub(super) alt_timeout: u8,
    pub(super) rate_limit: u32,
}

/// struct ibv_sge.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Sge {
    pub(super) address: u64,
    pub(super) bytes: u32,
    pub(super) lkey: u32,
}

/// struct ibv_send_wr, of a READ.
#[repr(C)]
pub(super) struct SendWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut SendWr,
    pub(super) sges: *mut Sge,
    pub(super) sge_count: c_int,
    pub(super) opcode: c_uint,
    pub(super) flags: c_uint,
    pub(super) immediate: u32,
    pub(super) remote_address: u64,
    pub(super) rkey: u32,
    /// Of other kinds of requests.
    pub(super) rest: [u64; 9],
}

/// Beginning of struct ibv_context: with the functions that the header's inline functions call.
#[repr(C)]
pub(super) struct Context {
    pub(super) device: Opaque,
    pub(super) before_poll: [Opaque; 11],
    pub(super) poll_cq: unsafe extern "C" fn(*mut Cq, c_int, *mut WorkCompletion) -> c_int,
    pub(super) req_notify_cq: unsafe extern "C" fn(*mut Cq, c_int) -> c_int,
    pub(super) before_send: [Opaque; 12],
    pub(super) post_send: unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int,
    pub(super) after_send: [Opaque; 6],
    pub(super) cmd_fd: c_int,
}

/// Beginning of struct ibv_cq.
#[repr(C)]
pub(super) struct Cq {
    pub(super) context: *mut Context,
}

/// Beginning of struct ibv_comp_channel.
#[repr(C)]
pub(super) struct CompChannel {
    pub(super) context: *mut Context,
    pub(super) fd: c_int,
}

/// Beginning of struct ibv_qp.
#[repr(C)]
pub(super) struct Qp {
    pub(super) context: *mut Context,
    pub(super) pointers: [Opaque; 5],
    pub(super) handle: u32,
    pub(super) number: u32,
}

/// struct ibv_mr.
#[repr(C)]
pub(super) struct Mr {
    pub(super) context: *mut Context,
    pub(super) pd: Opaque,
    pub(super) address: Opaque,
    pub(super) bytes: usize,
    pub(super) handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// IBV_QPT_RC.
pub(super) const QPT_RC: c_uint = 2;
/// IBV_QPS_*.
pub(super) const QPS_INIT: c_uint = 1;
/// Ready to receive: answers READs.
pub(super) const QPS_RTR: c_uint = 2;
/// Ready to send.
pub(super) const QPS_RTS: c_uint = 3;
/// Everything is flushed.
pub(super) const QPS_ERR: c_uint = 6;
/// IBV_QP_*: which attributes are set.
pub(super) const QP_STATE: c_int = 1;
/// See [`QP_STATE`].
pub(super) const QP_ACCESS_FLAGS: c_int = 1 << 3;
/// See [`QP_STATE`].
pub(super) const QP_PKEY_INDEX: c_int = 1 << 4;
/// See [`QP_STATE`].
pub(super) const QP_PORT: c_int = 1 << 5;
/// See [`QP_STATE`].
pub(super) const QP_AV: c_int = 1 << 7;
/// See [`QP_STATE`].
pub(super) const QP_PATH_MTU: c_int = 1 << 8;
/// See [`QP_STATE`].
pub(super) const QP_TIMEOUT: c_int = 1 << 9;
/// See [`QP_STATE`].
pub(super) const QP_RETRY_CNT: c_int = 1 << 10;
/// See [`QP_STATE`].
pub(super) const QP_RNR_RETRY: c_int = 1 << 11;
/// See [`QP_STATE`].
pub(super) const QP_RQ_PSN: c_int = 1 << 12;
/// See [`QP_STATE`].
pub(super) const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
/// See [`QP_STATE`].
pub(super) const QP_MIN_RNR_TIMER: c_int = 1 << 15;
/// See [`QP_STATE`].
pub(super) const QP_SQ_PSN: c_int = 1 << 16;
/// See [`QP_STATE`].
pub(super) const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
/// See [`QP_STATE`].
pub(super) const QP_DEST_QPN: c_int = 1 << 20;
/// IBV_WR_RDMA_READ.
pub(super) const WR_RDMA_READ: c_uint = 4;
/// IBV_SEND_SIGNALED.
pub(super) const SEND_SIGNALED: c_uint = 2;
/// IBV_ACCESS_LOCAL_WRITE.
pub(super) const ACCESS_LOCAL_WRITE: c_int = 1;
/// IBV_ACCESS_REMOTE_READ.
pub(super) const ACCESS_REMOTE_READ: c_int = 4;
/// IBV_LINK_LAYER_ETHERNET.
pub(super) const LINK_LAYER_ETHERNET: u8 = 2;
/// IBV_PORT_ACTIVE.
pub(super) const PORT_ACTIVE: c_uint = 4;

macro_rules! same {
    ($($name:ident: $bytes:literal { $($field:ident: $at:literal),* $(,)? })*) => {
        $(const _: () = assert!(size_of::<$name>() == $bytes);
          $(const _: () = assert!(offset_of!($name, $field) == $at);)*)*
    };
}

#[cfg(target_pointer_width = "64")]
same! {
    Gid: 16 {}
    DeviceAttr: 232 { max_mr_size: 80, max_qp_wr: 112, max_cqe: 132, max_qp_rd_atom: 144, max_qp_init_rd_atom: 156,
        phys_port_cnt: 227 }
    PortAttr: 52 { active_mtu: 8, max_msg_sz: 20, lid: 34, link_layer: 46 }
    WorkCompletion: 48 { status: 8, vendor_err: 16, byte_len: 20, qp_num: 28 }
    QpInitAttr: 64 { cap: 32, kind: 52 }
    GlobalRoute: 24 { sgid_index: 20 }
    AhAttr: 32 { dlid: 24, is_global: 29, port_num: 30 }
    QpAttr: 144 { qp_access_flags: 32, cap: 36, ah_attr: 56, alt_ah_attr: 88, pkey_index: 120, max_rd_atomic: 126,
        port_num: 129, timeout: 130, rnr_retry: 132, rate_limit: 136 }
    Sge: 16 {}
    SendWr: 128 { sges: 16, sge_count: 24, opcode: 28, flags: 32, remote_address: 40, rkey: 48 }
    Context: 272 { poll_cq: 96, req_notify_cq: 104, post_send: 208, cmd_fd: 264 }
    CompChannel: 16 { fd: 8 }
    Qp: 56 { number: 52 }
    Mr: 48 { lkey: 36, rkey: 40 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// What the C header says, where it is installed: `name size` and `name.field offset`.
    fn of_the_header(names: &[(&str, &str)]) -> Option<Vec<usize>> {
        let folder = std::env::temp_dir().join(format!("pegaflow-abi-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let prints: String = names
            .iter()
            .map(|(kind, field)| match *field {
                "" => format!("printf(\"%zu\\n\", sizeof({kind}));"),
                field => format!("printf(\"%zu\\n\", offsetof({kind}, {field}));"),
            })
            .collect();
        let source = folder.join("abi.c");
        let includes = "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\n";
        std::fs::write(&source, format!("{includes}int main(void) {{ {prints} }}\n")).unwrap();
        let program = folder.join("abi");
        let built = Command::new("cc").arg(&source).arg("-o").arg(&program).output();
        let numbers = built.ok().filter(|done| done.status.success()).map(|_| {
            let text = String::from_utf8(Command::new(&program).output().unwrap().stdout).unwrap();
            text.lines().map(|line| line.parse().unwrap()).collect()
        });
        std::fs::remove_dir_all(&folder).unwrap();
        numbers
    }

    #[test]
    fn structures_are_those_of_the_header() {
        let ours = [
            (("struct ibv_device_attr", ""), size_of::<DeviceAttr>()),
            (("struct ibv_device_attr", "max_qp_init_rd_atom"), offset_of!(DeviceAttr, max_qp_init_rd_atom)),
            (("struct ibv_port_attr", ""), size_of::<PortAttr>()),
            (("struct ibv_port_attr", "link_layer"), offset_of!(PortAttr, link_layer)),
            (("struct ibv_wc", ""), size_of::<WorkCompletion>()),
            (("struct ibv_wc", "qp_num"), offset_of!(WorkCompletion, qp_num)),
            (("struct ibv_qp_init_attr", ""), size_of::<QpInitAttr>()),
            (("struct ibv_qp_attr", ""), size_of::<QpAttr>()),
            (("struct ibv_qp_attr", "rate_limit"), offset_of!(QpAttr, rate_limit)),
            (("struct ibv_ah_attr", "port_num"), offset_of!(AhAttr, port_num)),
            (("struct ibv_send_wr", ""), size_of::<SendWr>()),
            (("struct ibv_send_wr", "wr.rdma.rkey"), offset_of!(SendWr, rkey)),
            (("struct ibv_context", "ops.poll_cq"), offset_of!(Context, poll_cq)),
            (("struct ibv_context", "ops.req_notify_cq"), offset_of!(Context, req_notify_cq)),
            (("struct ibv_context", "ops.post_send"), offset_of!(Context, post_send)),
            (("struct ibv_context", "cmd_fd"), offset_of!(Context, cmd_fd)),
            (("struct ibv_comp_channel", "fd"), offset_of!(CompChannel, fd)),
            (("struct ibv_qp", "qp_num"), offset_of!(Qp, number)),
            (("struct ibv_mr", "rkey"), offset_of!(Mr, rkey)),
        ];
        let names: Vec<(&str, &str)> = ours.iter().map(|(name, _)| *name).collect();
        let numbers: Vec<usize> = ours.iter().map(|(_, number)| *number).collect();
        // Where there is no header, the numbers that it has given are in the assertions above.
        assert_eq!(of_the_header(&names).unwrap_or_else(|| numbers.clone()), numbers);
    }
}
