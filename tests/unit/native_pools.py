"""Real pools and buffers for tests of the native module."""

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path

from pegaflow import _native
from tests.patience import WAIT_SECONDS_MAX

FINGERPRINT = b"tests of the native module".ljust(32, b"\0")


def open_pool(shm_dir: Path, *, name: str = "native") -> _native.Pool:
    """A pool of 8 MiB that may grow in steps of 2 MiB."""
    return _native.Pool.open(name, shm_dir=str(shm_dir), pool_bytes=8 << 20, segment_bytes=2 << 20)


def keys(count: int, *, prefix: bytes = b"key") -> list[bytes]:
    """Distinct keys of one chain."""
    return [prefix + index.to_bytes(8, "big") for index in range(count)]


def reserve_all(namespace: _native.Namespace, wanted: Sequence[bytes]) -> list[int]:
    """Reserve all keys, waiting for the pool to grow. Returns their refs in order."""
    refs: list[int] = []
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while len(refs) < len(wanted):
        assert time.monotonic() < deadline, "the pool did not grow"
        rest = list(wanted[len(refs) :])
        parents = [None if wanted[0] == key else wanted[wanted.index(key) - 1] for key in rest]
        got = namespace.reserve(rest, parents=parents)
        refs += [ref for _, ref in got]
        if not got:
            time.sleep(0.005)
    return refs


def address_of(buffer: bytearray) -> int:
    """Where a buffer lies; it must not be resized while the address is used."""
    return ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))
