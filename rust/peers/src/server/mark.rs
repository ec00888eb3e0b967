//! What is known of a connection.

use std::sync::{Arc, OnceLock};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Lives as long as a connection.
#[derive(Debug)]
pub(crate) struct Mark {
    room: Arc<Semaphore>,
    /// There once a call has come over it that showed the token.
    place: OnceLock<OwnedSemaphorePermit>,
}

impl Mark {
    /// Of a connection that takes a place in `room` once it is known whose it is.
    pub(crate) fn new(room: &Arc<Semaphore>) -> Self {
        Self { room: Arc::clone(room), place: OnceLock::new() }
    }

    /// Somebody who is known calls. `false`: there is no room.
    pub(crate) fn admit(&self) -> bool {
        if self.is_admitted() {
            return true;
        }
        let Ok(place) = Arc::clone(&self.room).try_acquire_owned() else { return false };
        // If another call was first, this place is given back.
        let _other = self.place.set(place);
        true
    }

    pub(crate) fn is_admitted(&self) -> bool {
        self.place.get().is_some()
    }
}
