"""What peers said they have of one request's blocks, and the runs in which these are brought into memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

from pegaflow.connector import runs
from pegaflow.connector.runs import Bringing, Run

if TYPE_CHECKING:
    from pegaflow._native import Namespace


class Query(Protocol):
    """``PeerQuery``: a round of questions to all peers."""

    def poll(self) -> list[bytes] | None:
        """``None`` while answers are awaited, else a byte per key for each question: 0 nobody has it."""
        ...

    def fetch(self, question: int, start: int, stop: int, *, parent: bytes | None = None) -> Bringing | None:
        """Bring ``keys[start:stop]`` of a question."""
        ...

    def close(self) -> None:
        """Forget it."""
        ...


class PeerClient(Protocol):
    """``Peers``: this process's connections to the pools of other hosts."""

    def find(self, questions: Sequence[tuple[Any, Sequence[bytes], bool]]) -> Query | None:
        """Ask all peers; ``None``: none is worth asking now."""
        ...

    def facts(self) -> list[dict[str, Any]]:
        """What is known of each peer."""
        ...

    def read_seconds(self, block_bytes: int) -> float | None:
        """How long so many bytes would take; ``None`` if that is not known."""
        ...


@dataclass(frozen=True)
class Question:
    """``keys[start:start + len(keys)]`` of one group, as peers are asked for them."""

    number: int
    """In the round."""
    start: int
    keys: Sequence[bytes]
    chained: bool


class Held:
    """What peers have of one group."""

    def __init__(self, query: Query, question: Question, tiers: bytes) -> None:
        """``tiers``: their answer, perhaps shorter than the question."""
        self.query, self.question = query, question
        self._present = {key for key, tier in zip(question.keys, tiers, strict=False) if tier}

    def __contains__(self, key: bytes) -> bool:
        return key in self._present

    def bring(self, start: int, stop: int, parent: bytes | None = None) -> Bringing | None:
        """Have ``keys[start:stop]`` of the group brought into memory."""
        first = self.question.start
        if start < first:
            return None
        return self.query.fetch(self.question.number, start - first, stop - first, parent=parent)


class PeerView:
    """A namespace for lookups that take what peers have for present."""

    def __init__(self, namespace: "Namespace", held: Held | None) -> None:
        self._namespace, self._held = namespace, held

    def lookup(self, keys: Sequence[bytes], start: int = 0) -> int:
        """How many consecutive ``keys[start:]`` are in memory or with peers."""
        at = start
        while at < len(keys):
            at += self._namespace.lookup(keys, at)
            first = at
            while self._held is not None and at < len(keys) and keys[at] in self._held:
                at += 1
            if at == first:
                break
        return max(0, at - start)

    def contains(self, keys: Sequence[bytes]) -> bytes:
        """One byte per key: 1 in memory or with peers, 0 absent."""
        present = self._namespace.contains(keys)
        if self._held is None:
            return present
        return bytes(here or key in self._held for here, key in zip(present, keys, strict=True))


class Everything:
    """An index that has every block, to tell how much of a request could be found at best."""

    def lookup(self, keys: Sequence[bytes], start: int = 0) -> int:
        """All of ``keys[start:]``."""
        return max(0, len(keys) - start)

    def contains(self, keys: Sequence[bytes]) -> bytes:
        """All of them."""
        return b"\1" * len(keys)


class _PeerRun(Run):
    """Blocks that peers have, in pieces that follow each other among the group's keys."""

    def __init__(self, namespace: "Namespace", held: Held, keys: Sequence[bytes], start: int, stop: int) -> None:
        super().__init__(namespace, keys, start, stop)
        self._held = held

    def _gap(self) -> tuple[int, Sequence[bytes]]:
        """How many blocks come before the next ones that peers have and memory has not, and these as far as there is
        no other between them."""
        chunk = self._keys[self._at : min(self._at + runs.KEYS_MAX, self._stop)]
        present = self._namespace.contains(chunk)
        wanted = [not here and key in self._held for here, key in zip(present, chunk, strict=True)]
        before = wanted.index(True) if True in wanted else len(chunk)
        count = sum(1 for _ in takewhile(bool, wanted[before:]))
        return before, chunk[before : before + count]


class PeerChain(_PeerRun):
    """Each block is the child of the one before it, and comes into memory behind that one only."""

    def __init__(self, namespace: "Namespace", held: Held, keys: Sequence[bytes], start: int, stop: int) -> None:
        # What is before ``start`` has to be in memory too, though the device has it already.
        first = namespace.lookup(keys[:stop])
        super().__init__(namespace, held, keys, first, stop)
        self.refs += namespace.lease(keys, max(0, min(start, first - 1)), first)

    def _next(self) -> Sequence[bytes]:
        here = self._namespace.lease(self._keys, self._at, self._stop)
        self.refs += here
        self._at += len(here)
        before, chunk = self._gap()
        return chunk if before == 0 else ()

    def _ask(self) -> Bringing | None:
        parent = self._keys[self._at - 1] if self._at else None
        return self._held.bring(self._at, self._at + len(self._chunk), parent)

    def _take(self, found: int) -> list[int]:
        refs = self._namespace.lease(self._keys, self._at, self._at + found)
        self._at += len(refs)
        return refs


class PeerLoose(_PeerRun):
    """Blocks that are of use without those before them."""

    def __init__(self, namespace: "Namespace", held: Held, keys: Sequence[bytes], start: int, stop: int) -> None:
        super().__init__(namespace, held, keys, start, stop)
        self.refs += runs.lease_each(namespace, keys[start:stop])

    def _next(self) -> Sequence[bytes]:
        while self._at < self._stop:
            before, chunk = self._gap()
            self._at += before
            if chunk:
                return chunk
        return ()

    def _ask(self) -> Bringing | None:
        return self._held.bring(self._at, self._at + len(self._chunk))

    def _take(self, found: int) -> list[int]:
        taken = self._chunk[: self._request.keys if self._request is not None else 0]
        self._at += len(taken)
        return runs.lease_each(self._namespace, taken)


def questions_of(keys: Mapping[int, tuple[Sequence[bytes], int, bool]], keys_max: int) -> dict[int, Question]:
    """One question per group of ``{group: (keys, first to ask for, chained)}``, at most ``keys_max`` keys each."""
    asked: dict[int, Question] = {}
    for group, (all_keys, start, chained) in keys.items():
        wanted = all_keys[start : start + keys_max]
        if wanted:
            asked[group] = Question(len(asked), start, wanted, chained)
    return asked
