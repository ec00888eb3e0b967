//! A transport whose channels wear out when a test says so, and which says no when that does.
#![allow(missing_docs, unreachable_pub, reason = "of a test")]

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pegaflow_engine::{Error, ErrorKind, Result};
use pegaflow_peers::proto::HelloReply;
use pegaflow_peers::transport::{Channel, ControlCalls, PartRead, ReadOutcome, Transport, TransportKind};

/// What a test sets and sees.
#[derive(Default)]
pub struct Wear {
    pub is_worn: AtomicBool,
    pub refuses: AtomicBool,
    pub opened: AtomicU64,
    pub refused: AtomicU64,
    /// Channels that are there now.
    pub living: AtomicU64,
    /// How long each read might have taken.
    pub patience: Mutex<Vec<Duration>>,
}

/// Another transport's, under the name of RDMA.
pub struct Wearing(pub Arc<Wear>, pub Arc<dyn Transport>);

struct Worn(Arc<Wear>, Box<dyn Channel>);

impl Transport for Wearing {
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }

    fn open(
        &self,
        host: IpAddr,
        hello: &HelloReply,
        session: [u8; 16],
        calls: Arc<dyn ControlCalls>,
        deadline: Instant,
    ) -> Result<Box<dyn Channel>> {
        if self.0.refuses.load(Ordering::Relaxed) {
            self.0.refused.fetch_add(1, Ordering::Relaxed);
            return Err(Error::new(ErrorKind::Busy, "not now"));
        }
        let channel = self.1.open(host, hello, session, calls, deadline)?;
        self.0.is_worn.store(false, Ordering::Relaxed);
        self.0.opened.fetch_add(1, Ordering::Relaxed);
        self.0.living.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(Worn(Arc::clone(&self.0), channel)))
    }
}

impl Channel for Worn {
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }

    fn read(&mut self, parts: &[PartRead], deadline: Instant) -> ReadOutcome {
        self.0.patience.lock().unwrap().push(deadline.saturating_duration_since(Instant::now()));
        self.1.read(parts, deadline)
    }

    fn is_worn(&self) -> bool {
        self.0.is_worn.load(Ordering::Relaxed)
    }

    fn keep(&mut self) {
        self.0.is_worn.store(false, Ordering::Relaxed);
    }
}

impl Drop for Worn {
    fn drop(&mut self) {
        self.0.living.fetch_sub(1, Ordering::Relaxed);
    }
}
