"""A KV cache on a GPU, a pool beside it, and a copier between the two, ready to be timed."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pegaflow import _native

DEVICE = "cuda"
KIB, MIB = 1 << 10, 1 << 20
JOB_BYTES = 1 << 30
"""What one job copies."""
SEGMENT_BYTES = 256 * MIB
WAIT_MS = 60_000
SLOT_MASK = 0xFFFF_FFFF
FINGERPRINT = b"cuda_copy benchmark".ljust(32, b"\0")


@dataclass
class Cache:
    """A KV cache on the device, and as many blocks of it as make ``JOB_BYTES`` in the pool."""

    fragment_bytes: int
    fragments: int
    pool: _native.Pool
    memory: Any = None
    layout: _native.KVLayout | None = None
    namespace: _native.Namespace | None = None
    ids: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        block_bytes = self.fragment_bytes * self.fragments
        blocks = 2 * JOB_BYTES // block_bytes
        self.memory = torch.randint(
            0, 256, (self.fragments, blocks, self.fragment_bytes), dtype=torch.uint8, device=DEVICE
        )
        step = blocks * self.fragment_bytes
        regions = [
            (self.memory.data_ptr() + index * step, self.fragment_bytes, self.fragment_bytes)
            for index in range(self.fragments)
        ]
        self.layout = _native.KVLayout(regions, blocks)
        self.ids = random.Random(1).sample(range(blocks), JOB_BYTES // block_bytes)
        self.keys = [index.to_bytes(16, "big") for index in range(len(self.ids))]
        self.namespace = self.pool.namespace(FINGERPRINT, 0, [block_bytes], label="cuda_copy")
        synchronize()

    @property
    def bytes(self) -> int:
        """Bytes of one job."""
        return len(self.ids) * self.fragment_bytes * self.fragments

    def reserve(self) -> list[int]:
        """A slot for every block."""
        assert self.namespace is not None
        return reserve_all(self.pool, self.namespace, self.keys)


class Mover:
    """A copier with everything in place to time saves and loads of a whole cache."""

    def __init__(self, cache: Cache, options: dict[str, Any], *, scattered: bool = False, locked: bool = True) -> None:
        assert cache.namespace is not None
        self.cache, self.scattered, self.saved = cache, scattered, False
        self.copier = _native.CudaCopier(cache.pool, **options)
        self.reserved, self.more = cache.reserve(), list[int]()
        self._saving, self._loading = self._order(self.reserved), ([0], [0])
        if locked:
            self.copier.register(cache.namespace, 0)
            wait_until(lambda: self._is_locked(), "segments are not page-locked")

    def _is_locked(self) -> bool:
        progress = self.copier.progress()
        return bool(progress["bytes_registered"] == progress["bytes_seen"] >= self.cache.bytes)

    def save(self) -> int:
        """Save everything into the reserved slots. A slot can be marked written once, so only the first save of a
        slot succeeds; later ones copy the same bytes all the same."""
        first, self.saved = not self.saved, True
        return self._run(self.copier.save, self._saving, may_fail=not first)

    def publish(self) -> None:
        """From now on there is something to load."""
        assert self.cache.namespace is not None
        if self.cache.pool.publish(self.reserved) != len(self.reserved):
            raise SystemExit("Saved blocks were not published.")
        self.leased = self.cache.namespace.lease(self.cache.keys)
        self._loading = self._order(self.leased)

    def load(self) -> int:
        """Load everything into the blocks that it came from."""
        return self._run(self.copier.load, self._loading)

    def reserve_more(self) -> None:
        """Slots for a save beside the load, page-locked too."""
        assert self.cache.namespace is not None
        more = reserve_all(self.cache.pool, self.cache.namespace, [b"more" + key for key in self.cache.keys])
        self._saving, self.saved = self._order(more), False
        self.more = more
        wait_until(lambda: self._is_locked(), "segments are not page-locked")

    def both(self) -> int:
        """Load everything, and save it elsewhere at the same time."""
        jobs = {
            self.copier.load(0, self.cache.layout, *self._loading),
            self.copier.save(0, self.cache.layout, *self._saving),
        }
        while jobs:
            for done in self.copier.wait(WAIT_MS):
                if done.error is not None:
                    raise SystemExit(f"A copy failed: {done.error}.")
                jobs.remove(done.job)
        return 2 * self.cache.bytes

    def check(self) -> None:
        """What was saved comes back."""
        before = self.cache.memory.clone()
        self.cache.memory[:, self.cache.ids] = 0
        synchronize()
        self.load()
        if not torch.equal(before, self.cache.memory):
            raise SystemExit("The copier copied other bytes than it was given.")

    def close(self) -> None:
        """Leave the pool empty."""
        assert self.cache.namespace is not None
        self.cache.pool.release(self.leased)
        self.cache.pool.abort(self.more)
        self.cache.namespace.reset()
        self.copier.close()

    def _order(self, refs: Sequence[int]) -> tuple[list[int], list[int]]:
        """Refs and block ids of one job, by the addresses of the slots or in random order."""
        order = sorted(zip(refs, self.cache.ids, strict=True), key=lambda pair: pair[0] & SLOT_MASK)
        if self.scattered:
            random.Random(2).shuffle(order)
        return [ref for ref, _ in order], [block for _, block in order]

    def _run(self, start: Callable[..., int], order: tuple[list[int], list[int]], *, may_fail: bool = False) -> int:
        job = start(0, self.cache.layout, *order)
        for done in self.copier.wait(WAIT_MS):
            if done.job == job and (done.ok or (may_fail and done.error is None)):
                return self.cache.bytes
            raise SystemExit(f"A copy failed: {done.error}, blocks {done.failed[:10]}.")
        raise SystemExit("A copy did not finish.")


def reserve_all(pool: _native.Pool, namespace: _native.Namespace, keys: Sequence[bytes]) -> list[int]:
    """A slot for every key; the pool grows in the background meanwhile."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        refs = [ref for _, ref in namespace.reserve(keys)]
        if len(refs) == len(keys):
            return refs
        pool.abort(refs)
        pool.grow_ahead(namespace)
        time.sleep(0.01)
    raise SystemExit(f"The pool did not grow: {pool.last_grow_error()}")


def synchronize() -> None:
    """Wait for what PyTorch has queued."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@contextmanager
def cache_of(place: Path, kib: int, fragments: int) -> Iterator[Cache]:
    """A cache and a pool for it."""
    name = f"cuda{kib}-{time.monotonic_ns()}"
    pool = _native.Pool.open(
        name, shm_dir=str(place), pool_bytes=2 * JOB_BYTES + 4 * SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES
    )
    path = pool.path
    try:
        yield Cache(kib * KIB, fragments, pool)
    finally:
        pool.close()
        _native.remove(path)


def wait_until(condition: Callable[[], bool], problem: str) -> None:
    """Look again and again, for up to a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(problem)
        time.sleep(0.001)
