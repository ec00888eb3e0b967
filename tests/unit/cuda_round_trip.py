"""Started by ``test_native_cuda``: blocks go to a pool and back through the CUDA library named on the command line."""

import ctypes
import random
import sys
import time
from pathlib import Path
from typing import Any

from pegaflow import _native
from tests.unit.native_pools import FINGERPRINT, address_of, keys, open_pool, reserve_all

BLOCKS = 48
LENGTHS = (4096, 1024, 1024)
WAIT_MS = 240_000


def layout_of(buffer: bytearray) -> _native.KVLayout:
    """Layers of unequal fragments, each layer's blocks in a row."""
    regions, offset = [], 0
    for length in LENGTHS:
        regions.append((address_of(buffer) + offset, length, length))
        offset += length * BLOCKS
    return _native.KVLayout(regions, BLOCKS)


def finish(copier: _native.CudaCopier, job: int) -> None:
    """Wait for the only job."""
    (done,) = copier.wait(WAIT_MS)
    if done.job != job or not done.ok or done.bytes != BLOCKS * sum(LENGTHS):
        raise SystemExit(f"job {done.job}: failed {done.failed}, error {done.error}, {done.bytes} bytes")


def is_registered(progress: dict[str, Any]) -> bool:
    """Everything that was there: the pool may have grown meanwhile, and either segment comes first."""
    registered: int = progress["bytes_registered"]
    return 0 < progress["bytes_seen"] <= registered


def main(library: str, shm_dir: str, backend: str) -> None:
    """Copy there and back, once before and once after segments are page-locked."""
    ctypes.CDLL(library)  # found by its name from now on
    pool = open_pool(Path(shm_dir))
    namespace = pool.namespace(FINGERPRINT, 0, [sum(LENGTHS)])
    copier = _native.CudaCopier(pool, backend=backend, ring_buffer_bytes=65536, direct_bytes_min=2000, copy_streams=2)
    source = bytearray(random.Random(1).randbytes(BLOCKS * sum(LENGTHS)))
    refs = reserve_all(namespace, keys(BLOCKS))
    finish(copier, copier.save(0, layout_of(source), refs, range(BLOCKS), 0))
    pool.publish(refs)
    leased = namespace.lease(keys(BLOCKS))
    for _ in range(2):
        target = bytearray(len(source))
        finish(copier, copier.load(0, layout_of(target), leased, range(BLOCKS)))
        if target != source:
            raise SystemExit("other bytes came back")
        copier.register(namespace, 0)
        deadline = time.monotonic() + WAIT_MS / 1000
        while not is_registered(copier.progress()) and time.monotonic() < deadline:
            time.sleep(0.005)
    stats, progress = copier.stats(), copier.progress()
    if stats["bytes_bounced"] != 2 * len(source) or progress["problem"] or not copier.healthy() or copier.problem():
        raise SystemExit(f"{stats} {progress} {copier.problem()}")
    pool.release(leased)
    copier.close()
    pool.close()
    sys.stdout.write("equal\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
