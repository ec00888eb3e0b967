//! What one process has to do with the statistics of its pool: the mapped file, if it could be had.

use std::sync::{Mutex, OnceLock};

use super::file::Traffic;
use super::pressure::Told;
use crate::shm::core::Core;

/// The place of the statistics in a [`Core`].
#[derive(Default)]
pub(crate) struct TrafficSeat {
    file: OnceLock<Option<Traffic>>,
    pub(super) told: Mutex<Told>,
}

impl Core {
    /// Map the file, or make it. Without one the pool works as well, and this process counts nothing in it.
    pub(crate) fn open_traffic(&self) {
        self.traffic.file.get_or_init(|| {
            let opened = Traffic::open_or_create(&self.place, self.control.geometry().slots_max);
            opened
                .inspect_err(|error| {
                    log::warn!("pegaflow: no statistics of pool {} by this process: {error}", self.name)
                })
                .ok()
        });
        self.tell_pressure();
    }

    /// The file, once a namespace was opened.
    pub(crate) fn traffic(&self) -> Option<&Traffic> {
        self.traffic.file.get()?.as_ref()
    }
}
