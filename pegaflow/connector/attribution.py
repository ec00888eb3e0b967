"""Where the blocks of each prompt were found and why others were not, in the pool's statistics and vLLM's metrics."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pegaflow.connector.geometry import Geometry, Group, GroupKind
from pegaflow.connector.guard import Guard
from pegaflow.metrics import WINDOW_NAMES, Recorder

if TYPE_CHECKING:
    from pegaflow._native import Namespace, Pool

INTERVAL_SECONDS = 10.0
"""Pause between two looks at the windows."""

REASONS = ("never_stored", "evicted", "reset", "late", "tier_off")
"""In the order of ``Namespace.note_prompt``."""


@dataclass(frozen=True)
class Found:
    """How many tokens of a prompt, counted from its beginning, were where; each number at least as large as the one
    before it."""

    computed: int
    """On the device already."""
    in_memory: int
    on_ssd: int
    hit: int
    """With other hosts."""
    known: int
    """Known to be on SSD or other hosts."""
    most: int
    """What could have been found."""


class Attribution:
    """Counts of one engine."""

    def __init__(self, geometry: Geometry, recorder: Recorder, guard: Guard) -> None:
        self._groups = counted_groups(geometry)
        self._recorder = recorder
        self._guard = guard
        self._next_look = 0.0

    def prompt(self, namespaces: "Mapping[int, Namespace]", keys: Mapping[int, Sequence[bytes]], found: Found) -> None:
        """A prompt was looked for. Call it once for each."""
        self._recorder.count("hit_tokens_ram", found.in_memory - found.computed)
        self._recorder.count("hit_tokens_ssd", found.on_ssd - found.in_memory)
        self._recorder.count("hit_tokens_peer", found.hit - found.on_ssd)
        self._recorder.count("miss_tokens", found.most - found.hit)
        for group in self._groups:
            self._guard.run("counting a prompt", None, partial(self._count, namespaces, keys, group, found))

    def not_asked(self, tokens: int) -> None:
        """A prompt was not looked for, since the pool is off."""
        self._recorder.count("off_tokens", tokens)

    def loaded(self, namespaces: "Mapping[int, Namespace] | None", blocks: Mapping[int, int]) -> None:
        """So many blocks of each group were loaded."""

        def count() -> None:
            for group, number in blocks.items():
                if namespaces is not None and number:
                    namespaces[group].note_loaded(number)

        self._guard.run("counting a load", None, count)

    def observe(self, pool: "Pool") -> None:
        """Look at what a cache without bounds would have found, unless it is too early."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + INTERVAL_SECONDS
        for (_, asked, distinct), name in zip(pool.windows(), WINDOW_NAMES, strict=False):
            self._recorder.gauge(f"hll_cardinality_{name}", distinct)
            self._recorder.gauge(f"hll_total_requests_{name}", asked)
            self._recorder.gauge(f"hll_estimated_hit_rate_{name}", (asked - distinct) / asked if asked else 0.0)

    def _count(
        self,
        namespaces: "Mapping[int, Namespace]",
        keys: Mapping[int, Sequence[bytes]],
        group: Group,
        found: Found,
    ) -> None:
        own = keys[group.index]
        ends = (found.computed, found.in_memory, found.on_ssd, found.hit, found.known, found.most)
        start, ram, ssd, peer, late, stop = (min(tokens // group.block_tokens, len(own)) for tokens in ends)
        reasons = namespaces[group.index].note_prompt(
            own, start=start, ram=ram, ssd=ssd, peer=peer, late=late, stop=stop
        )
        if reasons is not None:
            for reason, blocks in zip(REASONS, reasons, strict=True):
                self._recorder.count(f"miss_blocks_{reason}", blocks)


def counted_groups(geometry: Geometry) -> tuple[Group, ...]:
    """Groups whose blocks are counted: how many blocks of others a prompt needs depends on where its hit ends."""
    full = tuple(group for group in geometry.groups if group.kind is GroupKind.FULL)
    return full or geometry.groups[:1]
