//! Memory of a new segment: near which processor, in how large pages, and that it is there before its first use.
//!
//! All of it is best effort: what the kernel refuses it decides by itself, and the claim that follows says whether
//! there is enough.

use std::num::NonZero;
use std::ops::Range;
use std::thread::available_parallelism;

use crate::shm::mapping::Mapping;
use crate::sync::{AtomicUsize, Relaxed};

/// Memory is populated in steps of this length: whoever maps memory of this process meanwhile waits for one at most.
const STEP_BYTES: usize = 2 << 20;
/// A thread that helps takes so much at a time.
const SHARE_BYTES: usize = 16 << 20;
/// Below this, it is left to whoever uses the memory first.
const POPULATE_BYTES_MIN: usize = 64 << 20;
/// Threads that populate memory where there are CPUs to spare.
const HELPERS_MAX: usize = 4;
const CPUS_TO_SPARE: usize = 8;

const MPOL_PREFERRED: libc::c_int = 1;
/// Numbers of nodes that the kernel may have.
const NODES_MAX: u32 = 1024;

/// Threads that may help with populating memory here.
pub(crate) fn helpers() -> usize {
    let cpus = available_parallelism().map_or(1, NonZero::get);
    if cpus >= CPUS_TO_SPARE { HELPERS_MAX } else { 0 }
}

/// Have the kernel map memory, which it clears first if it is new. Kernels before 5.14 do it at its first use. Memory
/// that is not to be had stays as it is: this is no access that could end in SIGBUS.
///
/// # Safety
/// The range must stay mapped meanwhile.
pub(crate) unsafe fn populate(address: usize, bytes: usize) {
    for offset in (0..bytes).step_by(STEP_BYTES) {
        let start = std::ptr::with_exposed_provenance_mut(address + offset);
        // SAFETY: maps pages of a range that the caller keeps mapped; changes no byte.
        unsafe { libc::madvise(start, STEP_BYTES.min(bytes - offset), libc::MADV_POPULATE_WRITE) };
    }
}

/// Prepare the whole mapping of a file that nobody else uses yet: on `node` if one is named, in huge pages where the
/// file system makes them on advice, and populated by `threads` threads if there are any.
pub(crate) fn furnish(mapping: &Mapping, node: Option<u32>, threads: usize) -> std::io::Result<()> {
    let Some(start) = mapping.address(0, mapping.len()) else { return Ok(()) };
    let placed = node.map_or(Ok(()), |node| prefer_node(start, mapping.len(), node));
    // SAFETY: a range of a mapping that the caller keeps; advice changes no byte.
    unsafe { libc::madvise(start.cast(), mapping.len(), libc::MADV_HUGEPAGE) };
    if threads > 0 && mapping.len() >= POPULATE_BYTES_MIN {
        populate_all(mapping, threads);
    }
    placed
}

fn populate_all(mapping: &Mapping, threads: usize) {
    let next = AtomicUsize::new(0);
    let share = || -> Option<Range<usize>> {
        let begin = next.fetch_add(SHARE_BYTES, Relaxed);
        (begin < mapping.len()).then(|| begin..mapping.len().min(begin + SHARE_BYTES))
    };
    let work = || {
        while let Some(range) = share()
            && let Some(start) = mapping.address(range.start, range.len())
        {
            // SAFETY: inside the mapping, which outlives the scope of these threads.
            unsafe { populate(start.expose_provenance(), range.len()) };
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            let _fewer_will_do = std::thread::Builder::new().name("pega-populate".into()).spawn_scoped(scope, work);
        }
        work();
    });
}

/// Have pages of a shared file come from `node` while it has any. Holds for the file, whoever uses it first.
fn prefer_node(start: *mut u8, bytes: usize, node: u32) -> std::io::Result<()> {
    if node >= NODES_MAX {
        return Err(std::io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut mask = [0u64; NODES_MAX as usize / 64];
    mask[node as usize / 64] = 1 << (node % 64);
    let (mask, bits) = (mask.as_ptr(), libc::c_ulong::from(NODES_MAX + 1));
    // SAFETY: the kernel reads as many bits of the mask as it has (it does not count the last one that it is told of);
    // the range is one mapping, and the call changes no byte.
    let status = unsafe { libc::syscall(libc::SYS_mbind, start, bytes, MPOL_PREFERRED, mask, bits, 0u32) };
    if status == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;
    use crate::shm::file::set_length;

    fn mapping(bytes: usize) -> (File, Mapping) {
        let file = File::from(memfd_create("backing", MFdFlags::MFD_CLOEXEC).unwrap());
        set_length(&file, bytes as u64).unwrap();
        let mapping = Mapping::new(&file, bytes).unwrap();
        (file, mapping)
    }

    fn bytes_there(file: &File) -> u64 {
        use std::os::unix::fs::MetadataExt;
        file.metadata().unwrap().blocks() * 512
    }

    #[test]
    fn memory_is_there_before_its_first_use_only_where_there_are_threads_for_it() {
        let bytes = POPULATE_BYTES_MIN + SHARE_BYTES / 2;
        for (threads, expected) in [(0, 0), (3, bytes as u64)] {
            let (file, mapping) = mapping(bytes);
            furnish(&mapping, None, threads).unwrap();
            assert_eq!(bytes_there(&file), expected);
        }
    }

    #[test]
    fn small_segments_are_left_to_their_first_use() {
        let (file, mapping) = mapping(1 << 20);
        furnish(&mapping, None, 3).unwrap();
        assert_eq!(bytes_there(&file), 0);
    }

    #[test]
    fn memory_can_be_placed_on_a_node_that_is_there() {
        let (file, mapping) = mapping(POPULATE_BYTES_MIN);
        // Where system calls about nodes are forbidden, as in containers, that is an error and no more.
        let allowed = furnish(&mapping, Some(0), 2).is_ok();
        assert_eq!(bytes_there(&file), POPULATE_BYTES_MIN as u64);
        if allowed {
            let start = mapping.address(0, 1).unwrap();
            assert_eq!(policy_of(start), (MPOL_PREFERRED, 1));
        }
    }

    #[test]
    fn a_node_that_cannot_be_is_an_error() {
        let (_file, mapping) = mapping(1 << 20);
        assert!(furnish(&mapping, Some(NODES_MAX), 0).is_err());
        assert!(furnish(&mapping, Some(NODES_MAX - 1), 0).is_err());
    }

    fn policy_of(address: *mut u8) -> (libc::c_int, u64) {
        const MPOL_F_ADDR: libc::c_ulong = 2;
        let (mut mode, mut mask) = (0, [0u64; NODES_MAX as usize / 64]);
        let bits = libc::c_ulong::from(NODES_MAX + 1);
        // SAFETY: writes one number and as many bits as it is told of, but for the last.
        let status =
            unsafe { libc::syscall(libc::SYS_get_mempolicy, &mut mode, mask.as_mut_ptr(), bits, address, MPOL_F_ADDR) };
        assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
        (mode, mask[0])
    }
}
