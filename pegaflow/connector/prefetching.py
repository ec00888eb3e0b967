"""Blocks that are on SSD and not in memory: brought into memory before a request takes them, where that pays.

A request that finds more of its prompt with the SSD than without it is put off while the pool's leader reads: as long
as that takes less than computing it, and never longer than a limit. Then it takes what has come. What comes later, or
was read for a request that is gone, stays in the pool for others. Nothing here waits.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pegaflow.connector.geometry import Geometry, GroupKind
from pegaflow.connector.guard import Guard
from pegaflow.connector.matching import Match, Need
from pegaflow.connector.request_state import RequestState
from pegaflow.connector.runs import ON_SSD, Chain, Loose, Run
from pegaflow.connector.speed import ComputeSpeed
from pegaflow.metrics import Recorder

if TYPE_CHECKING:
    from pegaflow._native import Namespace, Pool

LOOKUP_KEYS_MIN = 64
"""Keys that are looked up at once at first, so that finding nothing costs little, however long a prompt is."""

PREFETCHES_MAX = 2
"""How often one request is put off: a second time after it lost its blocks, say."""

SHARE_MAX = 4
"""At most this part of the pool (one in so many bytes) is held for requests that are put off."""

Find = Callable[["Mapping[int, TierView] | Mapping[int, Namespace]"], Match | None]
"""Longest hit of a request, given where to look."""


class Held(Protocol):
    """What is released in the end."""

    def release(self, refs: Sequence[int]) -> None:
        """Give leases back."""
        ...


class TierView:
    """A namespace for lookups that take what is on SSD for present."""

    def __init__(self, namespace: "Namespace") -> None:
        self._namespace = namespace

    def lookup(self, keys: Sequence[bytes], start: int = 0) -> int:
        """How many consecutive ``keys[start:]`` are in memory or on SSD."""
        at, count = start, LOOKUP_KEYS_MIN
        while at < len(keys):
            tiers = self._namespace.tiers(keys[at : at + count])
            absent = tiers.find(0)
            if absent >= 0:
                return at - start + absent
            at, count = at + count, 2 * count
        return max(0, len(keys) - start)

    def contains(self, keys: Sequence[bytes]) -> bytes:
        """One byte per key: 1 in memory or on SSD, 0 absent."""
        return bytes(map(bool, self._namespace.tiers(keys)))

    def others(self) -> int:
        """See ``Namespace.others``."""
        return self._namespace.others()


@dataclass
class Prefetching:
    """What is on its way for one request."""

    runs: list[Run]
    deadline: float
    started: float
    bytes_held: int
    ended: bool = False

    def refs(self) -> list[int]:
        """All leases."""
        return [ref for run in self.runs for ref in run.refs]


@dataclass
class Prefetches:
    """All requests of one engine that are put off for the SSD."""

    geometry: Geometry
    recorder: Recorder
    guard: Guard
    speed: ComputeSpeed
    seconds_max: float
    _open: dict[str, Prefetching] = field(default_factory=dict)

    def goes_on(
        self,
        state: RequestState,
        pool: "Pool",
        namespaces: "Mapping[int, Namespace]",
        keys: Mapping[int, Sequence[bytes]],
        computed_tokens: int,
        find: Find,
    ) -> bool:
        """Whether the request has to ask again later. Until it is dropped, what was brought for it is held."""

        def ask() -> bool:
            known = self._open.get(state.request.request_id)
            if known is None:
                known = self._begin(state, pool, namespaces, keys, computed_tokens, find)
            return known is not None and self._waits(known, pool)

        return self.guard.run("bringing blocks from SSD", False, ask)

    def drop(self, request_id: str, pool: Held | None) -> None:
        """The request took what was brought, or needs it no more. What is on its way comes into memory all the same."""
        known = self._open.pop(request_id, None)
        if known is None:
            return
        for run in known.runs:
            self.guard.run("closing a request to the SSD tier", None, run.close)
        if pool is not None:
            pool.release(known.refs())

    def drop_all(self, pool: Held | None) -> None:
        """Nobody needs anything any more."""
        for request_id in list(self._open):
            self.drop(request_id, pool)

    def _waits(self, known: Prefetching, pool: "Pool") -> bool:
        if known.ended:
            return False
        now = time.monotonic()
        last = now >= known.deadline or pool.ssd_read_seconds(0) is None
        whole = [run.go_on(last) for run in known.runs]
        if not last and not all(whole):
            return True
        known.ended = True
        self.recorder.observe("prefetch_wait_seconds", now - known.started)
        self.recorder.count("prefetch_incomplete", int(last))
        return False

    def _begin(
        self,
        state: RequestState,
        pool: "Pool",
        namespaces: "Mapping[int, Namespace]",
        keys: Mapping[int, Sequence[bytes]],
        computed_tokens: int,
        find: Find,
    ) -> Prefetching | None:
        if not self.seconds_max or state.prefetches >= PREFETCHES_MAX:
            return None
        wanted = find({group: TierView(namespace) for group, namespace in namespaces.items()})
        in_memory = find(namespaces) if wanted is not None else None
        tokens = (in_memory.tokens if in_memory is not None else computed_tokens) if wanted is not None else 0
        if wanted is None or wanted.tokens <= tokens:
            return None
        state.tokens_elsewhere = max(state.tokens_elsewhere, wanted.tokens)
        needs = self._needs(wanted, keys)
        seconds_max = self._worth(pool, namespaces, keys, needs, wanted.tokens - tokens)
        bytes_held = sum((need.stop - need.start) * namespaces[need.group].block_bytes for need in needs)
        held = sum(other.bytes_held for other in self._open.values())
        if seconds_max is None or (held + bytes_held) * SHARE_MAX > pool.pool_bytes:
            return None
        now = time.monotonic()
        known = Prefetching([], now + seconds_max, now, bytes_held)
        self._open[state.request.request_id] = known
        state.prefetches += 1
        state.tokens_in_memory = tokens
        for need in needs:
            known.runs.append(self._run(namespaces[need.group], keys[need.group], need))
        self.recorder.count("prefetch_requests")
        return known

    def _needs(self, wanted: Match, keys: Mapping[int, Sequence[bytes]]) -> list[Need]:
        """What a hit brings, and the blocks behind it that it needs besides."""
        needs = []
        for need in wanted.needs:
            stop = min(need.stop + self.geometry.group(need.group).extra_blocks, len(keys[need.group]))
            needs.append(Need(need.group, need.start, stop))
        return needs

    def _run(self, namespace: "Namespace", keys: Sequence[bytes], need: Need) -> Run:
        chained = self.geometry.group(need.group).kind is GroupKind.FULL
        return (Chain if chained else Loose)(namespace, keys, need.start, need.stop)

    def _worth(
        self,
        pool: "Pool",
        namespaces: "Mapping[int, Namespace]",
        keys: Mapping[int, Sequence[bytes]],
        needs: Sequence[Need],
        tokens: int,
    ) -> float | None:
        """How long to wait at most: no longer than computing takes. ``None``: not at all."""
        size = 0
        for need in needs:
            namespace = namespaces[need.group]
            size += namespace.tiers(keys[need.group][need.start : need.stop]).count(ON_SSD) * namespace.block_bytes
        reading = pool.ssd_read_seconds(size)
        if reading is None:
            return None
        computing = self.speed.seconds(tokens)
        if computing is None:
            return self.seconds_max
        return min(self.seconds_max, computing) if reading < computing else None
