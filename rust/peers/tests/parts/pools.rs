//! A pool of each side: the server's holds blocks whose every byte tells where it belongs, the client's has reserved
//! slots.

use std::sync::Arc;

use pegaflow_engine::slot_space::SlotSpace;
use pegaflow_engine::{BlockRef, DataSegment, Namespace, Pool};

use super::common::{self, ShmDir};

/// Sizes of parts: the least, odd ones, a page, and one that is read in several pieces.
pub const PARTS: [u64; 5] = [1, 777, 4096, 70_001, 600_007];

pub struct Side {
    pub dir: ShmDir,
    pub pool: Arc<Pool>,
    pub namespace: Namespace,
    pub part_bytes: Vec<u64>,
}

impl Side {
    pub fn new(name: &str, part_bytes: &[u64]) -> Self {
        Self::with_room(name, part_bytes, 64 << 20)
    }

    pub fn with_room(name: &str, part_bytes: &[u64], pool_bytes: u64) -> Self {
        let dir = ShmDir::new(name);
        let pool = Pool::open("peers", &dir.options(pool_bytes, (pool_bytes / 16).max(4 << 20))).unwrap();
        let namespace = common::namespace(&pool, part_bytes);
        Self { dir, pool, namespace, part_bytes: part_bytes.to_vec() }
    }

    pub fn space(&self) -> Arc<dyn SlotSpace> {
        self.pool.space()
    }

    /// Publish blocks of these numbers, and lease them.
    pub fn store(&self, numbers: std::ops::Range<u64>) -> Vec<BlockRef> {
        for number in numbers.clone() {
            let [block] = self.reserve(number..number + 1)[..] else { panic!("one slot") };
            for part in 0..self.part_bytes.len() as u32 {
                let target = self.pool.space().write_target(block, part).unwrap();
                let bytes = pattern(number, part, target.bytes);
                // SAFETY: reserved by this process, so nobody reads it; address and length come from the pool.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.address, target.bytes) };
                assert!(self.pool.space().mark_part(block, part, None));
            }
            assert_eq!(self.pool.publish(&[block]).unwrap(), 1);
        }
        let keys = common::keys(numbers);
        self.pool.lease(self.namespace, &keys, 0, keys.len()).unwrap()
    }

    /// Reserve one slot per number.
    pub fn reserve(&self, numbers: std::ops::Range<u64>) -> Vec<BlockRef> {
        let mut blocks = Vec::new();
        for number in numbers {
            let reserved = common::reserve(&self.pool, self.namespace, &[common::key(number)]);
            blocks.push(reserved[0].1);
        }
        blocks
    }

    /// Segment and offset of a part of a leased block.
    pub fn place(&self, block: BlockRef, part: u32) -> (u32, u64) {
        let address = self.pool.space().read_source(block, part).unwrap().address.addr();
        let inside = |one: &DataSegment| (one.address..one.address + one.bytes).contains(&address);
        let segment = self.pool.data_segments().unwrap().into_iter().find(inside).unwrap();
        (segment.segment, (address - segment.address) as u64)
    }

    /// Bytes of a reserved slot as they are now.
    pub fn reserved_bytes(&self, block: BlockRef, part: u32) -> Vec<u8> {
        let target = self.pool.space().write_target(block, part).unwrap();
        // SAFETY: reserved by this process, in which nothing writes it while the test looks.
        unsafe { std::slice::from_raw_parts(target.address, target.bytes) }.to_vec()
    }

    /// Fill a reserved slot with one byte.
    pub fn fill(&self, block: BlockRef, byte: u8) {
        for part in 0..self.part_bytes.len() as u32 {
            let target = self.pool.space().write_target(block, part).unwrap();
            // SAFETY: reserved by this process, in which nothing else writes it; address and length come from the
            // pool.
            unsafe { std::ptr::write_bytes(target.address, byte, target.bytes) };
        }
    }
}

/// Bytes that tell their block, part and offset.
pub fn pattern(number: u64, part: u32, bytes: usize) -> Vec<u8> {
    let start = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (u64::from(part) << 40);
    let words = (0..bytes.div_ceil(8) as u64).map(|at| (start + at).wrapping_mul(0xD6E8_FEB8_6659_FD93).to_le_bytes());
    let mut all: Vec<u8> = words.flatten().collect();
    all.truncate(bytes);
    all
}
