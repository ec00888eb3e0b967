//! The bytes of the stream; `docs/p2p.md` has the table.

use crate::limits::STREAM_REQUEST_PARTS_MAX;
use crate::transport::Ticket;

/// What a stream begins with: magic, version, zero.
pub(super) const HELLO_BYTES: usize = 16;
/// Lease, secret, count, zero.
pub(super) const REQUEST_HEAD_BYTES: usize = 32;
/// Block and part.
pub(super) const REQUEST_PART_BYTES: usize = 8;
/// Block, part, length.
pub(super) const ANSWER_HEAD_BYTES: usize = 16;
/// The checksum behind the bytes.
pub(super) const ANSWER_TAIL_BYTES: usize = 8;

const MAGIC: &[u8; 8] = b"PEGADATA";
const VERSION: u32 = 1;

/// The beginning of a stream.
pub(super) fn hello() -> [u8; HELLO_BYTES] {
    let mut bytes = [0; HELLO_BYTES];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// The head of a request.
#[derive(Clone, Copy)]
pub(super) struct RequestHead {
    pub(super) ticket: Ticket,
    pub(super) count: usize,
}

impl RequestHead {
    /// `None` if no client of ours says this.
    pub(super) fn decode(bytes: &[u8; REQUEST_HEAD_BYTES]) -> Option<Self> {
        let ticket = Ticket { lease: u64_at(bytes, 0), secret: bytes[8..24].try_into().expect("sixteen bytes") };
        let count = u32_at(bytes, 24) as usize;
        let sane = (1..=STREAM_REQUEST_PARTS_MAX).contains(&count) && u32_at(bytes, 28) == 0;
        sane.then_some(Self { ticket, count })
    }
}

/// A whole request for parts `(block, part)` of one lease.
pub(super) fn request(ticket: &Ticket, parts: &[(u32, u32)]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(REQUEST_HEAD_BYTES + parts.len() * REQUEST_PART_BYTES);
    bytes.extend_from_slice(&ticket.lease.to_le_bytes());
    bytes.extend_from_slice(&ticket.secret);
    bytes.extend_from_slice(&(parts.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&0u32.to_le_bytes());
    for (index, part) in parts {
        bytes.extend_from_slice(&index.to_le_bytes());
        bytes.extend_from_slice(&part.to_le_bytes());
    }
    bytes
}

/// The parts `(block, part)` that a request's body names.
pub(super) fn parts(body: &[u8]) -> impl Iterator<Item = (u32, u32)> {
    body.chunks_exact(REQUEST_PART_BYTES).map(|one| (u32_at(one, 0), u32_at(one, 4)))
}

/// What precedes the bytes of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AnswerHead {
    pub(super) index: u32,
    pub(super) part: u32,
    /// 0: not to be had, and neither bytes nor checksum follow.
    pub(super) bytes: u64,
}

impl AnswerHead {
    pub(super) fn encode(&self) -> [u8; ANSWER_HEAD_BYTES] {
        let mut bytes = [0; ANSWER_HEAD_BYTES];
        bytes[..4].copy_from_slice(&self.index.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.part.to_le_bytes());
        bytes[8..].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; ANSWER_HEAD_BYTES]) -> Self {
        Self { index: u32_at(bytes, 0), part: u32_at(bytes, 4), bytes: u64_at(bytes, 8) }
    }
}
