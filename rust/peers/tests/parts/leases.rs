//! Leases of a server's blocks that tests end when they like.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use pegaflow_engine::BlockRef;
use pegaflow_engine::slot_space::SlotSpace;
use pegaflow_peers::transport::{LeasedParts, Sending, Ticket};

type End = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Table {
    leases: BTreeMap<u64, ([u8; 16], Vec<BlockRef>)>,
    sending: BTreeMap<u64, (u64, Option<End>)>,
    next: u64,
}

pub struct Leases {
    space: Arc<dyn SlotSpace>,
    table: Arc<Mutex<Table>>,
}

impl Leases {
    pub fn new(space: Arc<dyn SlotSpace>) -> Self {
        Self { space, table: Arc::default() }
    }

    pub fn add(&self, blocks: Vec<BlockRef>) -> Ticket {
        let mut table = self.table.lock().unwrap();
        table.next += 1;
        let ticket = Ticket { lease: table.next, secret: [table.next as u8 ^ 0x5A; 16] };
        table.leases.insert(ticket.lease, (ticket.secret, blocks));
        ticket
    }

    /// End a lease; whoever sends from it is told.
    pub fn end(&self, lease: u64) {
        let mut table = self.table.lock().unwrap();
        table.leases.remove(&lease);
        let ends: Vec<End> =
            table.sending.values_mut().filter(|(of, _)| *of == lease).filter_map(|(_, end)| end.take()).collect();
        drop(table);
        ends.into_iter().for_each(|end| end());
    }

    /// How many are being sent from.
    pub fn sending(&self) -> usize {
        self.table.lock().unwrap().sending.len()
    }
}

impl LeasedParts for Leases {
    fn begin(&self, ticket: &Ticket, end: End) -> Option<Box<dyn Sending>> {
        let mut table = self.table.lock().unwrap();
        let (secret, blocks) = table.leases.get(&ticket.lease)?;
        if *secret != ticket.secret {
            return None;
        }
        let blocks = blocks.clone();
        table.next += 1;
        let id = table.next;
        table.sending.insert(id, (ticket.lease, Some(end)));
        Some(Box::new(Sender { space: Arc::clone(&self.space), table: Arc::clone(&self.table), blocks, id }))
    }
}

struct Sender {
    space: Arc<dyn SlotSpace>,
    table: Arc<Mutex<Table>>,
    blocks: Vec<BlockRef>,
    id: u64,
}

impl Sending for Sender {
    fn part(&self, index: u32, part: u32) -> Option<&[u8]> {
        let source = self.space.read_source(*self.blocks.get(index as usize)?, part)?;
        // SAFETY: the test leased the block, so its bytes stay; address and length come from the pool.
        Some(unsafe { std::slice::from_raw_parts(source.address, source.bytes) })
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.table.lock().unwrap().sending.remove(&self.id);
    }
}
