"""Loads, as the scheduler sees them: find a hit, lease it, hand it to the workers, give the leases back."""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pegaflow.connector.attribution import Attribution, Found
from pegaflow.connector.geometry import Geometry, GroupKind
from pegaflow.connector.landing import Landing, Landings
from pegaflow.connector.log import logger
from pegaflow.connector.matching import Index, Match, Need, find_match, needs_of, with_tail
from pegaflow.connector.metadata import GroupBlocks, LoadJob, LoadOutcome
from pegaflow.connector.namespaces import Store
from pegaflow.connector.peer_runs import Everything
from pegaflow.connector.peer_watch import PeerWatch, WatchedView
from pegaflow.connector.peering import PeerFetches
from pegaflow.connector.prefetching import Prefetches, TierView
from pegaflow.connector.request_state import Offer, Phase, RequestState, RequestTable
from pegaflow.connector.shard_asks import ShardAsks
from pegaflow.connector.tails import Tails
from pegaflow.connector.waiting import Waiting
from pegaflow.keys import group_keys
from pegaflow.metrics import Recorder

if TYPE_CHECKING:
    from pegaflow._native import Namespace

BAD_KEYS_MAX = 4_096
"""Blocks remembered because they could not be loaded; the oldest are forgotten first."""

STILL_STEPS_MAX = 100
"""So many steps vLLM may do nothing at all while something is on offer."""

LEASE_ATTEMPTS_MAX = 2
"""A block may be evicted between lookup and lease; then the search starts once more."""

Answer = tuple[int | None, bool]
MISS: Answer = (0, False)
ASK_AGAIN: Answer = (None, False)


class Loads:
    """Offers and load jobs of all requests."""

    def __init__(
        self,
        geometry: Geometry,
        store: Store,
        table: RequestTable,
        landings: Landings,
        recorder: Recorder,
        overdue_seconds: float,
        tails: Tails,
        waiting: Waiting,
        prefetches: Prefetches,
        peers: PeerFetches,
        watch: PeerWatch,
        attribution: Attribution,
        shards: ShardAsks | None = None,
    ) -> None:
        """``shards``: asked instead of the pool, where ranks are on several hosts."""
        self._geometry = geometry
        self._store = store
        self._table = table
        self._landings = landings
        self._recorder = recorder
        self._overdue_seconds = overdue_seconds
        self._tails = tails
        self._waiting = waiting
        self._prefetches = prefetches
        self._peers = peers
        self._watch = watch
        self._attribution = attribution
        self._shards = shards
        self._jobs: list[LoadJob] = []
        self._bad_keys: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._still_steps = 0

    def match(self, state: RequestState, computed_tokens: int) -> Answer:
        """Answer to "how many tokens beyond ``computed_tokens``?": the same one until something changes."""
        offer = state.offer
        sequence_tokens: int = state.request.num_tokens
        if state.phase is Phase.OFFERED and offer is not None:
            same = (offer.computed_tokens, offer.sequence_tokens) == (computed_tokens, sequence_tokens)
            if same and state.may_load and not offer.void:
                return offer.external_tokens, True
            self._release(self._table.withdraw(state))
        if state.phase is not Phase.QUEUED or not state.may_load:
            return MISS
        if state.request.request_id in self._landings:
            return ASK_AGAIN  # preempted while its blocks were arriving; that takes no longer than a copy
        namespaces = self._store.namespaces()
        if namespaces is None:
            return ASK_AGAIN if self._store.worth_waiting() else MISS
        if self._waiting.goes_on(state, self._places(namespaces), computed_tokens):
            return ASK_AGAIN
        keys = self._keys(state)
        views: Any = namespaces
        if self._shards is not None:
            request_id = state.request.request_id
            everything = {group: Everything() for group in namespaces}
            # What the device has already is not worth a step.
            worth = request_id in self._shards or self._find(state, everything, keys, computed_tokens) is not None
            views = self._shards.views(request_id, views, keys if worth else {})
        elif self._put_off(state, namespaces, keys, computed_tokens):
            views = None
        if views is None:
            return ASK_AGAIN
        try:
            return self._offer(state, views, keys, computed_tokens)
        finally:
            self._drop(state.request.request_id)

    def _put_off(
        self,
        state: RequestState,
        namespaces: "Mapping[int, Namespace]",
        keys: Mapping[int, Sequence[bytes]],
        computed_tokens: int,
    ) -> bool:
        """Whether blocks are on their way into memory that the request should take too."""
        pool, ssd = self._store.pool, self._store.ssd
        if pool is None:
            return False
        if ssd and self._store.ssd_settles():
            return True
        find = partial(self._find, state, keys=keys, computed_tokens=computed_tokens)
        # Peers answer while the disk reads.
        self._peers.ask(state, namespaces, self._views(namespaces), keys, computed_tokens, find)
        if ssd and self._prefetches.goes_on(state, pool, namespaces, keys, computed_tokens, find):
            return True
        return self._peers.goes_on(state, pool, namespaces, keys, computed_tokens, find)

    def _drop(self, request_id: str) -> None:
        """Hold nothing any more that was brought for a request."""
        self._prefetches.drop(request_id, self._store.pool)
        self._peers.drop(request_id, self._store.pool)
        if self._shards is not None:
            self._shards.drop(request_id)

    def _offer(
        self,
        state: RequestState,
        namespaces: "Mapping[int, Namespace]",
        keys: Mapping[int, Sequence[bytes]],
        computed_tokens: int,
    ) -> Answer:
        for _ in range(LEASE_ATTEMPTS_MAX):
            found = self._find(state, namespaces, keys, computed_tokens)
            leases = self._lease(namespaces, keys, found) if found is not None else None
            if found is None:
                break
            if leases is not None:
                offer = Offer(computed_tokens, int(state.request.num_tokens), found.tokens, leases)
                self._table.make_offer(state, offer)
                self._count(state, namespaces, keys, computed_tokens, found.tokens)
                return offer.external_tokens, True
        self._count(state, namespaces, keys, computed_tokens, computed_tokens)
        return MISS

    def _count(
        self,
        state: RequestState,
        namespaces: "Mapping[int, Namespace]",
        keys: Mapping[int, Sequence[bytes]],
        computed_tokens: int,
        hit_tokens: int,
    ) -> None:
        """Where a prompt was found, once for each request."""
        if state.counted:
            return
        state.counted = True
        here = hit_tokens if state.tokens_here is None else max(computed_tokens, min(state.tokens_here, hit_tokens))
        in_memory = here if state.tokens_in_memory is None else max(computed_tokens, min(state.tokens_in_memory, here))
        most = max(hit_tokens, self._geometry.hit_tokens_max(int(state.request.num_prompt_tokens)))
        known = min(most, max(hit_tokens, state.tokens_elsewhere))
        found = Found(computed_tokens, in_memory, here, hit_tokens, known, most)
        self._attribution.prompt(namespaces, keys, found)

    def count_off(self, state: RequestState, computed_tokens: int) -> None:
        """The prompt is not looked for, since the pool is off."""
        if not state.counted:
            state.counted = True
            most = self._geometry.hit_tokens_max(int(state.request.num_prompt_tokens))
            self._attribution.not_asked(max(0, most - computed_tokens))

    def allocated(self, state: RequestState, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """vLLM has blocks for ``external_tokens`` of what was offered: load them, or drop the offer if it is 0."""
        if external_tokens <= 0:
            # It may have stopped asking before it took what was brought for it.
            self._drop(state.request.request_id)
            self._release(self._table.withdraw(state))
            return
        if state.phase is Phase.QUEUED:
            self._table.make_offer(state, Offer(0, 0, external_tokens, {}, void=True))
        if state.phase is not Phase.OFFERED or state.offer is None:
            return
        offer = state.offer
        blocks: tuple[GroupBlocks, ...] | None = None
        try:
            if not offer.void:
                blocks = self._blocks_to_load(offer, tables, external_tokens)
        finally:
            # vLLM waits for this request from now on: whatever happened, a load has to start and to end.
            doomed = blocks is None
            if blocks is None:
                blocks = self._blocks_given_up(offer, tables)
            self._table.start_load(state, time.monotonic())
            job = LoadJob(state.request.request_id, blocks, doomed)
            self._jobs.append(job)
        # The step itself would write on into a block that ends with a tail: all of it has to be there before.
        whole = (offer.computed_tokens + external_tokens) % self._geometry.align_tokens == 0
        if not doomed and whole and self._landings.hold(state, [block for _, _, ids in blocks for block in ids]):
            self._jobs[-1] = replace(job, follow=True)

    def note_step(self, still: bool) -> None:
        """A step is planned. ``still``: nothing runs, is loaded or saved.

        A request that has priority and waits for blocks keeps those behind it waiting, and before vLLM had a queue of
        their own (0.25 has none) that was true of those that hold the blocks. For a load vLLM wants more blocks to be
        free than for computing: so what has been on offer for too long is computed.
        """
        self._still_steps = self._still_steps + 1 if still else 0
        if self._still_steps > STILL_STEPS_MAX:
            self._still_steps = 0
            for state in self._table:
                if state.phase is Phase.OFFERED:
                    state.may_load = False

    def take_jobs(self) -> tuple[LoadJob, ...]:
        """Jobs for the workers; each is handed out once."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def reported(self, request_id: str, outcome: LoadOutcome) -> None:
        """Remember what some ranks say of a load that others may still be busy with."""
        if request_id in self._landings:
            landing = self._landings.reported(request_id, outcome)
            if landing is not None:
                self._conclude(landing)
            return
        state = self._table.get(request_id)
        if state is not None and state.phase in (Phase.LOADING, Phase.ORPHANED):
            known = state.load_outcome
            state.load_outcome = known.merge(outcome) if known else outcome

    def finished(self, request_id: str) -> None:
        """vLLM goes on with a request: all ranks are done with its load, or it may be followed.

        Other connectors' requests are ignored."""
        state = self._table.get(request_id)
        offer = state.offer if state else None
        ended = self._table.end_load(request_id)
        if ended is None or offer is None:
            return
        state, refs = ended
        landing = self._landings.begin(state, offer, refs)
        if landing is not None:
            self._conclude(landing)
        else:
            self._recorder.count("load_followed")

    def _conclude(self, landing: Landing) -> None:
        state = landing.state
        self._landings.let_go(landing)
        self._release(landing.refs)
        outcome = landing.outcome or LoadOutcome(True, frozenset(), time.monotonic() - state.load_started)
        if outcome.ok:
            self._recorder.count("load_success")
            self._recorder.observe("load_duration_seconds", outcome.seconds)
            self._recorder.observe("load_blocks", len(landing.refs))
            blocks = {need.group: len(refs) for need, refs in landing.offer.leases.items()}
            self._attribution.loaded(self._store.namespaces(), blocks)
        else:
            self._recorder.count("load_failure")
            state.may_load = False
            self._remember_bad(state, landing.offer, outcome.failed)

    def void_offers(self) -> None:
        """The cache was reset: what is on offer must not be loaded any more, and what was bad is gone."""
        self.stop_waiting()
        self._bad_keys.clear()
        for state in self._table:
            if state.phase is Phase.OFFERED and state.offer is not None:
                state.offer.void = True

    def stop_waiting(self) -> None:
        """Hold nothing any more for requests that wait for the SSD or peers; they look again when they ask again."""
        self._prefetches.drop_all(self._store.pool)
        self._peers.drop_all(self._store.pool)
        self._watch.close()
        if self._shards is not None:
            self._shards.drop_all()

    def request_finished(self, request_id: str) -> None:
        """vLLM is done with the request; a load in flight keeps its leases."""
        self._drop(request_id)
        self._release(self._table.finish(request_id))

    def withdraw_all(self) -> None:
        """The engine stops: give back what is on offer. What workers may still be reading stays leased."""
        self.stop_waiting()
        for state in self._table:
            self._release(self._table.withdraw(state))

    def watch(self) -> None:
        """Complain once about each load that takes too long. Its blocks cannot be given back while it may write."""
        latest_start = time.monotonic() - self._overdue_seconds
        for state in self._table.loading_states():
            if state.load_started >= latest_start:
                break
            if state.phase is Phase.LOADING and not state.load_overdue:
                state.load_overdue = True
                self._recorder.count("load_overdue")
                logger.error(
                    "PegaFlow: a load has been running for %.0f s; its request waits until the copy ends.",
                    self._overdue_seconds,
                )

    def _places(
        self, namespaces: "Mapping[int, Namespace]"
    ) -> "Mapping[int, Namespace] | Mapping[int, TierView] | Mapping[int, WatchedView]":
        """Where requests may wait for something to come."""
        views = self._views(namespaces)
        return self._watch.views(views, namespaces) if self._watch.active else views

    def _views(self, namespaces: "Mapping[int, Namespace]") -> "Mapping[int, Namespace] | Mapping[int, TierView]":
        if not self._store.ssd:
            return namespaces
        return {group: TierView(namespace) for group, namespace in namespaces.items()}

    def _find(
        self,
        state: RequestState,
        namespaces: Mapping[int, Index],
        keys: Mapping[int, Sequence[bytes]],
        computed_tokens: int,
    ) -> Match | None:
        tokens_max = self._without_bad_keys(keys, self._geometry.hit_tokens_max(state.request.num_tokens))
        found = find_match(self._geometry, namespaces, keys, computed_tokens, tokens_max)
        tail = self._tails.to_load(state)
        if tail is not None:
            group = self._geometry.groups[0].index
            if (group, tail.key) not in self._bad_keys:
                return with_tail(self._geometry, namespaces[group], found, computed_tokens, tail)
        return found

    def _keys(self, state: RequestState) -> dict[int, Sequence[bytes]]:
        """Keys of each group's full blocks, and of the tail behind them if there is one."""
        hashes = state.hashes()
        keys = {group.index: group_keys(hashes, group.hashes_per_block) for group in self._geometry.groups}
        tail = self._tails.to_load(state)
        if tail is not None:
            group = self._geometry.groups[0].index
            keys[group] = [*keys[group], tail.key]
        return keys

    def _without_bad_keys(self, keys: Mapping[int, Sequence[bytes]], tokens_max: int) -> int:
        if self._bad_keys:
            for group in self._geometry.groups:
                for position, key in enumerate(keys[group.index]):
                    if (group.index, key) in self._bad_keys:
                        tokens_max = min(tokens_max, position * group.block_tokens)
                        break
        return tokens_max

    def _lease(
        self, namespaces: "Mapping[int, Namespace]", keys: Mapping[int, Sequence[bytes]], match: Match
    ) -> dict[Need, list[int]] | None:
        leases: dict[Need, list[int]] = {}
        complete = False
        try:
            for need in match.needs:
                leases[need] = self._lease_blocks(namespaces[need.group], keys[need.group], need)
                if len(leases[need]) < need.stop - need.start:
                    return None
            complete = True
        finally:
            if not complete:
                self._release([ref for held in leases.values() for ref in held])
        return leases

    def _lease_blocks(self, namespace: "Namespace", keys: Sequence[bytes], need: Need) -> list[int]:
        if self._geometry.group(need.group).kind is not GroupKind.FULL:
            return namespace.lease(keys[need.start : need.stop])  # what left the window need not be kept fresh
        return namespace.lease(keys, need.start, need.stop)

    def _blocks_to_load(
        self, offer: Offer, tables: Sequence[Sequence[int]], external_tokens: int
    ) -> tuple[GroupBlocks, ...] | None:
        """Pairs of leased slots and allocated blocks; ``None`` if some block that vLLM counts on is not leased."""
        leased = {need.group: (need, refs) for need, refs in offer.leases.items()}
        jobs = []
        hit_tokens = offer.computed_tokens + external_tokens
        needs = needs_of(self._geometry, offer.computed_tokens, hit_tokens)
        for need, table in zip(needs, tables, strict=True):
            held, refs = leased[need.group]
            stop = -(-hit_tokens // self._geometry.group(need.group).block_tokens)
            if need.start < held.start or stop > held.stop or stop > len(table):
                return None
            pairs = [
                (refs[block - held.start], table[block])
                for block in range(need.start, stop)
                if table[block] != 0  # the null block stands for what the window no longer needs
            ]
            if pairs:
                jobs.append((need.group, tuple(ref for ref, _ in pairs), tuple(block for _, block in pairs)))
        return tuple(jobs)

    def _blocks_given_up(self, offer: Offer, tables: Sequence[Sequence[int]]) -> tuple[GroupBlocks, ...]:
        """All blocks that a load would have filled, without slots."""
        jobs = []
        for position, group in enumerate(self._geometry.groups):
            ids = tables[position][offer.computed_tokens // group.block_tokens :]
            jobs.append((group.index, (), tuple(block for block in ids if block != 0)))
        return tuple(jobs)

    def _remember_bad(self, state: RequestState, offer: Offer, failed: frozenset[int]) -> None:
        keys = self._keys(state)
        for need, refs in offer.leases.items():
            for position, ref in enumerate(refs, need.start):
                if ref in failed:
                    self._bad_keys[need.group, keys[need.group][position]] = None
        while len(self._bad_keys) > BAD_KEYS_MAX:
            self._bad_keys.popitem(last=False)

    def _release(self, refs: list[int]) -> None:
        if refs and self._store.pool is not None:
            self._store.pool.release(refs)
