"""Simulated policies that give each block a time and let the lowest go, as the pool does: a block's time is below that
of the block before it in its prompt, so tails go before heads and what stays is a prefix."""

import heapq
from collections import OrderedDict

from pegaflow.replay.trace import Prompt


class Stamped:
    """Least recently used, tails first: what the pool does under ``lru``."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._stamps: dict[int | str, float] = {}
        self._queue: list[tuple[float, int, int | str]] = []
        self._pushed = 0
        self._now = 0.0
        self._horizon = 0.0
        """Highest time that has gone."""

    def find(self, prompt: Prompt) -> int:
        """How many blocks from the first on are there."""
        for position, block in enumerate(prompt):
            if block not in self._stamps:
                return position
        return len(prompt)

    def store(self, prompt: Prompt) -> None:
        """All blocks of the prompt were used, and those that were absent are stored."""
        self._now += len(prompt)
        before = float("inf")
        for position, block in enumerate(prompt):
            latest = self._now - position
            known = self._stamps.get(block)
            stamp = self._first_stamp(block, latest) if known is None else max(known, latest)
            before = min(stamp, before - 1e-6)
            if known is None or before > known:
                self._put(block, before)
            else:
                before = known
        while len(self._stamps) > self._blocks_max:
            self._evict()

    def _first_stamp(self, block: int | str, latest: float) -> float:
        """Time of a block that is stored now."""
        return latest

    def _gone(self, block: int | str) -> None:
        """A block was evicted."""

    def _put(self, block: int | str, stamp: float) -> None:
        self._stamps[block] = stamp
        self._pushed += 1
        heapq.heappush(self._queue, (stamp, self._pushed, block))

    def _evict(self) -> None:
        stamp, _, block = heapq.heappop(self._queue)
        if self._stamps.get(block) == stamp:
            del self._stamps[block]
            self._horizon = max(self._horizon, stamp)
            self._gone(block)


class Probation(Stamped):
    """As ``Stamped``, but a block that is seen for the first time starts near the old end, so that what is used once
    soon goes. One that comes back after it went, and is still remembered, starts at the young end."""

    START = 0.2
    """Where a new block starts: this part of the way from the oldest to now."""

    REMEMBERED = 4
    """Names of blocks that went, as a multiple of the blocks that fit."""

    def __init__(self, blocks_max: int) -> None:
        super().__init__(blocks_max)
        self._ghosts: OrderedDict[int | str, None] = OrderedDict()

    def _first_stamp(self, block: int | str, latest: float) -> float:
        if block in self._ghosts:
            del self._ghosts[block]
            return latest
        return latest - (1 - self.START) * (self._now - self._horizon)

    def _gone(self, block: int | str) -> None:
        self._ghosts[block] = None
        if len(self._ghosts) > self.REMEMBERED * self._blocks_max:
            self._ghosts.popitem(last=False)
