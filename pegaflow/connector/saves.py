"""Saves, as the scheduler sees them: which full blocks are worth copying, and what became of them.

A block is reserved in the pool and pinned in vLLM's block pool, copied by all ranks after the forward pass that filled
it, and published when the last rank has reported. Nobody can see it before. The pool takes no block whose predecessor
it does not have, so a job that ends early waits for the job that holds the beginning of its chain.
"""

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pegaflow.connector.adapters import Adapter
from pegaflow.connector.events import Events, StoredBlock
from pegaflow.connector.geometry import Geometry, Group, GroupKind
from pegaflow.connector.log import logger
from pegaflow.connector.metadata import GroupBlocks, SaveJob, SaveOutcome
from pegaflow.connector.namespaces import Store
from pegaflow.connector.pins import Pins, frees_soon
from pegaflow.connector.request_state import RequestState, Snapshot
from pegaflow.connector.tails import Tails
from pegaflow.keys import group_keys
from pegaflow.metrics import Recorder

if TYPE_CHECKING:
    from pegaflow._native import Namespace

Tables = Sequence[Sequence[int]]
"""Block ids of a request, by group; 0 is the null block."""


Reserved = tuple[int, int, bytes, bytes | None, int | None]
"""``(ref, block id, key, key of the block before it, position of a full block)``."""


@dataclass
class _Job:
    refs: list[int]
    keys: list[tuple[int, bytes]]
    pins: list[Any]
    ranks_left: int
    waits_for: set[int]
    """Jobs in flight that save the blocks before ours."""
    started: float
    described: list[StoredBlock] = field(default_factory=list)
    """The same blocks, for whoever wants to know what is stored."""
    tables: Tables = ()
    """All blocks of the request when the job was planned: what is saved was computed from them."""
    loads: set[str] = field(default_factory=set)
    """Requests whose loads are not over: should one fail, so will the engine, and what we computed from it is not to be
    there for others."""
    adapter: Adapter | None = None
    """The adapter that it was computed with."""
    look: int = 0
    """Look at the adapter's files that has to confirm it: workers may have read them anew before this very step."""
    followers: list[int] = field(default_factory=list)
    """Jobs that wait for this one."""
    failed: set[int] = field(default_factory=set)
    seconds: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether all ranks are done, and nobody has to be waited for."""
        return self.ranks_left <= 0 and not self.waits_for and not self.loads and self.weights_known is not None

    @property
    def weights_known(self) -> bool | None:
        """Whether it was computed with the weights that its keys stand for; ``None``: that is not known yet."""
        return self.adapter is None or self.adapter.confirms(self.look)


class Saves:
    """All save jobs in flight."""

    def __init__(
        self,
        geometry: Geometry,
        store: Store,
        pins: Pins,
        recorder: Recorder,
        ranks: int,
        overdue_seconds: float,
        tails: Tails,
        events: Events,
        landing: Callable[[Tables], set[str]],
        ask: Callable[[Adapter], int],
    ) -> None:
        """``landing``: requests whose loads may still write some block of these tables. ``ask``: ``Adapters.ask``."""
        self._landing = landing
        self._ask = ask
        self._geometry = geometry
        self._events = events
        self._store = store
        self._pins = pins
        self._recorder = recorder
        self._ranks = ranks
        self._overdue_seconds = overdue_seconds
        self._tails = tails
        self._jobs: dict[int, _Job] = {}
        self._ids = itertools.count(1)
        self._keys_in_flight: dict[tuple[int, bytes], int] = {}
        self._late: list[SaveJob] = []
        self._with_adapters: list[int] = []
        """Jobs that wait for a look at an adapter's files, perhaps among others that are over."""

    @property
    def pending(self) -> int:
        """Jobs whose blocks are still pinned."""
        return len(self._jobs)

    def frees_soon(self) -> bool:
        """Whether waiting a step may bring blocks back: some are about to be copied that nobody else uses."""
        oldest = next(iter(self._jobs.values())).started if self._jobs else None
        return frees_soon(oldest) and any(block.ref_cnt == 1 for job in self._jobs.values() for block in job.pins)

    def has_more(self, state: RequestState, computed_tokens: int) -> bool:
        """Whether some block is full that was not looked at yet, and may be pinned. If none is, notes in the state when
        one may be."""
        if not self._pins.room:
            return False
        if state.snapshots or self._tails.to_save(state, computed_tokens) is not None:
            return True
        saved, nothing_before = state.saved_blocks, self._tails.nothing_before(state, computed_tokens)
        for group in self._geometry.groups:
            if group.kind is not GroupKind.STATE:
                full = (saved.get(group.index, 0) + 1) * group.block_tokens + group.lag_tokens
                nothing_before = min(nothing_before, full)
        state.nothing_before = nothing_before
        return computed_tokens >= nothing_before

    def plan(
        self, state: RequestState, tables: Tables, computed_tokens: int, snapshots: Sequence[Snapshot] = ()
    ) -> SaveJob | None:
        """Job for the blocks of a request that are full once ``computed_tokens`` tokens are computed.

        Blocks that are in the pool already, on their way there, or outside a window are left out. Each block is looked
        at once, except those that found no room: they are tried again the next time. ``snapshots``: blocks that hold
        states of recurrent layers after this step; they are there to be copied in this step only.
        """
        namespaces = self._store.namespaces()
        room = self._pins.room
        if namespaces is None or state.left_alone or not room:
            return None
        blocks: list[GroupBlocks] = []
        keys: list[tuple[int, bytes]] = []
        parents: set[tuple[int, bytes]] = set()
        described: list[StoredBlock] = []
        pinned: list[Any] = []
        looked_at = dict(state.saved_blocks), state.tail_looked_at
        try:
            for position, group in enumerate(self._geometry.groups):
                namespace, table = namespaces[group.index], tables[position]
                whole = partial(self._reserve_states, snapshots) if group.kind is GroupKind.STATE else self._reserve
                for reserve in (whole, partial(self._reserve_tail, keys)):
                    chosen = reserve(namespace, group, state, table, computed_tokens, room)
                    if chosen:
                        room -= len(chosen)
                        refs, ids, chosen_keys, before, positions = zip(*chosen, strict=True)
                        blocks.append((group.index, refs, ids))  # first of all: what fails from here on is undone
                        full = [position for position in positions if position is not None]
                        described += self._events.describe(state, group, full)
                        keys += [(group.index, key) for key in chosen_keys]
                        parents |= {(group.index, parent) for parent in before if parent}
            if not blocks:
                return None
            loads = self._landing(tables)
            look = self._ask(state.adapter) if state.adapter is not None else 0
            pinned = self._pins.pin([block_id for _, _, ids in blocks for block_id in ids])
        except BaseException:
            state.saved_blocks, state.tail_looked_at = looked_at
            state.nothing_before = 0
            self._abort([ref for _, refs, _ in blocks for ref in refs])
            raise
        job_id = next(self._ids)
        waits_for = {self._keys_in_flight[parent] for parent in parents if parent in self._keys_in_flight}
        for earlier in waits_for:
            self._jobs[earlier].followers.append(job_id)
        refs_all = [ref for _, refs, _ in blocks for ref in refs]
        now = time.monotonic()
        self._jobs[job_id] = _Job(
            refs_all, keys, pinned, self._ranks, waits_for, now, described, tables, loads, state.adapter, look
        )
        if state.adapter is not None:
            self._with_adapters.append(job_id)
        self._keys_in_flight.update(dict.fromkeys(keys, job_id))
        return SaveJob(job_id, tuple(blocks))

    def plan_late(self, state: RequestState, tables: Tables, computed_tokens: int) -> None:
        """Like ``plan`` for a request that ends now: its blocks go out with the next step."""
        job = self.plan(state, tables, computed_tokens) if self.has_more(state, computed_tokens) else None
        if job is not None:
            self._late.append(job)

    def take_late(self) -> list[SaveJob]:
        """Jobs of requests that ended since the last step."""
        jobs, self._late = self._late, []
        return jobs

    def reported(self, job_id: int, outcome: SaveOutcome) -> None:
        """Take the report of some ranks; jobs that all ranks reported are published in order and unpinned."""
        job = self._jobs.get(job_id)
        if job is None:
            return
        job.ranks_left -= outcome.ranks
        job.failed |= outcome.failed
        job.seconds = max(job.seconds, outcome.seconds)
        if job.is_over:
            self._take_out(job_id, self._complete)

    def load_over(self, request_id: str) -> None:
        """A load that vLLM went on with is over."""
        for job in self._jobs.values():
            job.loads.discard(request_id)
        self._complete_those_over(list(self._jobs))

    def complete_confirmed(self) -> None:
        """Complete the jobs that had only to wait for a look at the files of their adapter."""
        self._with_adapters = [job_id for job_id in self._with_adapters if job_id in self._jobs]
        self._complete_those_over(self._with_adapters)

    def distrust(self, block_ids: Collection[int]) -> None:
        """Some blocks could not be filled by whoever had promised it: nothing that was computed from them is saved."""
        for job in self._jobs.values():
            if any(block in block_ids for table in job.tables for block in table):
                job.failed.update(job.refs)

    def watch(self) -> None:
        """Give up jobs that take too long: their slots go into quarantine, their pins are released.

        Nothing will ever be published from them, so it does no harm that vLLM may overwrite the blocks meanwhile.
        """
        latest_start = time.monotonic() - self._overdue_seconds
        while self._jobs and next(iter(self._jobs.values())).started < latest_start:
            logger.error("PegaFlow: a save has not ended after %.0f s and is given up.", self._overdue_seconds)
            self._recorder.count("save_failure")
            self._take_out(next(iter(self._jobs)), self._abandon)

    def forget_keys(self) -> None:
        """The cache was reset: what is on its way will never be there, so the same blocks may be saved anew."""
        self._keys_in_flight.clear()

    def abandon_all(self) -> None:
        """The engine stops: what is not finished will not be. Workers may still be copying."""
        self._late.clear()
        self._keys_in_flight.clear()
        jobs, self._jobs = self._jobs, {}
        _try_all(partial(self._abandon, job) for job in jobs.values())

    def _reserve(
        self,
        namespace: "Namespace",
        group: Group,
        state: RequestState,
        table: Sequence[int],
        computed_tokens: int,
        room: int,
    ) -> list[Reserved]:
        """Each block of one group that is to be copied."""
        keys = group_keys(state.hashes(), group.hashes_per_block)
        start = state.saved_blocks.get(group.index, 0)
        stop = min((computed_tokens - group.lag_tokens) // group.block_tokens, len(keys), len(table))
        if start >= stop:
            return []
        if room <= 0:
            return []
        present = namespace.contains(keys[start:stop])
        self._events.found(state, group, start, present)
        wanted = [
            block
            for block in range(start, stop)
            if table[block] != 0
            and not present[block - start]
            and (group.index, keys[block]) not in self._keys_in_flight
        ]
        # A window's blocks are of use without those before them, which may have left the window unsaved.
        chained = group.kind is GroupKind.FULL
        parents = {block: keys[block - 1] if chained and block else None for block in wanted}
        if wanted and not self._joins(namespace, group, parents[wanted[0]]):
            state.saved_blocks[group.index] = stop
            return []
        reserved = self._reserve_slots(namespace, keys, wanted[:room], parents)
        first_left = next((block for block in wanted if block not in reserved), stop)
        state.saved_blocks[group.index] = first_left
        taken: list[Reserved] = [
            (ref, table[block], keys[block], parents[block], block)
            for block, ref in reserved.items()
            if block < first_left
        ]
        surplus = [ref for block, ref in reserved.items() if block >= first_left]
        self._abort(surplus)
        self._recorder.count("save_blocks_deferred", sum(block >= first_left for block in wanted))
        return taken

    def _reserve_states(
        self,
        snapshots: Sequence[Snapshot],
        namespace: "Namespace",
        group: Group,
        state: RequestState,
        table: Sequence[int],
        computed_tokens: int,
        room: int,
    ) -> list[Reserved]:
        """Like ``_reserve``, of states. A table does not say which of its blocks hold the state at their end."""
        keys = group_keys(state.hashes(), group.hashes_per_block)
        ends = {tokens: block for index, block, tokens in snapshots if index == group.index and block}
        wanted = {
            keys[tokens // group.block_tokens - 1]: (block, tokens // group.block_tokens - 1)
            for tokens, block in ends.items()
            if tokens % group.block_tokens == 0 and 0 < tokens // group.block_tokens <= len(keys)
        }
        wanted = {key: block for key, block in wanted.items() if (group.index, key) not in self._keys_in_flight}
        offered = [key for key, there in zip(wanted, namespace.contains(list(wanted)), strict=True) if not there]
        slots = namespace.reserve(offered[:room], parents=[None] * len(offered[:room])) if offered[:room] else []
        self._recorder.count("save_blocks_deferred", len(offered) - len(slots))
        chosen = [(ref, offered[index]) for index, ref in slots]
        return [(ref, wanted[key][0], key, None, wanted[key][1]) for ref, key in chosen]

    def _reserve_tail(
        self,
        before: Collection[tuple[int, bytes]],
        namespace: "Namespace",
        group: Group,
        state: RequestState,
        table: Sequence[int],
        computed_tokens: int,
        room: int,
    ) -> list[Reserved]:
        """Like ``_reserve``, of the tail. ``before``: keys of the blocks that are to be copied with it."""
        tail = self._tails.to_save(state, computed_tokens)
        if tail is None or room <= 0 or tail.block >= len(table):
            return []
        if state.saved_blocks.get(group.index, 0) < tail.block:
            return []  # not all blocks before it found room
        state.tail_looked_at = True
        key, parent = (group.index, tail.key), tail.parent
        joins = (group.index, parent) in before or self._joins(namespace, group, parent)
        if not joins or key in self._keys_in_flight or namespace.contains([tail.key])[0]:
            return []
        slots = namespace.reserve([tail.key], parents=[parent])
        state.tail_looked_at = bool(slots)
        self._recorder.count("save_blocks_deferred", 1 - len(slots))
        return [(ref, table[tail.block], tail.key, parent, None) for _, ref in slots]

    def _joins(self, namespace: "Namespace", group: Group, parent: bytes | None) -> bool:
        """Whether the block before one that is to be saved is there or on its way; the pool takes no others."""
        return parent is None or (group.index, parent) in self._keys_in_flight or bool(namespace.contains([parent])[0])

    def _abort(self, refs: list[int]) -> None:
        if refs and self._store.pool is not None:
            self._store.pool.abort(refs)

    @staticmethod
    def _reserve_slots(
        namespace: "Namespace", keys: Sequence[bytes], blocks: Sequence[int], parents: Mapping[int, bytes | None]
    ) -> dict[int, int]:
        """Refs by block, for those that got a slot."""
        slots = namespace.reserve([keys[block] for block in blocks], parents=[parents[block] for block in blocks])
        return {blocks[index]: ref for index, ref in slots}

    def _complete_those_over(self, job_ids: Sequence[int]) -> None:
        """Complete each of these jobs that nothing is missing for any more, whatever fails with others."""
        over = [job_id for job_id in job_ids if self._jobs[job_id].is_over]

        def complete(job_id: int) -> None:
            if job_id in self._jobs:  # not completed with one before it
                self._take_out(job_id, self._complete)

        _try_all(partial(complete, job_id) for job_id in over)

    def _take_out(self, job_id: int, end: Callable[[_Job], None]) -> None:
        """``end`` a job, then complete those that all ranks reported and that only waited for it."""
        ready = [(job_id, end)]
        errors = []
        while ready:
            job_id, end = ready.pop()
            job = self._jobs.pop(job_id)
            for key in job.keys:
                if self._keys_in_flight.get(key) == job_id:  # another one since a reset
                    del self._keys_in_flight[key]
            try:
                end(job)
            except Exception as error:  # the jobs that waited must not wait for ever
                errors.append(error)
            for later in job.followers:
                follower = self._jobs.get(later)
                if follower is not None:
                    follower.waits_for.discard(job_id)
                    if follower.is_over:
                        ready.append((later, self._complete))
        if errors:
            raise errors[0]

    def _all_present(self, keys: Sequence[tuple[int, bytes]]) -> bool:
        namespaces = self._store.namespaces() or {}
        return all(group in namespaces and namespaces[group].contains([key])[0] for group, key in keys)

    def _complete(self, job: _Job) -> None:
        pool = self._store.pool
        visible = 0
        if not job.weights_known:
            job.failed.update(job.refs)
        try:
            if pool is not None:
                visible = pool.publish([ref for ref in job.refs if ref not in job.failed])
                failed = [ref for ref in job.refs if ref in job.failed]
                # A device that was lost may still be writing what it has not copied.
                (pool.quarantine if self._store.off else pool.abort)(failed)
            # A block that another process published first is visible too.
            if visible == len(job.refs) or (not job.failed and self._all_present(job.keys)):
                self._recorder.count("save_success")
                self._recorder.observe("save_duration_seconds", job.seconds)
                self._recorder.observe("save_blocks", visible)
            else:
                self._recorder.count("save_failure")
            self._events.settle(job.described)
        finally:
            self._pins.unpin(job.pins)

    def _abandon(self, job: _Job) -> None:
        try:
            if self._store.pool is not None:
                self._store.pool.quarantine(job.refs)
        finally:
            self._pins.unpin(job.pins)


def _try_all(steps: Iterable[Callable[[], None]]) -> None:
    """Take each step whatever becomes of the others, then raise the first error."""
    errors = []
    for step in steps:
        try:
            step()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
