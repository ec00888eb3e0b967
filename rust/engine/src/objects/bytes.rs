//! The bytes of one value, slot by slot, and moving them in and out: the only file of this folder with unsafe code.

use std::ops::Range;

use crate::checksum::{ChainChecksum, part_checksum};
use crate::copy::{CopyRange, CopyThreads, copy_range, copy_ranges};
use crate::error::{Error, Result};
use crate::key::BlockRef;
use crate::shm::core::Core;
use crate::shm::state::{SlotState, State};
use crate::sync::Acquire;

/// Memory of this size is fresh from the kernel for every value (malloc gives it back when it is freed). Getting it
/// page by page would take longer than the copy.
const HUGE_TARGET_BYTES_MIN: usize = 32 << 20;

/// Bytes of a value in one slot. Made by [`Pieces`] alone, so address and length lie in a mapped segment.
struct Piece {
    address: *mut u8,
    bytes: usize,
}

impl Piece {
    /// The bytes of a slot that is pinned, or reserved and written.
    fn pinned(&self) -> &[u8] {
        // SAFETY: in a mapped segment; a sealed slot does not change while it is pinned, and a reserved one is written
        // by its owner alone. Every caller says which of the two it has, for as long as it uses the piece.
        unsafe { std::slice::from_raw_parts(self.address, self.bytes) }
    }
}

/// The slots of a block, head first, cut to the bytes in use. The caller has the block reserved or pinned for as long
/// as it uses the pieces, so the segments stay mapped and the slots stay its own or unchanged.
struct Pieces<'a> {
    core: &'a Core,
    head: BlockRef,
    next: Option<BlockRef>,
    left: usize,
}

impl<'a> Pieces<'a> {
    fn of(core: &'a Core, head: BlockRef, bytes: usize) -> Self {
        Self { core, head, next: Some(head), left: bytes }
    }

    fn step(&mut self) -> Result<Piece> {
        let damaged = || Error::corrupt("the slots of a value are not whole: remove the value");
        let block = self.next.ok_or_else(damaged)?;
        let (address, capacity) = self.core.address_of(block, 0).ok_or_else(damaged)?;
        let bytes = capacity.min(self.left);
        self.left -= bytes;
        if self.left > 0 {
            self.next = self.member_after(block);
        }
        Ok(Piece { address, bytes })
    }

    /// The next member, if it belongs to this head.
    fn member_after(&self, block: BlockRef) -> Option<BlockRef> {
        let slot = self.core.control.slot(block.slot())?.member_next.load(Acquire).checked_sub(1)?;
        let header = self.core.control.slot(slot)?;
        let state = SlotState::decode(header.state.load(Acquire))?;
        (state.state == State::Member && header.parent.load(Acquire) == self.head.0).then(|| state.block(slot))
    }
}

impl Iterator for Pieces<'_> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        (self.left > 0).then(|| self.step().inspect_err(|_| self.left = 0))
    }
}

/// Copies slots of one value, at once or over threads, and sums their checksums up.
struct Mover<'a> {
    threads: Option<&'a CopyThreads>,
    checksum: bool,
    sum: ChainChecksum,
    later: Vec<CopyRange>,
}

impl<'a> Mover<'a> {
    fn new(threads: Option<&'a CopyThreads>, checksum: bool) -> Self {
        Self { threads, checksum, sum: ChainChecksum::default(), later: Vec::new() }
    }

    /// Copy all bytes in use of one slot.
    ///
    /// # Safety
    /// As for [`copy_ranges`], until [`Self::finish`] has returned.
    unsafe fn copy(&mut self, range: CopyRange) {
        if self.threads.is_some() {
            self.later.push(range);
            return;
        }
        // SAFETY: handed on from the caller.
        if let Some(sum) = unsafe { copy_range(range, 0, self.checksum) } {
            self.sum.add(sum);
        }
    }

    /// Take note of a slot before those that are copied.
    fn add(&mut self, slot: &[u8]) {
        if self.checksum {
            self.sum.add(part_checksum(0, slot));
        }
    }

    /// Finish all copies. Returns the checksum of the block.
    fn finish(mut self) -> Result<Option<u64>> {
        if let Some(threads) = self.threads {
            // SAFETY: promised by the callers of `copy`.
            let sums = unsafe { copy_ranges(threads, self.later, 0, self.checksum) }?;
            sums.into_iter().for_each(|sum| self.sum.add(sum));
        }
        Ok(self.sum.finish())
    }
}

/// Write record, key and value into the slots of a block that this process has reserved, the value over `threads` if
/// there are any. Returns the checksum if asked for.
pub(super) fn write(
    core: &Core,
    head: BlockRef,
    mut sources: [&[u8]; 3],
    threads: Option<&CopyThreads>,
    checksum: bool,
) -> Result<Option<u64>> {
    let total = sources.iter().map(|source| source.len()).sum();
    let mut mover = Mover::new(threads, checksum);
    for piece in Pieces::of(core, head, total) {
        let piece = piece?;
        if sources[0].is_empty() && sources[1].is_empty() {
            let (now, later) = sources[2].split_at(piece.bytes);
            sources[2] = later;
            // SAFETY: the slot is reserved by this process and has that many bytes. It is memory of the pool, which the
            // source cannot be, since reserved slots are lent to nobody; the source outlives this function.
            unsafe { mover.copy(CopyRange { source: now.as_ptr(), target: piece.address, bytes: now.len() }) };
            continue;
        }
        let mut filled = 0;
        for source in &mut sources {
            let (now, later) = source.split_at(source.len().min(piece.bytes - filled));
            *source = later;
            // SAFETY: as above; `filled` bytes of the slot are written.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), piece.address.add(filled), now.len()) };
            filled += now.len();
        }
        mover.add(piece.pinned());
    }
    mover.finish()
}

/// Bytes in use of the first slot of a block that the caller has pinned.
pub(super) fn head_bytes(core: &Core, head: BlockRef, total: usize) -> Result<&[u8]> {
    let piece = Pieces::of(core, head, total).step()?;
    // SAFETY: as in `Piece::pinned`, but for as long as the caller keeps its pin.
    Ok(unsafe { std::slice::from_raw_parts(piece.address, piece.bytes) })
}

/// Copy bytes `skip ..` of a block of `total` bytes that the caller has pinned, over `threads` if there are any, and
/// compare the checksum of all its bytes with the expected one if that is given.
///
/// # Safety
/// `target` is writable for `total - skip` bytes, is no memory of the pool, and nobody else uses it meanwhile.
pub(super) unsafe fn read(
    core: &Core,
    head: BlockRef,
    (total, skip): (usize, usize),
    target: *mut u8,
    threads: Option<&CopyThreads>,
    expected: Option<u64>,
) -> Result<()> {
    if total - skip >= HUGE_TARGET_BYTES_MIN {
        ask_for_huge_pages(target, total - skip);
    }
    let mut mover = Mover::new(threads, expected.is_some());
    let mut start = 0;
    for piece in Pieces::of(core, head, total) {
        let piece = piece?;
        let from = skip.saturating_sub(start).min(piece.bytes);
        // SAFETY: pieces add up to `total`, so at most `total - skip` bytes are copied to the target.
        let to = unsafe { target.add((start + from).saturating_sub(skip)) };
        if from == 0 {
            // SAFETY: a pinned slot does not change, and each slot has its own place in the target.
            unsafe { mover.copy(CopyRange { source: piece.address, target: to, bytes: piece.bytes }) };
        } else {
            let wanted = &piece.pinned()[from..];
            // SAFETY: as for `to`; the caller vouches that the target is no memory of the pool.
            unsafe { std::ptr::copy_nonoverlapping(wanted.as_ptr(), to, wanted.len()) };
            mover.add(piece.pinned());
        }
        start += piece.bytes;
    }
    if mover.finish()? != expected {
        return Err(Error::corrupt("the bytes of a value do not match their checksum: remove the value"));
    }
    Ok(())
}

/// A hint for memory that is about to be written as a whole; what the kernel makes of it does not matter.
fn ask_for_huge_pages(target: *mut u8, bytes: usize) {
    const PAGE: usize = 4096;
    let skip = target.align_offset(PAGE);
    let Some(whole) = bytes.checked_sub(skip).map(|rest| rest / PAGE * PAGE) else { return };
    // SAFETY: whatever the range, this advice changes no bytes and unmaps nothing.
    unsafe { libc::madvise(target.wrapping_add(skip).cast(), whole, libc::MADV_HUGEPAGE) };
}

/// Whether a pinned block has `text` at `skip`.
pub(super) fn has_text(core: &Core, head: BlockRef, skip: usize, text: &[u8]) -> Result<bool> {
    let (mut same, mut left) = (true, text);
    visit(core, head, skip..skip + text.len(), |bytes| {
        let (now, later) = left.split_at(bytes.len().min(left.len()));
        same &= now == bytes;
        left = later;
    })?;
    Ok(same && left.is_empty())
}

/// A copy of some bytes of a pinned block.
pub(super) fn text(core: &Core, head: BlockRef, range: Range<usize>) -> Result<Vec<u8>> {
    let mut text = Vec::with_capacity(range.len());
    visit(core, head, range, |bytes| text.extend_from_slice(bytes))?;
    Ok(text)
}

/// Go over some bytes of a pinned block, slot by slot. The caller has checked that it has that many.
fn visit(core: &Core, head: BlockRef, range: Range<usize>, mut visit: impl FnMut(&[u8])) -> Result<()> {
    let mut start = 0;
    for piece in Pieces::of(core, head, range.end) {
        let piece = piece?;
        visit(&piece.pinned()[range.start.saturating_sub(start).min(piece.bytes)..]);
        start += piece.bytes;
    }
    Ok(())
}
