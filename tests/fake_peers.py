"""Stand-ins for the connections to other hosts' pools: answers and blocks arrive as slowly as a test says."""

from collections.abc import Sequence
from typing import Any

from pegaflow.errors import PegaFlowError

NUMBERS = {"bytes_fetched": 0, "queued_bytes": 0, "blocks_corrupt": 0}
BROKEN = PegaFlowError("the connections are damaged")


class FakePeers:
    """As ``Peers``: what one fake pool can have of others."""

    def __init__(self, pool: Any, *others: Any) -> None:
        self.pool, self.others = pool, list(others)
        self.state = "up"
        """Of every peer."""
        self.problem: str | None = None
        self.answer_after_polls = 0
        self.blocks_per_poll = 1_000
        self.keys_max = 1_024
        """Of a fetch only so many are brought."""
        self.bytes_per_second: float | None = 1e9
        self.fetches_max = 128
        self.fails: Exception | None = None
        """What every call raises."""
        self.asked: list[list[tuple[int, bool]]] = []
        """Keys of each question of each round, and whether they are chained."""
        self.fetched: list[int] = []
        """Keys of each fetch."""
        self.queries: list[FakePeerQuery] = []
        self.open: list[FakePeerFetch] = []

    def find(self, questions: Sequence[tuple[Any, Sequence[bytes], bool]]) -> "FakePeerQuery | None":
        self._check()
        if self.state != "up":
            return None
        assert questions
        assert all(keys for _, keys, _ in questions)
        self.asked.append([(len(keys), chained) for _, keys, chained in questions])
        self.queries.append(FakePeerQuery(self, [(space, list(keys), chained) for space, keys, chained in questions]))
        return self.queries[-1]

    def facts(self) -> list[dict[str, Any]]:
        self._check()
        fact = {"state": self.state, "problem": self.problem, **NUMBERS}
        return [{"address": f"10.0.0.{number}:7441", **fact} for number, _ in enumerate(self.others, 2)]

    def read_seconds(self, block_bytes: int) -> float | None:
        return block_bytes / self.bytes_per_second if self.bytes_per_second else None

    def elsewhere(self, namespace: Any, key: bytes) -> dict[int, bytes] | None:
        """Parts of a block that some other pool has in memory."""
        [name] = [name for name, space in self.pool._namespaces.items() if space is namespace]
        for other in self.others:
            space = other._namespaces.get(name)
            ref = space.find(key) if space is not None and self.state == "up" else None
            if ref is not None:
                return dict(other.slots[ref].parts)
        return None

    def _check(self) -> None:
        if self.fails:
            raise self.fails


class FakePeerQuery:
    """As ``PeerQuery``."""

    def __init__(self, peers: FakePeers, questions: list[tuple[Any, list[bytes], bool]]) -> None:
        self._peers, self._questions, self._polls = peers, questions, 0

    def poll(self) -> list[bytes] | None:
        self._peers._check()
        assert self in self._peers.queries
        self._polls += 1
        if self._polls <= self._peers.answer_after_polls:
            return None
        return [self._answer(*question) for question in self._questions]

    def fetch(self, question: int, start: int, stop: int, *, parent: bytes | None = None) -> "FakePeerFetch | None":
        self._peers._check()
        namespace, keys, chained = self._questions[question]
        assert 0 <= start < stop <= len(keys)
        assert chained or parent is None
        first_known = self._peers.elsewhere(namespace, keys[start]) is not None
        if not first_known or len(self._peers.open) >= self._peers.fetches_max:
            return None
        self._peers.fetched.append(stop - start)
        wanted = keys[start:stop][: self._peers.keys_max]
        self._peers.open.append(FakePeerFetch(self._peers, namespace, wanted, parent, chained))
        return self._peers.open[-1]

    def close(self) -> None:
        if self in self._peers.queries:
            self._peers.queries.remove(self)

    def _answer(self, namespace: Any, keys: list[bytes], chained: bool) -> bytes:
        tiers = bytes(self._peers.elsewhere(namespace, key) is not None for key in keys)
        return tiers[: tiers.find(0)] if chained and 0 in tiers else tiers


class FakePeerFetch:
    """As ``PeerFetch``; blocks arrive at ``poll``."""

    def __init__(
        self, peers: FakePeers, namespace: Any, keys: list[bytes], parent: bytes | None, chained: bool
    ) -> None:
        self._peers, self._namespace, self._left = peers, namespace, keys
        self._parent, self._chained, self._found = parent, chained, 0
        self._held: list[int] = []
        self.keys = len(keys)

    def poll(self) -> int | None:
        self._peers._check()
        for _ in range(self._peers.blocks_per_poll):
            if self._left:
                self._bring(self._left.pop(0))
        return None if self._left and self._peers.state == "up" else self._found

    def found(self) -> int:
        return self._found

    def close(self) -> None:
        if self not in self._peers.open:
            return
        for key in self._left[: int(self._peers.fails is None)]:
            self._bring(key)  # what is on its way arrives all the same
        self._left = []
        self._peers.open.remove(self)
        self._namespace.pool.release(self._held)

    def _bring(self, key: bytes) -> None:
        pool, namespace = self._namespace.pool, self._namespace
        ref, parts = namespace.find(key), self._peers.elsewhere(namespace, key)
        rooted = not self._chained or self._parent is None or namespace.find(self._parent) is not None
        if ref is None and parts is not None and rooted:
            ref = pool.take_slot(namespace, key)
            if ref is not None:
                pool.slots[ref].parts, pool.slots[ref].state = parts, "sealed"
                pool.slots[ref].parent = self._parent if self._chained else None
        if ref is not None:
            pool.leases[ref] += 1
            self._held.append(ref)
            self._found += 1
        elif self._chained:
            self._left.clear()
        self._parent = key
