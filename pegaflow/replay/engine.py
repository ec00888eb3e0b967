"""PegaFlow's engine itself as a policy: a pool of its own with tiny blocks, asked as the connector asks it."""

import hashlib
import tempfile
import time
import weakref

from pegaflow import _native
from pegaflow.errors import InvalidArgument, PoolFull
from pegaflow.replay.trace import Prompt

BLOCK_BYTES = 64
BLOCKS_MAX = 100_000_000
"""Blocks of a pool that is only for a replay: 22 GB with all tables."""

_PAGE_BYTES = 4096
_POOL_BYTES_MIN = 64 << 10
_SLOTS_MIN = 4096
_GROWTH_SECONDS_MAX = 60.0
_GROWTH_LOOK_SECONDS = 0.002


class Engine:
    """A pool with room for ``blocks_max`` blocks, under one of the engine's policies. It goes with the object.

    Raises ``InvalidArgument`` for more than ``BLOCKS_MAX`` blocks, ``ShmFull`` or ``PoolFull`` if there is no room.
    """

    def __init__(self, blocks_max: int, policy: str) -> None:
        if blocks_max > BLOCKS_MAX:
            raise InvalidArgument(f"A pool of {blocks_max:,} blocks is too large for a replay: up to {BLOCKS_MAX:,}.")
        directory = tempfile.TemporaryDirectory(prefix="pegaflow-replay-")
        size = -(-max(blocks_max * BLOCK_BYTES, _POOL_BYTES_MIN) // _PAGE_BYTES) * _PAGE_BYTES
        self._pool = _native.Pool.open(
            "replay",
            shm_dir=directory.name,
            pool_bytes=size,
            segment_bytes=size,
            slots_max=max(_SLOTS_MIN, size // BLOCK_BYTES),
            policy=policy,
        )
        weakref.finalize(self, _end, self._pool, directory)
        self._space = self._pool.namespace(b"replay".ljust(32, b"\0"), 0, [BLOCK_BYTES])
        self._take_all_but(blocks_max)

    def find(self, prompt: Prompt) -> int:
        """How many blocks from the first on are there."""
        return self._space.lookup([_key(block) for block in prompt])

    def store(self, prompt: Prompt) -> None:
        """All blocks of the prompt were used, and those that were absent are stored."""
        keys = [_key(block) for block in prompt]
        self._pool.release(self._space.lease(keys))
        refs = [ref for _, ref in self._space.reserve(keys)]
        self._pool.mark_written(0, refs)
        self._pool.publish(refs)

    def _take_all_but(self, blocks_max: int) -> None:
        """Reserve what the pool has beyond ``blocks_max``, since its memory is in whole pages."""
        slots = self._slots()
        self._space.reserve([b"spare %d" % number for number in range(slots - blocks_max)], evict=False)
        free = self._space.stats()["slots_free"]
        if free != blocks_max:
            raise PoolFull(f"The pool for the replay has {free:,} blocks, not {blocks_max:,}: try again.")

    def _slots(self) -> int:
        """Slots, once the pool has them."""
        self._pool.abort([ref for _, ref in self._space.reserve([b"first"])])
        deadline = time.monotonic() + _GROWTH_SECONDS_MAX
        while not (slots := self._space.stats()["slots"]):
            if time.monotonic() > deadline:
                raise PoolFull("The pool for the replay got no memory.")
            time.sleep(_GROWTH_LOOK_SECONDS)
        return slots


def _key(block: int | str) -> bytes:
    return hashlib.blake2b(repr(block).encode(), digest_size=16).digest()


def _end(pool: "_native.Pool", directory: "tempfile.TemporaryDirectory[str]") -> None:
    pool.close()
    directory.cleanup()
