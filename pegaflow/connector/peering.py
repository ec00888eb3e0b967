"""Blocks that other hosts have and this one has not: asked for once, and brought before a request takes them, where
that pays.

Peers are asked when a request is first looked up and this host does not have all of its prompt. It is put off while
they answer and while blocks are on their way: as long as that takes less than computing, and never longer than a limit.
Then it takes what has come. What comes later stays in the pool for others. Nothing here waits.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from pegaflow.connector.geometry import Geometry, GroupKind
from pegaflow.connector.guard import Guard
from pegaflow.connector.matching import Index, Match, Need
from pegaflow.connector.peer_runs import (
    Everything,
    Held,
    PeerChain,
    PeerClient,
    PeerLoose,
    PeerView,
    Query,
    Question,
    questions_of,
)
from pegaflow.connector.request_state import RequestState
from pegaflow.connector.runs import Run
from pegaflow.connector.speed import ComputeSpeed
from pegaflow.metrics import Recorder

if TYPE_CHECKING:
    from pegaflow._native import Namespace, Pool

ROUNDS_MAX = 2
"""How often peers are asked for one request: a second time after it lost its blocks, say."""

KEYS_ASKED_MAX = 1 << 16
"""Keys of one round."""

SHARE_MAX = 4
"""At most this part of the pool (one in so many bytes) is held for requests that are put off."""

Find = Callable[[Mapping[int, Index]], Match | None]
"""Longest hit of a request, given where to look."""


@dataclass
class Asked:
    """What peers were asked for one request, and what of it is on its way."""

    query: Query
    questions: dict[int, Question]
    started: float
    deadline: float
    runs: list[Run] | None = None
    """``None`` while answers are awaited."""
    bytes_held: int = 0
    ended: bool = False


@dataclass
class PeerFetches:
    """All requests of one engine for which peers were asked."""

    geometry: Geometry
    recorder: Recorder
    guard: Guard
    speed: ComputeSpeed
    seconds_max: float
    client: Callable[[], PeerClient | None]
    """The connections to peers; ``None`` while there are none."""
    patient: bool = False
    """Requests were told to wait for their whole prompt, whatever computing takes."""
    _open: dict[str, Asked] = field(default_factory=dict)

    def ask(
        self,
        state: RequestState,
        namespaces: "Mapping[int, Namespace]",
        indexes: Mapping[int, Index],
        keys: Mapping[int, Sequence[bytes]],
        computed_tokens: int,
        find: Find,
    ) -> None:
        """Ask peers for what this host, as ``indexes`` know it, does not have of a request. Once for each request and
        time in the queue."""
        if state.request.request_id in self._open or state.peer_rounds >= ROUNDS_MAX or self.client() is None:
            return
        most = find({group: Everything() for group in namespaces})
        here = find(indexes) if most is not None else None
        here_tokens = here.tokens if here is not None else computed_tokens
        if most is not None and most.tokens > here_tokens:
            missing_tokens = most.tokens - here_tokens
            ask = partial(self._ask, state, namespaces, keys, computed_tokens, missing_tokens)
            self.guard.run("asking peers", None, ask)

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
        known = self._open.get(state.request.request_id)
        if known is None or known.ended:
            return False
        look = partial(self._waits, known, state, pool, namespaces, keys, computed_tokens, find)
        if self.guard.run("bringing blocks from peers", False, look):
            return True
        known.ended = True
        self.recorder.observe("peer_wait_seconds", time.monotonic() - known.started)
        return False

    def drop(self, request_id: str, pool: "Pool | None") -> None:
        """The request took what was brought, or needs it no more. What is on its way comes into memory all the same."""
        known = self._open.pop(request_id, None)
        if known is None:
            return
        for part in (*(known.runs or ()), known.query):
            self.guard.run("closing a request to peers", None, part.close)
        if pool is not None:
            pool.release([ref for run in known.runs or () for ref in run.refs])

    def drop_all(self, pool: "Pool | None") -> None:
        """Nobody needs anything any more."""
        for request_id in list(self._open):
            self.drop(request_id, pool)

    def _ask(
        self,
        state: RequestState,
        namespaces: "Mapping[int, Namespace]",
        keys: Mapping[int, Sequence[bytes]],
        computed_tokens: int,
        missing_tokens: int,
    ) -> None:
        client = self.client()
        if client is None or not self.seconds_max:
            return
        wanted = {}
        for group in self.geometry.groups:
            own = keys[group.index]
            chained = group.kind is GroupKind.FULL
            first = namespaces[group.index].lookup(own) if chained else computed_tokens // group.block_tokens
            wanted[group.index] = (own, first, chained)
        questions = questions_of(wanted, KEYS_ASKED_MAX // len(wanted))
        blocks = {group: -(-missing_tokens // self.geometry.group(group).block_tokens) for group in questions}
        size = sum(
            namespaces[group].block_bytes * min(count, len(questions[group].keys))
            for group, count in blocks.items()
            if questions[group].chained
        )
        seconds_max = self._worth(client, size, missing_tokens)
        if seconds_max is None:
            return
        asked = [(namespaces[group], one.keys, one.chained) for group, one in questions.items()]
        query = client.find(asked) if asked else None
        if query is not None:
            now = time.monotonic()
            self._open[state.request.request_id] = Asked(query, questions, now, now + seconds_max)
            state.peer_rounds += 1
            self.recorder.count("peer_questions")

    def _waits(
        self,
        known: Asked,
        state: RequestState,
        pool: "Pool",
        namespaces: "Mapping[int, Namespace]",
        keys: Mapping[int, Sequence[bytes]],
        computed_tokens: int,
        find: Find,
    ) -> bool:
        last = time.monotonic() >= known.deadline
        if known.runs is None:
            answers = known.query.poll()
            if answers is None:
                self.recorder.count("peer_incomplete", int(last))
                return not last
            held = {group: Held(known.query, one, answers[one.number]) for group, one in known.questions.items()}
            known.runs = []
            self._begin(known, held, state, pool, namespaces, keys, computed_tokens, find)
        whole = [run.go_on(last) for run in known.runs]
        self.recorder.count("peer_incomplete", int(last and bool(known.runs)))
        return not last and not all(whole)

    def _begin(
        self,
        known: Asked,
        held: Mapping[int, Held],
        state: RequestState,
        pool: "Pool",
        namespaces: "Mapping[int, Namespace]",
        keys: Mapping[int, Sequence[bytes]],
        computed_tokens: int,
        find: Find,
    ) -> None:
        """Have fetched what a hit with peers needs, if it is longer than one without."""
        client = self.client()
        wanted = find({group: PeerView(space, held.get(group)) for group, space in namespaces.items()})
        here = find(namespaces) if wanted is not None else None
        tokens = here.tokens if here is not None else computed_tokens
        if client is None or wanted is None or wanted.tokens <= tokens:
            return
        state.tokens_elsewhere = max(state.tokens_elsewhere, wanted.tokens)
        size = 0
        needs = []
        for need in wanted.needs:
            own, space = keys[need.group], namespaces[need.group]
            needs.append(Need(need.group, need.start, self._stop_of(need, own)))
            size += space.contains(own[need.start : needs[-1].stop]).count(0) * space.block_bytes
        seconds_max = self._worth(client, size, wanted.tokens - tokens)
        others = sum(other.bytes_held for other in self._open.values())
        bytes_held = sum((need.stop - need.start) * namespaces[need.group].block_bytes for need in needs)
        if seconds_max is None or (others + bytes_held) * SHARE_MAX > pool.pool_bytes:
            return
        known.deadline = min(known.deadline, time.monotonic() + seconds_max)
        known.bytes_held, state.tokens_here = bytes_held, tokens
        known.runs = [
            self._run(namespaces[need.group], held[need.group], keys[need.group], need)
            for need in needs
            if need.group in held
        ]
        self.recorder.count("peer_requests")

    def _stop_of(self, need: Need, keys: Sequence[bytes]) -> int:
        """Behind what a hit brings, and the blocks behind it that it needs besides."""
        return min(need.stop + self.geometry.group(need.group).extra_blocks, len(keys))

    def _run(self, namespace: "Namespace", held: Held, keys: Sequence[bytes], need: Need) -> Run:
        chained = self.geometry.group(need.group).kind is GroupKind.FULL
        return (PeerChain if chained else PeerLoose)(namespace, held, keys, need.start, need.stop)

    def _worth(self, client: PeerClient, size: int, tokens: int) -> float | None:
        """How long to wait at most for ``size`` bytes that hold so many tokens: no longer than computing them takes.
        ``None``: not at all."""
        computing = None if self.patient else self.speed.seconds(tokens)
        if computing is None:
            return self.seconds_max
        reading = client.read_seconds(size)
        return min(self.seconds_max, computing) if reading is None or reading < computing else None
