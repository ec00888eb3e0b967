"""What the scheduler half remembers of each request: one phase, and what the request holds in the pool.

    QUEUED --offer--> OFFERED --start_load--> LOADING --end_load--> QUEUED
       ^                 |                       |
       +----withdraw-----+                    finish --> ORPHANED --end_load--> forgotten

Every event is allowed in every phase; ``finish`` in any phase but LOADING forgets the request at once. vLLM keeps the
blocks of a request that was aborted while loading, so the load goes on without it (ORPHANED) and its leases are held
until all ranks have reported.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pegaflow.connector.adapters import Adapter
from pegaflow.connector.matching import Need
from pegaflow.connector.metadata import LoadOutcome
from pegaflow.connector.tails import Tail
from pegaflow.keys import adapter_key


class Phase(Enum):
    """Where a request stands."""

    QUEUED = "queued or running"
    OFFERED = "blocks leased, not allocated yet"
    LOADING = "blocks on their way"
    ORPHANED = "finished while blocks are on their way"


Snapshot = tuple[int, int, int]
"""``(KV cache group, block id, tokens)``: the block holds the state of recurrent layers after so many tokens."""


@dataclass
class Offer:
    """Blocks of the pool that are leased for a request."""

    computed_tokens: int
    """Tokens on the device when the offer was made; the offer holds only for this number."""
    sequence_tokens: int
    """Length of the sequence when the offer was made."""
    hit_tokens: int
    leases: dict[Need, list[int]]
    """Refs of the leased blocks ``need.start <= block < need.stop``."""
    void: bool = False
    """The cache was reset since. vLLM may hold us to the offer all the same; then the load has to fail."""

    @property
    def external_tokens(self) -> int:
        """Tokens that the offer adds to those on the device."""
        return self.hit_tokens - self.computed_tokens

    def refs(self) -> list[int]:
        """All leases."""
        return [ref for refs in self.leases.values() for ref in refs]


@dataclass
class RequestState:
    """One request."""

    request: Any
    """vLLM's request; read, never changed."""
    bypass: bool = False
    """Neither loaded nor saved (see ``compat.bypasses_cache``)."""
    adapter: Adapter | None = None
    """The LoRA adapter that the request asks for."""
    phase: Phase = Phase.QUEUED
    offer: Offer | None = None
    """Leases held in OFFERED, LOADING and ORPHANED."""
    may_load: bool = True
    """False after a failed load: a recomputed request must not meet the same block again."""
    computed_seen: int = 0
    """Tokens after the last step that this request was scheduled in since its blocks were allocated. vLLM's own number
    also counts what another connector has promised to load and may not have loaded yet."""
    saved_blocks: dict[int, int] = field(default_factory=dict)
    """By group: blocks before this one are in the pool, on their way there, or given up."""
    nothing_before: int = 0
    """Until so many tokens are computed, there is nothing to save that was not looked at yet."""
    tail: Tail | None = None
    """The part of the prompt behind its last full block, once ``tail_known``."""
    tail_known: bool = False
    tail_looked_at: bool = False
    """Whether the tail is in the pool, on its way there, or given up."""
    tables: tuple[list[int], ...] | None = None
    """Block table as far as reconstructed, where vLLM does not hand it out."""
    snapshots: Sequence[Snapshot] = ()
    """What of recurrent layers' states can be saved in the step that is being planned."""
    load_outcome: LoadOutcome | None = None
    """What the ranks that are done reported of the load in flight."""
    held: list[Any] = field(default_factory=list)
    """Blocks of vLLM's block pool that are held for a load that vLLM may go on with before it is over."""
    waits_since: float | None = None
    """When the request first asked for its prompt, if that may take a while (see ``waiting``)."""
    waited: bool = False
    """Whether it has asked for the last time."""
    prefetches: int = 0
    """How often the request was put off for blocks on SSD."""
    tokens_in_memory: int | None = None
    """What of its prompt was in memory when it was put off."""
    peer_rounds: int = 0
    """How often peers were asked for its blocks."""
    tokens_here: int | None = None
    """What of its prompt was in this host's memory when blocks of peers were asked for."""
    tokens_elsewhere: int = 0
    """What of its prompt was known to be on SSD or other hosts."""
    counted: bool = False
    """Whether it is in the metrics where its prompt was found."""
    load_started: float = 0.0
    load_overdue: bool = False
    _adapter_keys: list[bytes] = field(default_factory=list)

    @property
    def left_alone(self) -> bool:
        """Whether the request may neither load nor save, now or ever."""
        return self.bypass or (self.adapter is not None and not self.adapter.usable)

    def hashes(self) -> Sequence[bytes]:
        """Keys of the sequence's full hash blocks: vLLM's hashes, and the identity of the adapter in them if any."""
        hashes: Sequence[bytes] = self.request.block_hashes
        if self.adapter is None:
            return hashes
        self._adapter_keys.extend(map(self.key_of, hashes[len(self._adapter_keys) :]))
        return self._adapter_keys

    def look_again(self) -> None:
        """What was in the pool, or on its way there, is not to be relied on any more."""
        self.saved_blocks.clear()
        self.tail_looked_at = False
        self.nothing_before = 0

    def key_of(self, block_hash: bytes) -> bytes:
        """Key of a block of this request that vLLM's hash function gives ``block_hash``."""
        if self.adapter is None:
            return block_hash
        assert self.adapter.identity is not None
        return adapter_key(self.adapter.identity, block_hash)


class RequestTable:
    """All requests that vLLM has not finished, and those that finished while loading."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self._loading: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    @property
    def loading(self) -> int:
        """Loads in flight."""
        return len(self._loading)

    def loading_states(self) -> Iterator[RequestState]:
        """States of loads in flight, oldest load first."""
        return iter(self._loading.values())

    def get(self, request_id: str) -> RequestState | None:
        """State of a request that is known."""
        return self._states.get(request_id)

    def ensure(self, request: Any, bypass: bool = False) -> RequestState:
        """State of ``request``, created at first sight. A request that vLLM replaced under its id is taken over."""
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = RequestState(request, bypass)
        if state.request is not request:
            state.request = request
            state._adapter_keys.clear()
        return state

    def make_offer(self, state: RequestState, offer: Offer) -> None:
        """QUEUED to OFFERED."""
        assert state.phase is Phase.QUEUED
        state.phase, state.offer = Phase.OFFERED, offer

    def withdraw(self, state: RequestState) -> list[int]:
        """End an offer that was not taken up. Returns the leases to release; none in other phases."""
        if state.phase is not Phase.OFFERED:
            return []
        assert state.offer is not None
        refs = state.offer.refs()
        state.phase, state.offer = Phase.QUEUED, None
        return refs

    def start_load(self, state: RequestState, now: float) -> None:
        """OFFERED to LOADING."""
        assert state.phase is Phase.OFFERED
        state.phase, state.load_started, state.load_overdue = Phase.LOADING, now, False
        state.load_outcome = None
        self._loading[state.request.request_id] = state

    def end_load(self, request_id: str) -> tuple[RequestState, list[int]] | None:
        """All ranks have reported. Returns the state and the leases to release; ``None`` if nothing was loading."""
        state = self._states.get(request_id)
        if state is None or state.phase not in (Phase.LOADING, Phase.ORPHANED):
            return None
        assert state.offer is not None
        refs = state.offer.refs()
        del self._loading[request_id]
        if state.phase is Phase.ORPHANED:
            del self._states[request_id]
        state.phase, state.offer = Phase.QUEUED, None
        return state, refs

    def finish(self, request_id: str) -> list[int]:
        """vLLM is done with the request. Returns the leases to release now."""
        state = self._states.get(request_id)
        if state is None or state.phase is Phase.ORPHANED:
            return []
        if state.phase is Phase.LOADING:
            state.phase = Phase.ORPHANED
            return []
        refs = self.withdraw(state)
        del self._states[request_id]
        return refs
