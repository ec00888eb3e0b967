"""Read-only mappings of segment files, shared by all views of a process.

Python's own ``mmap`` keeps one file descriptor open per mapping and cannot tell anybody when the last buffer made of
*a part* of it is gone. So the mapping is made by the C library, and each view gets a buffer object of its own.
"""

import ctypes
import os
import stat
import threading
import weakref

from pegaflow.errors import PoolCorrupt, PoolRefused

_PROT_READ = 1
_MAP_SHARED = 1
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class SegmentMapping:
    """One segment file, mapped read-only from its first to its last byte until nobody refers to this object."""

    def __init__(self, address: int, size_bytes: int, file: str) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.file = file
        # At exit the kernel unmaps; doing it earlier could pull the memory from under a view that is still alive.
        weakref.finalize(self, _libc.munmap, address, size_bytes).atexit = False

    def buffer(self, offset_bytes: int, length_bytes: int) -> "ctypes.Array[ctypes.c_ubyte]":
        """A buffer object over a range of the segment. It does not keep the mapping alive by itself.

        Raises ``PoolCorrupt`` if the range leaves the file.
        """
        if offset_bytes < 0 or length_bytes < 0 or offset_bytes + length_bytes > self.size_bytes:
            raise PoolCorrupt(
                f"Bytes {offset_bytes}..{offset_bytes + length_bytes} lie outside of {self.file} "
                f"({self.size_bytes} bytes); run 'pegaflow verify'."
            )
        return (ctypes.c_ubyte * length_bytes).from_address(self.address + offset_bytes)


# By device and inode: a name may come to mean another file, a mapped inode cannot.
_mappings: "weakref.WeakValueDictionary[tuple[int, int], SegmentMapping]" = weakref.WeakValueDictionary()
_mappings_lock = threading.Lock()


def _renew_lock() -> None:
    """In a forked child: a lock that another thread of the parent held would stay held for ever."""
    global _mappings_lock
    _mappings_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def map_segment(file: str) -> SegmentMapping:
    """The mapping of segment ``file``, shared with every view that already has one.

    Raises ``PoolRefused`` if the file is a symlink, not a regular file, or of another user, and ``OSError`` if the
    kernel refuses to map it.
    """
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise PoolRefused(f"Segment {file} cannot be opened ({error.strerror}); run 'pegaflow verify'.") from error
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise PoolRefused(f"Segment {file} is not a regular file of this user; remove the pool.")
        with _mappings_lock:
            mapping = _mappings.get((facts.st_dev, facts.st_ino))
            if mapping is None or mapping.size_bytes != facts.st_size:
                mapping = SegmentMapping(_map(fd, facts.st_size, file), facts.st_size, file)
                _mappings[(facts.st_dev, facts.st_ino)] = mapping
            return mapping
    finally:
        os.close(fd)


def _map(fd: int, size_bytes: int, file: str) -> int:
    if size_bytes == 0:
        raise PoolCorrupt(f"Segment {file} is empty; run 'pegaflow verify'.")
    address = _libc.mmap(None, size_bytes, _PROT_READ, _MAP_SHARED, fd, 0)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"Segment {file} cannot be mapped: {os.strerror(code)}")
    return int(address)
