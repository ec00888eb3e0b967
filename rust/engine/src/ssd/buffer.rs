//! Memory for I/O: aligned, allocated once, and every buffer with one owner at a time.
//!
//! While the kernel may read or write a buffer its owner is the I/O layer, which gives it back with the answer. A
//! buffer whose answer never comes is never freed.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// Of every buffer; no block device needs more.
pub(crate) const BUFFER_ALIGN: usize = 64 << 10;

struct Arena {
    address: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the arena is plain memory; its bytes are reached through buffers alone, each with one owner.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; every buffer keeps the arena, so none is left.
        unsafe { dealloc(self.address.as_ptr(), self.layout) }
    }
}

/// One buffer.
pub struct Buffer {
    arena: Arc<Arena>,
    number: u16,
    bytes: usize,
}

impl Buffer {
    /// Its number among all buffers of its [`Buffers`].
    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    fn address(&self) -> *mut u8 {
        let stride = self.bytes.next_multiple_of(BUFFER_ALIGN);
        // SAFETY: the arena has a stride for every number that was given out.
        unsafe { self.arena.address.as_ptr().add(usize::from(self.number) * stride) }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: within the arena, initialised (zeroed at first), and this buffer is the only one of its number.
        unsafe { std::slice::from_raw_parts(self.address(), self.bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.address(), self.bytes) }
    }
}

/// All buffers of a queue; those not taken.
pub(crate) struct Buffers {
    free: Vec<Buffer>,
}

impl Buffers {
    /// `count` buffers of `bytes` each.
    pub(crate) fn new(count: u16, bytes: usize) -> Self {
        let total = bytes.next_multiple_of(BUFFER_ALIGN) * usize::from(count.max(1));
        let layout = Layout::from_size_align(total, BUFFER_ALIGN).expect("a constant power of two, and a bounded size");
        // SAFETY: the size is not zero.
        let address = unsafe { alloc_zeroed(layout) };
        let Some(address) = NonNull::new(address) else { handle_alloc_error(layout) };
        let arena = Arc::new(Arena { address, layout });
        // Popped from the end: low numbers first.
        let free = (0..count).rev().map(|number| Buffer { arena: arena.clone(), number, bytes }).collect();
        Self { free }
    }

    /// Buffers that nobody has.
    #[cfg(test)]
    pub(crate) fn left(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn take(&mut self) -> Option<Buffer> {
        self.free.pop()
    }

    pub(crate) fn give(&mut self, buffer: Buffer) {
        self.free.push(buffer);
    }

    /// Address and length of every buffer, by number, before any was taken.
    pub(crate) fn ranges(&self) -> Vec<(*mut u8, usize)> {
        self.free.iter().rev().map(|buffer| (buffer.address(), buffer.bytes)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_apart_and_outlive_their_set() {
        let mut buffers = Buffers::new(3, 5000);
        let mut taken: Vec<Buffer> = std::iter::from_fn(|| buffers.take()).collect();
        assert_eq!((taken.len(), buffers.left()), (3, 0));
        for (number, buffer) in taken.iter_mut().enumerate() {
            assert_eq!(buffer.as_ptr() as usize % BUFFER_ALIGN, 0);
            assert_eq!(usize::from(buffer.number()), number);
            buffer.fill(number as u8);
        }
        drop(buffers);
        for (number, buffer) in taken.iter().enumerate() {
            assert!(buffer.iter().all(|byte| usize::from(*byte) == number));
        }
    }
}
