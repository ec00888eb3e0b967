"""One process of the hammer: stores, leases, loads and checks blocks of one small pool until it is killed.

``python -m tests.multiprocess.hammer_process SHM_DIR SEED REPORT``. Every block carries its key, its part, a nonce and
a digest over all of it, so that a wrong byte shows wherever it comes from. The report is a JSON file, written anew
every few steps, with how often each operation has slept at most.
"""

import hashlib
import json
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from pegaflow import _native
from tests.patience import WAIT_SECONDS_MAX, patiently, times_slept
from tests.unit.native_pools import address_of

POOL_NAME = "hammered"
PART_BYTES = [2048, 1024]
SEGMENT_BYTES = 64 << 10
POOL_BYTES = 8 * SEGMENT_BYTES
FINGERPRINTS = [b"hammered".ljust(32, b"\0"), b"reset now and then".ljust(32, b"\0")]
CHAINS = 16
LENGTH = 12
SHARED_LENGTH = 4
DIGEST_BYTES = 16

T = TypeVar("T")


def open_pool(shm_dir: str, policy: str | None = None) -> _native.Pool:
    """The pool that all processes share."""

    def opened() -> _native.Pool:
        return _native.Pool.open(
            POOL_NAME, shm_dir=shm_dir, pool_bytes=POOL_BYTES, segment_bytes=SEGMENT_BYTES, policy=policy
        )

    return patiently(opened)  # whoever makes it may stand still for a while


def open_namespaces(pool: _native.Pool) -> list[_native.Namespace]:
    """Its two namespaces; a sibling that stands still may hold the lock over them for a while."""
    return [patiently(partial(pool.namespace, fingerprint, 0, PART_BYTES)) for fingerprint in FINGERPRINTS]


def chain(number: int) -> list[bytes]:
    """Keys of a chain; four chains each begin alike."""
    names = [f"shared {number // 4} {i}" if i < SHARED_LENGTH else f"own {number} {i}" for i in range(LENGTH)]
    return [hashlib.sha256(name.encode()).digest() for name in names]


def content(key: bytes, part: int, nonce: int) -> bytes:
    """What one part of a block holds."""
    head = nonce.to_bytes(8, "little") + key + part.to_bytes(8, "little")
    body = head + random.Random(nonce).randbytes(PART_BYTES[part] - len(head) - DIGEST_BYTES)
    return body + hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def problem(key: bytes, part: int, data: bytes) -> str | None:
    """What is wrong with one part of a block."""
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if body[8:40] != key or body[40:48] != part.to_bytes(8, "little"):
        return f"part {part} belongs to another block or part"
    if hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() != digest:
        return f"part {part} has wrong bytes"
    return None


class Hammer:
    """The loop of one process."""

    def __init__(self, shm_dir: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = open_pool(shm_dir)
        self.spaces = open_namespaces(self.pool)
        self.copier = _native.HostCopier(self.pool, threads=1)
        self.memory = [bytearray(LENGTH * part_bytes) for part_bytes in PART_BYTES]
        self.layouts = [
            _native.KVLayout([(address_of(memory), part_bytes, part_bytes)], LENGTH)
            for memory, part_bytes in zip(self.memory, PART_BYTES, strict=True)
        ]
        self.most_sleeps: dict[str, int] = {}
        self.checked = 0

    def watched(self, name: str, call: Callable[[], T]) -> T:
        before = times_slept()
        result = call()
        self.most_sleeps[name] = max(times_slept() - before, self.most_sleeps.get(name, 0))
        return result

    def store(self, space: _native.Namespace, keys: list[bytes]) -> None:
        reserved = self.watched("reserve", lambda: space.reserve(keys))
        refs = [ref for _, ref in reserved]
        nonce = self.random.getrandbits(60)
        for part, memory in enumerate(self.memory):
            for index, _ in reserved:
                start = index * PART_BYTES[part]
                memory[start : start + PART_BYTES[part]] = content(keys[index], part, nonce)
            self.copier.save(part, self.layouts[part], refs, [index for index, _ in reserved])
        self.finish_copies(len(PART_BYTES))
        self.watched("publish", lambda: self.pool.publish(refs))

    def finish_copies(self, jobs: int) -> None:
        """Wait until this many copy jobs are done, all of them well."""
        while jobs:
            done = self.copier.wait(int(1000 * WAIT_SECONDS_MAX))
            assert done, "a copy hangs"
            for job in done:
                assert job.ok, f"a block that is reserved or leased could not be copied: {job.failed}"
            jobs -= len(done)

    def load(self, space: _native.Namespace, keys: list[bytes]) -> None:
        refs = self.watched("lease", lambda: space.lease(keys))
        for part, layout in enumerate(self.layouts):
            self.copier.load(part, layout, refs, list(range(len(refs))))
        self.finish_copies(len(PART_BYTES))
        for part, memory in enumerate(self.memory):
            for index, key in enumerate(keys[: len(refs)]):
                what = problem(key, part, bytes(memory[index * PART_BYTES[part] : (index + 1) * PART_BYTES[part]]))
                assert what is None, what
        self.checked += len(refs)
        self.watched("release", lambda: self.pool.release(refs))

    def step(self) -> None:
        space = self.random.choices(self.spaces, (4, 1))[0]
        keys = chain(self.random.randrange(CHAINS))[: self.random.randint(1, LENGTH)]
        kind = self.random.random()
        if kind < 0.45:
            self.store(space, keys)
        elif kind < 0.9:
            self.load(space, keys)
        elif kind < 0.97:
            self.watched("lookup", lambda: space.lookup(keys))
            self.watched("touch", lambda: space.touch(keys))
        elif space is self.spaces[1]:
            space.reset()


def main(shm_dir: str, seed: str, report: str) -> None:
    """Hammer until killed."""
    hammer = Hammer(shm_dir, int(seed))
    while True:
        for _ in range(4):
            hammer.step()
        facts = {"most_sleeps": hammer.most_sleeps, "checked": hammer.checked, "stats": hammer.pool.stats()}
        # Whole or not at all: this process may be killed while it writes.
        Path(report + ".new").write_text(json.dumps(facts))
        Path(report + ".new").rename(report)


if __name__ == "__main__":
    main(*sys.argv[1:])
