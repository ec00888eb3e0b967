"""Processes that hold a real pool, for tests that look at it from outside or kill them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART_BYTES = 4096
BLOCKS = 8
FINGERPRINT = b"tests of pools".ljust(32, b"\0")
POOL_BYTES = 4 << 20

# Stores BLOCKS blocks, leases the first, reserves one more, says so, and waits to be killed or for end of input.
_HOLDER = """
import sys
from pegaflow import _native
from tests.unit.pool_processes import BLOCKS, keys, open_namespace, store
pool, namespace = open_namespace(sys.argv[1], sys.argv[2])
store(pool, namespace)
leased = namespace.lease(keys()[:1])
reserved = namespace.reserve([b"unfinished".ljust(16)])
assert len(leased) == 1 and len(reserved) == 1, (leased, reserved)
print("ready", flush=True)
sys.stdin.read()
"""


def keys() -> list[bytes]:
    """Keys of the blocks of ``store``."""
    return [index.to_bytes(16, "big") for index in range(BLOCKS)]


def block_bytes(index: int) -> bytes:
    """What ``store`` writes into block ``index``."""
    return bytes((index * 7 + offset) % 251 for offset in range(PART_BYTES))


def open_namespace(name: str, shm_dir: str, *, create: bool = True):  # type: ignore[no-untyped-def]
    """A small pool and its one namespace."""
    from pegaflow import _native

    pool = _native.Pool.open(name, shm_dir=shm_dir, pool_bytes=POOL_BYTES, create=create, label="holder")
    return pool, pool.namespace(FINGERPRINT, 0, [PART_BYTES], label="tiny model")


def store(pool, namespace) -> None:  # type: ignore[no-untyped-def]
    """Store all blocks with their checksums; waits while the pool grows."""
    import time

    import numpy

    from pegaflow import _native
    from tests.patience import WAIT_SECONDS_MAX

    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while len(reserved := namespace.reserve(keys())) < BLOCKS:
        assert time.monotonic() < deadline, pool.last_grow_error()
        pool.abort([ref for _, ref in reserved])
        time.sleep(0.01)
    refs = [ref for _, ref in reserved]
    memory = numpy.frombuffer(b"".join(block_bytes(index) for index in range(BLOCKS)), dtype=numpy.uint8)
    layout = _native.KVLayout([(memory.ctypes.data, PART_BYTES, PART_BYTES)], BLOCKS)
    copier = _native.HostCopier(pool, threads=1)
    copier.save(0, layout, refs, list(range(BLOCKS)))
    (done,) = copier.wait(240_000)
    assert done.ok, done.failed
    copier.close()
    assert pool.publish(refs) == BLOCKS


def python(program: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """A Python process that can import this package."""
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | environment,
    )


@contextmanager
def holder(name: str, shm_dir: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds a lease and a reservation; killed at the end of the block if it still lives."""
    process = python(_HOLDER, name, str(shm_dir))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()
