//! Reliable connections: the end that answers, and the end that reads.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::RawFd;
use std::sync::Arc;

use pegaflow_engine::{Error, ErrorKind, Result};

use super::abi::{
    ACCESS_REMOTE_READ, AhAttr, CompChannel, Cq, Gid, GlobalRoute, QP_ACCESS_FLAGS, QP_AV, QP_DEST_QPN,
    QP_MAX_DEST_RD_ATOMIC, QP_MAX_QP_RD_ATOMIC, QP_MIN_RNR_TIMER, QP_PATH_MTU, QP_PKEY_INDEX, QP_PORT, QP_RETRY_CNT,
    QP_RNR_RETRY, QP_RQ_PSN, QP_SQ_PSN, QP_STATE, QP_TIMEOUT, QPS_ERR, QPS_INIT, QPS_RTR, QPS_RTS, QPT_RC, Qp, QpAttr,
    QpCap, QpInitAttr, SEND_SIGNALED, SendWr, Sge, WR_RDMA_READ, WorkCompletion,
};
use super::device::{Device, failed, mtu_bytes, mtu_code};
use super::packet_numbers;
use crate::limits::{RDMA_DEPTH_MAX, RDMA_RETRIES, RDMA_TIMEOUT_CODE};
use crate::proto;

/// Hops that a packet may take.
const HOPS_MAX: u8 = 64;

/// Where completions of queue pairs come: of one that reads, or of all on one device that answer, which have none.
pub(super) struct Completions {
    device: Arc<Device>,
    /// Null: there are no notices of completions.
    channel: *mut CompChannel,
    queue: *mut Cq,
}

// SAFETY: what reads has its own, and is used by one thread at a time; what answers only names its own, which
// libibverbs lets any thread do.
unsafe impl Send for Completions {}
// SAFETY: as above.
unsafe impl Sync for Completions {}

impl Completions {
    /// For what never completes anything.
    pub(super) fn of_answers(device: &Arc<Device>) -> Result<Self> {
        let mut made = Self { device: Arc::clone(device), channel: std::ptr::null_mut(), queue: std::ptr::null_mut() };
        made.make_queue(1)?;
        Ok(made)
    }

    fn of_reads(device: &Arc<Device>, count: u32) -> Result<Self> {
        let library = device.library;
        // SAFETY: the device is open.
        let channel = unsafe { (library.create_comp_channel)(device.context) };
        if channel.is_null() {
            return Err(failed("ibv_create_comp_channel"));
        }
        let mut made = Self { device: Arc::clone(device), channel, queue: std::ptr::null_mut() };
        // SAFETY: the channel was just made; nothing waits for events of a queue that is not there yet.
        let set = unsafe { libc::fcntl((*channel).fd, libc::F_SETFL, libc::O_NONBLOCK) };
        if set != 0 {
            return Err(failed("fcntl"));
        }
        made.make_queue(count)?;
        Ok(made)
    }

    fn make_queue(&mut self, count: u32) -> Result<()> {
        let (library, context) = (self.device.library, self.device.context);
        // SAFETY: device and channel are alive, if there is one; the queue has no context of ours.
        self.queue = unsafe { (library.create_cq)(context, count as c_int, std::ptr::null_mut(), self.channel, 0) };
        if self.queue.is_null() { Err(failed("ibv_create_cq")) } else { Ok(()) }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        let library = self.device.library;
        if !self.queue.is_null() {
            // SAFETY: ours; its queue pairs are gone.
            unsafe { (library.destroy_cq)(self.queue) };
        }
        if !self.channel.is_null() {
            // SAFETY: ours; its queue is gone.
            unsafe { (library.destroy_comp_channel)(self.channel) };
        }
    }
}

/// One READ: where from, where to.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadRequest {
    /// Never used twice on one channel.
    pub(super) id: u64,
    pub(super) local_address: u64,
    pub(super) local_key: u32,
    pub(super) remote_address: u64,
    pub(super) remote_key: u32,
    pub(super) bytes: u32,
}

/// One end of a reliable connection. Used by one thread at a time.
pub(super) struct QueuePair {
    /// Goes after `pair` was destroyed.
    completions: Arc<Completions>,
    pair: *mut Qp,
    packet_number: u32,
    depth: usize,
    /// Numbers of READs that have been posted and not completed, in the order in which they complete.
    posted: VecDeque<u64>,
}

// SAFETY: used by one thread at a time, which `&mut` sees to; libibverbs does not care which one.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// An end that reads, once it has its peer's address.
    pub(super) fn reading(device: &Arc<Device>) -> Result<Self> {
        let depth = device.requests_max.min(RDMA_DEPTH_MAX);
        Self::new(Arc::new(Completions::of_reads(device, depth)?), depth, 0)
    }

    /// An end that lets the peer read once it has its address, and does nothing by itself.
    pub(super) fn answering(completions: &Arc<Completions>) -> Result<Self> {
        Self::new(Arc::clone(completions), 1, ACCESS_REMOTE_READ as u32)
    }

    fn new(completions: Arc<Completions>, depth: u32, access: u32) -> Result<Self> {
        let device = Arc::clone(&completions.device);
        let cap = QpCap { max_send_wr: depth, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let queue = completions.queue;
        let mut wanted = QpInitAttr {
            context: std::ptr::null_mut(),
            send_cq: queue,
            recv_cq: queue,
            srq: std::ptr::null_mut(),
            cap,
            kind: QPT_RC,
            all_signaled: 0,
        };
        // SAFETY: domain and queue are alive; the library only reads and writes the structure.
        let pair = unsafe { (device.library.create_qp)(device.domain, &mut wanted) };
        if pair.is_null() {
            return Err(failed("ibv_create_qp"));
        }
        let packet_number = packet_numbers::first();
        let mut made = Self { completions, pair, packet_number, depth: depth as usize, posted: VecDeque::new() };
        let mut start =
            QpAttr { qp_state: QPS_INIT, qp_access_flags: access, port_num: device.nic.port, ..QpAttr::default() };
        made.modify(&mut start, QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS)?;
        Ok(made)
    }

    fn device(&self) -> &Arc<Device> {
        &self.completions.device
    }

    fn modify(&mut self, attributes: &mut QpAttr, mask: c_int) -> Result<()> {
        // SAFETY: the pair is alive and used by this thread alone.
        let code = unsafe { (self.device().library.modify_qp)(self.pair, attributes, mask) };
        if code == 0 {
            return Ok(());
        }
        let why = std::io::Error::from_raw_os_error(code);
        let state = attributes.qp_state;
        Err(Error::new(ErrorKind::Device, format!("ibv_modify_qp to state {state} failed: {why}")))
    }

    /// What the peer has to know to make its end.
    pub(super) fn describe(&self, nic: u32, reads_max: u8) -> proto::QueuePair {
        let device = self.device();
        proto::QueuePair {
            nic,
            // SAFETY: lives as long as `self`; the library does not change it.
            number: unsafe { (*self.pair).number },
            packet_number: self.packet_number,
            gid: device.gid.0.to_vec(),
            lid: device.lid.into(),
            mtu_bytes: mtu_bytes(device.mtu),
            reads_max: reads_max.into(),
        }
    }

    /// Connect to the end that a peer describes: from now on it may read by way of this one.
    pub(super) fn answer(&mut self, peer: &proto::QueuePair) -> Result<()> {
        let (path, mtu) = self.path_to(peer)?;
        let reads = peer.reads_max.clamp(1, self.device().reads_answered_max.into()) as u8;
        let mut ready = QpAttr {
            qp_state: QPS_RTR,
            path_mtu: mtu,
            rq_psn: packet_numbers::within(peer.packet_number),
            dest_qp_num: peer.number,
            ah_attr: path,
            max_dest_rd_atomic: reads,
            min_rnr_timer: 12,
            ..QpAttr::default()
        };
        let mask = QP_STATE | QP_AV | QP_PATH_MTU | QP_DEST_QPN | QP_RQ_PSN | QP_MAX_DEST_RD_ATOMIC | QP_MIN_RNR_TIMER;
        self.modify(&mut ready, mask)
    }

    /// Connect to the end that a peer has made, and be ready to read from it.
    pub(super) fn connect(&mut self, peer: &proto::QueuePair) -> Result<()> {
        self.answer(peer)?;
        let mut ready = QpAttr {
            qp_state: QPS_RTS,
            sq_psn: self.packet_number,
            max_rd_atomic: peer.reads_max.clamp(1, self.device().reads_asked_max.into()) as u8,
            timeout: RDMA_TIMEOUT_CODE,
            retry_cnt: RDMA_RETRIES,
            rnr_retry: RDMA_RETRIES,
            ..QpAttr::default()
        };
        let mask = QP_STATE | QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_SQ_PSN | QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut ready, mask)
    }

    fn path_to(&self, peer: &proto::QueuePair) -> Result<(AhAttr, u32)> {
        let device = self.device();
        let gid: [u8; 16] = peer.gid.as_slice().try_into().map_err(|_| {
            Error::new(ErrorKind::Corrupt, "a peer gave an address of an RDMA port that is none: check that host")
        })?;
        // Another subnet of InfiniBand is reached by GID, as everything is on Ethernet.
        let routed = device.routed || gid[..8] != device.gid.0[..8];
        let path = AhAttr {
            grh: GlobalRoute {
                dgid: Gid(gid),
                sgid_index: device.nic.gid_index,
                hop_limit: HOPS_MAX,
                ..GlobalRoute::default()
            },
            dlid: u16::try_from(peer.lid).unwrap_or(0),
            is_global: routed.into(),
            port_num: device.nic.port,
            ..AhAttr::default()
        };
        Ok((path, mtu_code(peer.mtu_bytes).min(device.mtu)))
    }

    /// READs that may be posted now.
    pub(super) fn room(&self) -> usize {
        self.depth - self.posted.len()
    }

    /// Whether READs are on their way.
    pub(super) fn is_busy(&self) -> bool {
        !self.posted.is_empty()
    }

    /// Have the device read. An error: it was not taken, and will not be done.
    pub(super) fn post(&mut self, read: &ReadRequest) -> Result<()> {
        let mut place = Sge { address: read.local_address, bytes: read.bytes, lkey: read.local_key };
        let mut request = SendWr {
            wr_id: read.id,
            next: std::ptr::null_mut(),
            sges: &mut place,
            sge_count: 1,
            opcode: WR_RDMA_READ,
            flags: SEND_SIGNALED,
            immediate: 0,
            remote_address: read.remote_address,
            rkey: read.remote_key,
            rest: [0; 9],
        };
        let mut refused = std::ptr::null_mut();
        // SAFETY: the pair is alive and used by this thread alone; the request is read before the call returns. The
        // memory that it names is registered and reserved for this read until it has completed.
        let code = unsafe { ((*self.completions.device.context).post_send)(self.pair, &mut request, &mut refused) };
        if code != 0 {
            let why = std::io::Error::from_raw_os_error(code);
            return Err(Error::new(ErrorKind::Device, format!("an RDMA read was not taken: {why}")));
        }
        self.posted.push_back(read.id);
        Ok(())
    }

    /// What has completed: calls `done` for each READ with its number, and the error if it failed. An error of the
    /// queue itself means that nothing more will be heard of what was posted.
    pub(super) fn poll(&mut self, mut done: impl FnMut(u64, Result<()>)) -> Result<usize> {
        let mut completions = [WorkCompletion::default(); 16];
        let mut count = 0;
        loop {
            let room = completions.len() as c_int;
            // SAFETY: the queue is alive and used by this thread alone; the array has room for as many as are asked
            // for.
            let got = unsafe {
                ((*self.completions.device.context).poll_cq)(self.completions.queue, room, completions.as_mut_ptr())
            };
            let Ok(got) = usize::try_from(got) else {
                return Err(Error::new(ErrorKind::Device, "the queue of completions of an RDMA device has failed"));
            };
            for completion in &completions[..got] {
                self.complete(completion, &mut done)?;
            }
            count += got;
            if got < completions.len() {
                return Ok(count);
            }
        }
    }

    fn complete(&mut self, completion: &WorkCompletion, done: &mut impl FnMut(u64, Result<()>)) -> Result<()> {
        if self.posted.front() != Some(&completion.wr_id) {
            let what = "an RDMA device completed a read that was not posted, or in another order";
            return Err(Error::new(ErrorKind::Device, what));
        }
        self.posted.pop_front();
        let result = match completion.status {
            0 => Ok(()),
            status => Err(Error::new(ErrorKind::Closed, self.device().library.status(status))),
        };
        done(completion.wr_id, result);
        Ok(())
    }

    /// Have the descriptor become readable at the next completion. To be called before looking a last time.
    pub(super) fn arm(&mut self) -> Result<RawFd> {
        // SAFETY: the queue is alive.
        let code = unsafe { ((*self.completions.device.context).req_notify_cq)(self.completions.queue, 0) };
        if code != 0 {
            return Err(Error::new(ErrorKind::Device, "an RDMA device gives no notice of completions"));
        }
        // SAFETY: the channel is alive; the library does not change it.
        Ok(unsafe { (*self.completions.channel).fd })
    }

    /// Take notices that have come.
    pub(super) fn take_notices(&mut self) {
        let library = self.device().library;
        let (mut queue, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel is alive and does not block; its only queue is ours, which every notice is acknowledged
        // to.
        while unsafe { (library.get_cq_event)(self.completions.channel, &mut queue, &mut context) } == 0 {
            // SAFETY: as above.
            unsafe { (library.ack_cq_events)(queue, 1) };
        }
    }

    /// Have everything that was posted complete at once, in error if need be. Nothing new is taken.
    pub(super) fn flush(&mut self) -> Result<()> {
        self.modify(&mut QpAttr { qp_state: QPS_ERR, ..QpAttr::default() }, QP_STATE)
    }

    /// Destroy it: after this the device does nothing more for what was posted. `false`: it could not be destroyed.
    pub(super) fn end(&mut self) -> bool {
        if self.pair.is_null() {
            return true;
        }
        // SAFETY: ours; every notice was acknowledged, or the queue would not go away.
        let code = unsafe { (self.device().library.destroy_qp)(self.pair) };
        if code != 0 {
            let why = std::io::Error::from_raw_os_error(code);
            log::error!("pegaflow: ibv_destroy_qp failed on {}: {why}", self.device().nic.device);
            return false;
        }
        self.pair = std::ptr::null_mut();
        self.posted.clear();
        true
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.end();
    }
}
