"""Runs of blocks that are brought into memory for one request, piece by piece, and held there.

A run asks for the next piece when it has taken what the last one brought. Here are those that ask the SSD tier.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pegaflow._native import Namespace

KEYS_MAX = 1_024
"""Keys of one request for blocks; the next ones are asked for when these are there."""

NOWHERE, ON_SSD = 0, 2
"""Answers of ``Namespace.tiers``."""


class Bringing(Protocol):
    """A request for blocks that is under way: ``Prefetch``, or ``PeerFetch``."""

    keys: int
    """How many keys were taken."""

    def poll(self) -> int | None:
        """``None`` while blocks are on their way, else how many of the keys are there."""
        ...

    def found(self) -> int:
        """How many it is so far."""
        ...

    def close(self) -> None:
        """Ask for no more."""
        ...


class Run:
    """Blocks of one group that are brought into memory and held there."""

    def __init__(self, namespace: "Namespace", keys: Sequence[bytes], start: int, stop: int) -> None:
        """``keys[start:stop]``."""
        self._namespace, self._keys, self._at, self._stop = namespace, keys, start, stop
        self._chunk: Sequence[bytes] = ()
        self._request: Bringing | None = None
        self.refs: list[int] = []

    def go_on(self, last: bool) -> bool:
        """Take what has come and ask for more. ``last``: take what is there. True when there is no more to wait for."""
        while True:
            if self._request is None:
                self._chunk = () if last else self._next()
                self._request = self._ask() if self._chunk else None
                if self._request is None:
                    return True  # nothing is left, too many requests are open, or nobody reads any more
            found = self._request.found() if last else self._request.poll()
            if found is None:
                return False
            refs = self._take(found)
            self.refs += refs
            self.close()
            if not refs:
                return True

    def close(self) -> None:
        """Ask for no more."""
        request, self._request = self._request, None
        if request is not None:
            request.close()

    def _next(self) -> Sequence[bytes]:
        """The next keys to ask for. The tier may bring fewer than it is asked for."""
        raise NotImplementedError

    def _ask(self) -> Bringing | None:
        raise NotImplementedError

    def _take(self, found: int) -> list[int]:
        """Lease what was found of the chunk."""
        raise NotImplementedError


class Chain(Run):
    """Each block is the child of the one before it, and comes into memory behind that one only."""

    def __init__(self, namespace: "Namespace", keys: Sequence[bytes], start: int, stop: int) -> None:
        # What is before ``start`` has to be in memory too, though the device has it already.
        tiers = namespace.tiers(keys[:stop])
        first = tiers.find(ON_SSD)
        if first < 0 or tiers.find(NOWHERE) >= 0:
            first = stop
        super().__init__(namespace, keys, first, stop)
        self.refs += namespace.lease(keys, max(0, min(start, first - 1)), first)

    def _next(self) -> Sequence[bytes]:
        chunk = self._keys[self._at : min(self._at + KEYS_MAX, self._stop)]
        return chunk if chunk and self._namespace.tiers(chunk[:1])[0] != NOWHERE else ()

    def _ask(self) -> Bringing | None:
        return self._namespace.prefetch(self._chunk, parent=self._keys[self._at - 1] if self._at else None)

    def _take(self, found: int) -> list[int]:
        refs = self._namespace.lease(self._keys, self._at, self._at + found)
        self._at += len(refs)
        return refs


class Loose(Run):
    """Blocks that are of use without those before them."""

    def __init__(self, namespace: "Namespace", keys: Sequence[bytes], start: int, stop: int) -> None:
        super().__init__(namespace, keys, start, stop)
        self.refs += lease_each(namespace, keys[start:stop])

    def _next(self) -> Sequence[bytes]:
        keys = self._keys[self._at : self._stop]
        return [key for key, tier in zip(keys, self._namespace.tiers(keys), strict=True) if tier == ON_SSD][:KEYS_MAX]

    def _ask(self) -> Bringing | None:
        return self._namespace.prefetch(self._chunk, chained=False)

    def _take(self, found: int) -> list[int]:
        return lease_each(self._namespace, self._chunk)


def lease_each(namespace: "Namespace", keys: Sequence[bytes]) -> list[int]:
    """Lease whatever is in memory of ``keys``."""
    refs: list[int] = []
    at = 0
    while at < len(keys):
        run = namespace.lease(keys[at:])
        refs += run
        at += len(run) + 1
    return refs
