//! The streams that a server serves at a time, and which of them has to go for another.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::socket;
use crate::sync::lock;

struct Stream {
    handle: Arc<TcpStream>,
    /// Since when it waits for a request.
    idle: Option<Instant>,
}

#[derive(Default)]
struct Table {
    streams: BTreeMap<u64, Stream>,
    next: u64,
    closed: bool,
}

/// All streams of a server.
pub(super) struct Streams {
    table: Mutex<Table>,
    streams_max: usize,
}

impl Streams {
    pub(super) fn new(streams_max: usize) -> Self {
        Self { table: Mutex::default(), streams_max }
    }

    /// Take one more. If there are too many the one that has been idle for longest is ended; `None` if none is.
    pub(super) fn add(&self, handle: Arc<TcpStream>) -> Option<u64> {
        let mut table = lock(&self.table);
        if table.closed {
            return None;
        }
        if table.streams.len() >= self.streams_max {
            let waiting = table.streams.iter().filter_map(|(id, stream)| Some((stream.idle?, *id)));
            let (_, oldest) = waiting.min()?;
            table.streams.remove(&oldest).inspect(|stream| socket::end(&stream.handle));
        }
        let id = table.next;
        table.next += 1;
        table.streams.insert(id, Stream { handle, idle: Some(Instant::now()) });
        Some(id)
    }

    /// Say whether a stream waits for a request. `false`: it has been ended.
    pub(super) fn set_idle(&self, id: u64, idle: bool) -> bool {
        let mut table = lock(&self.table);
        let Some(stream) = table.streams.get_mut(&id) else { return false };
        stream.idle = idle.then(Instant::now);
        true
    }

    pub(super) fn remove(&self, id: u64) {
        lock(&self.table).streams.remove(&id);
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.table).streams.len()
    }

    /// End all, and take no more.
    pub(super) fn close(&self) {
        let mut table = lock(&self.table);
        table.closed = true;
        table.streams.values().for_each(|stream| socket::end(&stream.handle));
    }
}
