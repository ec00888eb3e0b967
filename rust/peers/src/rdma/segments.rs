//! Segments of the pool that devices may touch, registered when first needed and given up when the pool has.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};

use pegaflow_engine::{DataSegment, Error, ErrorKind, Pool, Result};

use super::abi::{ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, Mr};
use super::device::{Device, failed};
use crate::limits::RDMA_REGIONS_MAX;
use crate::sync::lock;

/// What devices may do with segments.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Write what this process reads from peers.
    LocalWrite,
    /// Send to peers what they read; nothing writes by way of it.
    RemoteRead,
}

/// One segment at one device.
pub(super) struct Registration {
    device: Arc<Device>,
    region: *mut Mr,
    /// Keeps it mapped for as long as the device may touch it.
    mapping: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: made and given up once, by whoever holds the value; in between only two numbers are read.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    fn new(device: &Arc<Device>, segment: &DataSegment, access: Access) -> Result<Self> {
        let flags: c_int = match access {
            Access::LocalWrite => ACCESS_LOCAL_WRITE,
            Access::RemoteRead => ACCESS_REMOTE_READ,
        };
        let address: *mut c_void = std::ptr::with_exposed_provenance_mut(segment.address);
        // SAFETY: the segment is mapped and stays so until `Drop` has given the region up.
        let region = unsafe { (device.library.reg_mr)(device.domain, address, segment.bytes, flags) };
        if region.is_null() {
            let why = failed("ibv_reg_mr");
            let what =
                format!("{} bytes cannot be registered for RDMA: {why} (is `ulimit -l` unlimited?)", segment.bytes);
            return Err(Error::new(ErrorKind::Device, what));
        }
        Ok(Self { device: Arc::clone(device), region, mapping: Some(Arc::clone(&segment.mapping)) })
    }

    pub(super) fn local_key(&self) -> u32 {
        // SAFETY: lives until `Drop`; the library does not change it.
        unsafe { (*self.region).lkey }
    }

    pub(super) fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.region).rkey }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: ours, and nobody uses it any more.
        if unsafe { (self.device.library.dereg_mr)(self.region) } != 0 {
            log::error!("pegaflow: a segment cannot be given up by {}: it stays in memory", self.device.nic.device);
            // The device may still touch it.
            std::mem::forget(self.mapping.take());
        }
    }
}

struct Entry {
    segment: DataSegment,
    /// One per device, once registered.
    registrations: Option<Arc<[Registration]>>,
    /// Which registration of all it was.
    version: u64,
}

/// Segments of the pool as of one version of its list.
#[derive(Default)]
struct Table {
    seen: Option<u64>,
    entries: BTreeMap<u32, Entry>,
    /// Numbers by first address.
    numbers: BTreeMap<usize, u32>,
    /// How many registrations there have been.
    version: u64,
}

/// A registered segment.
#[derive(Clone)]
pub(super) struct Registered {
    pub(super) address: usize,
    pub(super) bytes: usize,
    /// One per device.
    pub(super) registrations: Arc<[Registration]>,
}

/// The segments of one pool for one purpose.
pub(super) struct Segments {
    pool: Arc<Pool>,
    devices: Vec<Arc<Device>>,
    access: Access,
    table: Mutex<Table>,
}

impl Segments {
    pub(super) fn new(pool: Arc<Pool>, devices: Vec<Arc<Device>>, access: Access) -> Self {
        Self { pool, devices, access, table: Mutex::default() }
    }

    /// Take in what the pool has now, and give up what it has given up.
    pub(super) fn follow(&self) -> Result<()> {
        let version = self.pool.data_segments_version();
        if lock(&self.table).seen == Some(version) {
            return Ok(());
        }
        let list = self.pool.data_segments()?;
        let mut table = lock(&self.table);
        table.seen = Some(version);
        table.numbers = list.iter().map(|segment| (segment.address, segment.segment)).collect();
        let mut before = std::mem::take(&mut table.entries);
        for segment in list {
            let known = before.remove(&segment.segment);
            let (registrations, version) = known.map_or((None, 0), |entry| (entry.registrations, entry.version));
            table.entries.insert(segment.segment, Entry { segment, registrations, version });
        }
        // Takes a while, and others want the table.
        drop(table);
        drop(before);
        Ok(())
    }

    /// Number of the segment in which `address` lies.
    pub(super) fn number_at(&self, address: usize) -> Option<u32> {
        let table = lock(&self.table);
        let (_, number) = table.numbers.range(..=address).next_back()?;
        let segment = &table.entries.get(number)?.segment;
        (address - segment.address < segment.bytes).then_some(*number)
    }

    /// The segment `number`, registered now if it is not yet, which takes about a third of a second per gigabyte.
    /// `None` if there is no such segment.
    pub(super) fn registered(&self, number: u32) -> Result<Option<Registered>> {
        let (segment, known) = {
            let table = lock(&self.table);
            let Some(entry) = table.entries.get(&number) else { return Ok(None) };
            (entry.segment.clone(), entry.registrations.clone())
        };
        let registrations = match known {
            Some(registrations) => registrations,
            None => self.register(&segment)?,
        };
        Ok(Some(Registered { address: segment.address, bytes: segment.bytes, registrations }))
    }

    fn register(&self, segment: &DataSegment) -> Result<Arc<[Registration]>> {
        let made: Result<Vec<Registration>> =
            self.devices.iter().map(|device| Registration::new(device, segment, self.access)).collect();
        let made: Arc<[Registration]> = made?.into();
        let mut table = lock(&self.table);
        let next = table.version + 1;
        let Some(entry) = table.entries.get_mut(&segment.segment) else { return Ok(made) };
        if let Some(known) = &entry.registrations {
            // Another thread was faster, and others may already use the keys of its registrations.
            return Ok(Arc::clone(known));
        }
        entry.registrations = Some(Arc::clone(&made));
        entry.version = next;
        table.version = next;
        Ok(made)
    }

    /// Registered segments that are newer than `version`, or `wanted`; and the version of the newest.
    pub(super) fn since(&self, version: u64, wanted: &[u32]) -> (u64, Vec<(u32, Registered)>) {
        let table = lock(&self.table);
        let known = table.entries.iter().filter(|(number, entry)| entry.version > version || wanted.contains(number));
        let described = known.filter_map(|(number, entry)| {
            let registrations = entry.registrations.clone()?;
            Some((*number, Registered { address: entry.segment.address, bytes: entry.segment.bytes, registrations }))
        });
        (table.version, described.take(RDMA_REGIONS_MAX).collect())
    }
}
