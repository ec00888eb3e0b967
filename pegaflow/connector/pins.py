"""Blocks of vLLM's own block pool that are held until they have been copied.

A pinned block is neither handed out again nor evicted, however its request ends. The number is bounded: what does not
fit is saved later or not at all.
"""

import time
from collections.abc import Sequence
from typing import Any

PINNED_SHARE_MAX = 10
"""At most one block in this many is pinned."""

PINNED_MIN = 8
"""So many blocks may always be pinned, as long as that is no more than a quarter of the pool."""

FREES_SOON_SECONDS = 1.0
"""For so long after the oldest pin vLLM may wait for blocks to come back instead of preempting a request."""


class Pins:
    """References that we hold in vLLM's block pool."""

    def __init__(self) -> None:
        self._pool: Any = None
        self.count = 0
        self.count_max = 0

    def bind(self, block_pool: Any) -> None:
        """Use vLLM's ``block_pool``. Without one nothing can be pinned, and nothing is saved."""
        self._pool = block_pool
        blocks = len(block_pool.blocks)
        self.count_max = max(blocks // PINNED_SHARE_MAX, min(PINNED_MIN, blocks // 4))

    @property
    def bound(self) -> bool:
        """Whether blocks can be held at all."""
        return self._pool is not None

    def hold(self, block_ids: Sequence[int]) -> list[Any]:
        """Hold blocks of a request that is being loaded. They do not count: the request has them anyway."""
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        return blocks

    def let_go(self, blocks: list[Any]) -> None:
        """End a ``hold``; the last of a chain is reused first."""
        if blocks:
            self._pool.free_blocks(list(reversed(blocks)))

    @property
    def room(self) -> int:
        """How many more blocks may be pinned."""
        return max(0, self.count_max - self.count)

    def pin(self, block_ids: Sequence[int]) -> list[Any]:
        """Hold blocks. The null block is never among them: callers leave id 0 out."""
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        assert not any(block.is_null for block in blocks)
        self._pool.touch(blocks)
        self.count += len(blocks)
        return blocks

    def unpin(self, blocks: list[Any]) -> None:
        """Let go of blocks; the last of a chain is reused first."""
        if blocks:
            self.count -= len(blocks)
            self.let_go(blocks)


def frees_soon(oldest_started: float | None) -> bool:
    """Whether pins taken at ``oldest_started`` are about to be released."""
    return oldest_started is not None and time.monotonic() - oldest_started < FREES_SOON_SECONDS
