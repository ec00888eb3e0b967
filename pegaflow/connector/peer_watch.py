"""For requests that wait until their whole prompt is there: whether it has come to a peer.

The last blocks of all of them are asked for in one question, again and again, with pauses. Nothing here waits.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pegaflow.connector.guard import Guard
from pegaflow.connector.matching import Index
from pegaflow.connector.peer_runs import PeerClient, Query

if TYPE_CHECKING:
    from pegaflow._native import Namespace

ASK_SECONDS = 0.05
"""Pause between two questions."""

KEYS_MAX = 4_096
"""Blocks of one question; those that are left out come with the next one."""

PRESENT_MAX = 4_096
"""Blocks that are remembered to be with peers; the oldest are forgotten first."""

PRESENT_SECONDS = 1.0
"""A block that was with a peer counts as still there for so long. Then it is asked for again: a peer evicts, too."""

ANSWER_SECONDS_MAX = 3.0
"""An answer that is looked at so long after its question says nothing of now, and is not believed."""

GRACE_SECONDS = 3.0
"""A peer that failed counts as alive for so long: a busy host may be late once with an answer."""

ALIVE = ("up", "unknown")
"""States of peers that may bring something: not those that failed, nor this pool itself."""


class PeerWatch:
    """What peers have of the blocks that are waited for in one engine."""

    def __init__(self, client: Callable[[], PeerClient | None], guard: Guard) -> None:
        """``client``: the connections to peers; ``None`` while there are none."""
        self._client = client
        self._guard = guard
        self._wanted: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._present: OrderedDict[tuple[int, bytes], float] = OrderedDict()  # until when, by the monotonic clock
        self._query: Query | None = None
        self._asked: list[tuple[int, list[bytes]]] = []
        self._asked_at = 0.0
        self._next_at = 0.0
        self._alive_until = 0.0

    @property
    def active(self) -> bool:
        """Whether there is anybody to ask."""
        return self._client() is not None

    def views(self, indexes: Mapping[int, Index], namespaces: "Mapping[int, Namespace]") -> "dict[int, WatchedView]":
        """``indexes`` of this host, and what peers have besides."""
        return {group: WatchedView(self, index, namespaces, group) for group, index in indexes.items()}

    def has(self, namespaces: "Mapping[int, Namespace]", group: int, key: bytes) -> bool:
        """Whether a peer had this block within the last second. It is asked for from now on."""
        block = group, key
        if self._is_present(block):
            return True
        if len(self._wanted) < KEYS_MAX:
            self._wanted[block] = None
        self._guard.run("asking peers again", None, lambda: self._go_on(namespaces))
        return self._is_present(block)

    def alive(self) -> int:
        """How many peers may bring something."""
        client = self._client()
        if client is None:
            return 0
        nothing: list[str] = []
        states = self._guard.run("counting peers", nothing, lambda: [str(peer["state"]) for peer in client.facts()])
        now = time.monotonic()
        count = sum(state in ALIVE for state in states)
        if count:
            self._alive_until = now + GRACE_SECONDS
        return count or int("backing off" in states and now < self._alive_until)

    def close(self) -> None:
        """Ask no more. Idempotent."""
        query, self._query = self._query, None
        self._wanted.clear()
        self._present.clear()
        if query is not None:
            self._guard.run("closing a question to peers", None, query.close)

    def _is_present(self, block: tuple[int, bytes]) -> bool:
        return time.monotonic() < self._present.get(block, 0.0)

    def _go_on(self, namespaces: "Mapping[int, Namespace]") -> None:
        now = time.monotonic()
        query, self._query = self._query, None
        if query is not None and now - self._asked_at > ANSWER_SECONDS_MAX:
            query.close()
        elif query is not None:
            answers = query.poll()
            if answers is None:
                self._query = query
                return
            query.close()
            self._note(answers, now + PRESENT_SECONDS)
        client = self._client()
        if now < self._next_at or client is None or not self._wanted:
            return
        self._next_at, self._asked_at = now + ASK_SECONDS, now
        by_group: dict[int, list[bytes]] = {}
        for group, key in self._wanted:
            by_group.setdefault(group, []).append(key)
        self._wanted.clear()
        self._asked = list(by_group.items())
        self._query = client.find([(namespaces[group], keys, False) for group, keys in self._asked])

    def _note(self, answers: Sequence[bytes], until: float) -> None:
        """Remember until then what is there. It need not be asked for any more."""
        for (group, keys), tiers in zip(self._asked, answers, strict=True):
            for key, tier in zip(keys, tiers, strict=False):
                if tier:
                    self._present[group, key] = until
                    self._present.move_to_end((group, key))
                    self._wanted.pop((group, key), None)
        while len(self._present) > PRESENT_MAX:
            self._present.popitem(last=False)


class WatchedView:
    """An index of this host for those who wait: what peers have counts as present, and peers as others."""

    def __init__(
        self, watch: PeerWatch, index: "Index | Namespace", namespaces: "Mapping[int, Namespace]", group: int
    ) -> None:
        self._watch, self._index, self._namespaces, self._group = watch, index, namespaces, group

    def contains(self, keys: Sequence[bytes]) -> bytes:
        """One byte per key: 1 on this host or with a peer, 0 absent."""
        here = self._index.contains(keys)
        pairs = zip(here, keys, strict=True)
        return bytes(bool(found) or self._watch.has(self._namespaces, self._group, key) for found, key in pairs)

    def others(self) -> int:
        """Living processes and peers that may bring something."""
        return self._namespaces[self._group].others() + self._watch.alive()
