//! Layouts in device memory, where the kernels look them up; uploaded when a layout is first used.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::copy::KvLayout;

use super::driver::{CopyOp, Driver, DriverError, DriverResult, Event, Stream, Way};
use super::events::EventPool;
use super::kernel_params::LayoutTable;

/// Page-locked memory through which tables go.
const STAGING_BYTES: usize = 64 << 10;
/// Tables are uploaded once, so that nothing has to be faster than this.
const UPLOAD_POLL_INTERVAL: Duration = Duration::from_micros(20);

/// A layout that is in device memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceLayout {
    pub(super) regions: u64,
    pub(super) first_tile: u64,
    pub(super) region_count: u32,
    pub(super) tiles_per_region: u32,
    pub(super) tiles_per_block: u32,
    pub(super) alignment: usize,
}

struct Entry {
    /// Keeps the layout's address from being used again, so that it names the layout.
    layout: Weak<KvLayout>,
    device: DeviceLayout,
    bytes: usize,
}

/// All layouts in use.
pub(super) struct LayoutTables {
    driver: Arc<dyn Driver>,
    stream: Stream,
    staging: usize,
    entries: HashMap<*const KvLayout, Entry>,
    /// Memory of layouts that are gone. Giving memory back makes a driver wait for the whole device, so it is kept.
    spare: Vec<(u64, usize)>,
    /// Memory and events of uploads that failed and may still be under way.
    lost: (Vec<u64>, Vec<Event>),
}

// SAFETY: the pointers are names that are compared and never followed.
unsafe impl Send for LayoutTables {}

impl LayoutTables {
    pub(super) fn new(driver: &Arc<dyn Driver>) -> DriverResult<Self> {
        let stream = driver.create_stream()?;
        let staging = match driver.allocate_host(STAGING_BYTES) {
            Ok(staging) => staging,
            Err(error) => {
                driver.destroy_stream(stream);
                return Err(error);
            }
        };
        let (entries, spare, lost) = (HashMap::new(), Vec::new(), Default::default());
        Ok(Self { driver: Arc::clone(driver), stream, staging, entries, spare, lost })
    }

    /// The layout in device memory.
    pub(super) fn find(&mut self, layout: &Arc<KvLayout>, events: &EventPool) -> DriverResult<DeviceLayout> {
        if let Some(entry) = self.entries.get(&Arc::as_ptr(layout)) {
            return Ok(entry.device);
        }
        let spare = &mut self.spare;
        self.entries.retain(|_, entry| {
            let alive = entry.layout.strong_count() > 0;
            if !alive {
                spare.push((entry.device.regions, entry.bytes));
            }
            alive
        });
        let impossible = || DriverError { call: "layout table", code: 0, text: "a block has too many tiles".into() };
        let table = LayoutTable::new(layout).ok_or_else(impossible)?;
        let content = table.bytes();
        let (address, bytes) = self.room(content.len())?;
        if let Err(error) = self.upload(address, &content, events) {
            self.lost.0.push(address);
            return Err(error);
        }
        let device = DeviceLayout {
            regions: address,
            first_tile: address + table.tiles_offset() as u64,
            region_count: table.rows.len() as u32,
            tiles_per_region: table.tiles_per_region,
            tiles_per_block: table.tiles_per_block(),
            alignment: table.alignment,
        };
        self.entries.insert(Arc::as_ptr(layout), Entry { layout: Arc::downgrade(layout), device, bytes });
        Ok(device)
    }

    fn room(&mut self, bytes: usize) -> DriverResult<(u64, usize)> {
        if let Some(position) = self.spare.iter().position(|(_, spare)| *spare >= bytes) {
            return Ok(self.spare.swap_remove(position));
        }
        Ok((self.driver.allocate(bytes)?, bytes))
    }

    fn upload(&mut self, address: u64, content: &[u8], events: &EventPool) -> DriverResult<()> {
        let mut device = address;
        for chunk in content.chunks(STAGING_BYTES) {
            let staging = std::ptr::with_exposed_provenance_mut::<u8>(self.staging);
            // SAFETY: the staging buffer is ours, long enough, and the copy before this one is done.
            unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), staging, chunk.len()) };
            let copy = CopyOp { host: self.staging, device, bytes: chunk.len() };
            let event = events.take()?;
            if let Err(error) = self.upload_chunk(copy, event) {
                self.lost.1.push(event);
                return Err(error);
            }
            events.give(event);
            device += chunk.len() as u64;
        }
        Ok(())
    }

    fn upload_chunk(&self, copy: CopyOp, event: Event) -> DriverResult<()> {
        self.driver.copy(Way::ToDevice, &[copy], self.stream)?;
        self.driver.record(event, self.stream)?;
        while !self.driver.query(event)? {
            std::thread::sleep(UPLOAD_POLL_INTERVAL);
        }
        Ok(())
    }

    /// Give everything back. Nothing on the device may use it any more.
    pub(super) fn close(&mut self) {
        let used = self.entries.drain().map(|(_, entry)| entry.device.regions);
        let spare = self.spare.drain(..).map(|(address, _)| address);
        used.chain(spare).chain(self.lost.0.drain(..)).for_each(|address| self.driver.free(address));
        self.lost.1.drain(..).for_each(|event| self.driver.destroy_event(event));
        self.driver.free_host(self.staging);
        self.driver.destroy_stream(self.stream);
    }
}
