"""What the ranks of several hosts have of each request, asked of all of them at a time.

A question goes out with a step and the answers come back with its results, so nothing waits and no host can be asked
that the step does not run on. What a rank answers it holds, until it is told to let go or its process ends: there is no
time in which a hit could be lost. A hit is what all ranks hold. Who has not answered in time has nothing.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pegaflow.connector.geometry import Geometry, GroupKind
from pegaflow.connector.log import logger
from pegaflow.connector.metadata import ShardAnswer, ShardAsk
from pegaflow.connector.shard_pool import ShardNamespace, ShardPool
from pegaflow.metrics import Recorder

ANSWER_SECONDS_MAX = 5.0
"""How long a request is put off for the answers. One step has to end before they are there, and a step may be a long
prompt's."""

TURN_SECONDS_MAX = 5.0
"""How long a request is put off for its turn to be asked for, counted from when another one last had its turn."""

AWAY_SECONDS = 0.5
"""A request that vLLM did not ask about for so long was not put off in that time: others were in front of it."""

HELD_SECONDS_MAX = 10.0
"""How long ranks hold blocks for a request that does not come back for them; it asks again when it does."""

OPEN_MAX = 64
"""Requests that blocks are held for before they are given any."""

KEYS_MAX = 1 << 16
"""Keys of one question."""

KEYS_OPEN_MAX = 1 << 16
"""With so many keys in all that blocks are held for, nobody else has a turn."""

LATE = "not all ranks have said within %.0f s what their hosts have; this counts as a miss."
CROWDED = "so many other requests wait that one had no turn to be asked for within %.0f s; this counts as a miss."


@dataclass
class _Asked:
    since: float
    """When the ranks were asked; before that, since when the request is put off."""
    names: int
    """``ShardPool.names`` at that time."""
    ask: ShardAsk | None = None
    """``None`` while there are too many others."""
    answer: ShardAnswer | None = None
    answered_at: float = 0.0
    visited_at: float = 0.0
    taken: set[int] = field(default_factory=set)
    """Refs that an offer has taken over."""


class ShardView:
    """What all ranks hold of one request's blocks of a group."""

    def __init__(self, space: ShardNamespace, refs: Mapping[bytes, int], taken: set[int]) -> None:
        """``refs``: of what they hold, by key. ``taken``: takes the refs that are leased."""
        self._space, self._refs, self._taken = space, refs, taken
        self.block_bytes = space.block_bytes

    def lookup(self, keys: Sequence[bytes], start: int = 0) -> int:
        """How many consecutive ``keys[start:]`` are held."""
        return sum(1 for _ in itertools.takewhile(self._refs.__contains__, itertools.islice(keys, start, None)))

    def contains(self, keys: Sequence[bytes]) -> bytes:
        """One byte per key: 1 held, 0 not."""
        return bytes(key in self._refs for key in keys)

    def lease(self, keys: Sequence[bytes], start: int = 0, stop: int | None = None) -> list[int]:
        """Take over what is held of the run from ``keys[start]``."""
        run = itertools.takewhile(self._refs.__contains__, keys[start:stop])
        refs = [self._refs[key] for key in run]
        self._taken.update(refs)
        return refs

    def note_prompt(self, keys: Sequence[bytes], **found: int | None) -> None:
        """Nobody keeps statistics."""


def asks_of(pool: Any, geometry: Geometry, ranks: int, recorder: Recorder) -> "ShardAsks | None":
    """Questions to ranks, if ``pool`` stands for theirs."""
    return ShardAsks(geometry, pool, ranks, recorder) if isinstance(pool, ShardPool) else None


class ShardAsks:
    """All questions of one engine."""

    def __init__(self, geometry: Geometry, pool: ShardPool, ranks: int, recorder: Recorder) -> None:
        self._geometry, self._ranks, self._recorder = geometry, ranks, recorder
        self.pool = pool
        self._open: dict[str, _Asked] = {}
        self._by_number: dict[int, _Asked] = {}
        self._numbers = itertools.count(1)
        self._keys_open = 0
        self._turn_at = 0.0
        """When a request had its turn last."""
        self._said: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        """Whether a request is put off."""
        return request_id in self._open

    def views(
        self, request_id: str, spaces: Mapping[int, ShardNamespace], keys: Mapping[int, Sequence[bytes]]
    ) -> dict[int, ShardView] | None:
        """What all ranks hold of a request; ``None`` while that is not known. Never waits. Until the request is
        dropped, they go on holding it."""
        if not any(keys.values()):
            return self._nothing(spaces)
        now = time.monotonic()
        asked = self._open.get(request_id)
        if asked is not None and asked.names != self.pool.names:
            self.drop(request_id)
            asked = None
        if asked is None:
            asked = self._open[request_id] = _Asked(now, self.pool.names)
        if asked.ask is None and len(self._by_number) < OPEN_MAX and self._keys_open < KEYS_OPEN_MAX:
            asked.ask = self._ask(keys)
            self._keys_open += asked.ask.keys
            self._by_number[asked.ask.number] = asked
            asked.since = self._turn_at = now
        if asked.ask is None:
            if now - asked.visited_at > AWAY_SECONDS:
                asked.since = now
            asked.visited_at = now
            if now - max(asked.since, self._turn_at) < TURN_SECONDS_MAX:
                return None
            return self._give_up("shard_crowded", CROWDED, TURN_SECONDS_MAX, spaces)
        if asked.answer is not None and asked.answer.ranks >= self._ranks:
            return self._views(asked, asked.ask, asked.answer, spaces)
        if now - asked.since < ANSWER_SECONDS_MAX:
            return None
        return self._give_up("shard_late", LATE, ANSWER_SECONDS_MAX, spaces)

    def answered(self, number: int, answer: ShardAnswer, spaces: Mapping[int, ShardNamespace] | None) -> None:
        """Take the answers of some ranks."""
        asked = self._by_number.get(number)
        if asked is None or asked.ask is None:
            return  # nobody wants to know any more, and they were told to let go
        asked.answer = asked.answer.merge(answer) if asked.answer is not None else answer
        asked.answered_at = time.monotonic()
        if asked.answer.ranks >= self._ranks and spaces is not None:
            for (group, _, keys, _), present in zip(asked.ask.groups, asked.answer.present, strict=True):
                spaces[group].learn(keys, present)

    def drop(self, request_id: str) -> None:
        """Have the ranks let go of what nobody has taken over."""
        asked = self._open.pop(request_id, None)
        if asked is None or asked.ask is None:
            return
        del self._by_number[asked.ask.number]
        self._keys_open -= asked.ask.keys
        if self.pool.withdraw(asked.ask):
            return  # nobody has heard of it
        for _, first, keys, _ in asked.ask.groups:
            self.pool.release(ref for ref in range(first, first + len(keys)) if ref not in asked.taken)

    def drop_all(self) -> None:
        """Nobody needs anything any more."""
        for request_id in list(self._open):
            self.drop(request_id)

    def drop_old(self) -> None:
        """Have the ranks let go of what was not asked for again."""
        latest = time.monotonic() - HELD_SECONDS_MAX
        for request_id, asked in list(self._open.items()):
            if (asked.answered_at or asked.since) < latest:
                self.drop(request_id)

    def _give_up(
        self, counter: str, text: str, seconds: float, spaces: Mapping[int, ShardNamespace]
    ) -> dict[int, ShardView]:
        self._recorder.count(counter)
        if counter not in self._said:
            self._said.add(counter)
            logger.warning("PegaFlow: " + text, seconds)
        return self._nothing(spaces)

    @staticmethod
    def _nothing(spaces: Mapping[int, ShardNamespace]) -> dict[int, ShardView]:
        return {group: ShardView(space, {}, set()) for group, space in spaces.items()}

    def _ask(self, keys: Mapping[int, Sequence[bytes]]) -> ShardAsk:
        groups = []
        for group in self._geometry.groups:
            own = tuple(map(bytes, keys[group.index][: KEYS_MAX // len(self._geometry.groups)]))
            groups.append((group.index, self.pool.refs(len(own)).start, own, group.kind is GroupKind.FULL))
        ask = ShardAsk(next(self._numbers), tuple(groups))
        self.pool.ask(ask)
        return ask

    def _views(
        self, asked: _Asked, ask: ShardAsk, answer: ShardAnswer, spaces: Mapping[int, ShardNamespace]
    ) -> dict[int, ShardView]:
        views = {}
        for (group, first, keys, _), present in zip(ask.groups, answer.present, strict=True):
            refs = {key: first + position for position, key in enumerate(keys) if present[position]}
            views[group] = ShardView(spaces[group], refs, asked.taken)
        return views
