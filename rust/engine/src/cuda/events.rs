//! Events that are used over and over: making one costs more than recording one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::driver::{Driver, DriverResult, Entered, Event};

/// Events that nobody waits for.
pub(super) struct EventPool {
    driver: Arc<dyn Driver>,
    spare: Mutex<Vec<Event>>,
}

impl EventPool {
    pub(super) fn new(driver: Arc<dyn Driver>) -> Self {
        Self { driver, spare: Mutex::default() }
    }

    /// An event whose earlier uses are over.
    pub(super) fn take(&self) -> DriverResult<Event> {
        let spare = self.lock().pop();
        spare.map_or_else(|| self.driver.create_event(), Ok)
    }

    /// Give an event back. Nothing may be queued that still waits for it.
    pub(super) fn give(&self, event: Event) {
        self.lock().push(event);
    }

    /// Destroy what was given back.
    pub(super) fn clear(&self) {
        let spare = std::mem::take(&mut *self.lock());
        spare.into_iter().for_each(|event| self.driver.destroy_event(event));
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Event>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for EventPool {
    fn drop(&mut self) {
        if !self.lock().is_empty() {
            let driver = Arc::clone(&self.driver);
            let _entered = Entered::new(&*driver);
            self.clear();
        }
    }
}
