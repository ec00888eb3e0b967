"""The worker's half where the ranks of a replica are on several hosts: it uses the pool of its own host.

Blocks that the rank saves are its own: no part of them is another rank's, so that nothing of a pool has to be agreed
on with anybody. The scheduler half names slots by refs that it makes up. Here they become slots: looked for and leased
when a request is asked for, reserved when something is saved, and published, freed or released when it says so. All of
them belong to this process, so that what a rank that dies has held is given back by whoever notices.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pegaflow.connector.copies import Copies, NativeTypes
from pegaflow.connector.guard import Guard
from pegaflow.connector.log import logger
from pegaflow.connector.metadata import (
    GroupBlocks,
    PoolAddress,
    Rank,
    RankReport,
    ShardAnswer,
    ShardAsk,
    ShardOrders,
    ShardSlot,
    StepPlan,
)
from pegaflow.connector.worker import WorkerHalf
from pegaflow.errors import PegaFlowError, PoolBusy
from pegaflow.keys import PRIVATE, shard_fingerprint

if TYPE_CHECKING:
    from pegaflow._native import Namespace, Pool

HELD_SHARE_MAX = 2
"""At most this part of the pool (one in so many bytes) is held for requests by all ranks of a replica on the host; of
more, less is found."""

RETRY_SECONDS = 0.5
"""Pause after the pool was too busy to follow the names of blocks: each attempt may wait, and vLLM's step with it."""


@dataclass(frozen=True)
class Shard:
    """Which of the equal runs of ranks this one is in."""

    number: int
    count: int
    sample: Callable[[], Sequence[Any]]
    """Reads what identifies the weights on this host; takes up to seconds."""
    label: str = ""
    """Name of the model, for people."""
    here: int = 1
    """Runs on this host, this one included."""


class ShardWorkerHalf(WorkerHalf):
    """All state of one rank, and of what it holds in the pool of its host."""

    def __init__(
        self, rank: Rank, host: str, native: NativeTypes, guard: Guard, *, by_block: bool, shard: Shard
    ) -> None:
        super().__init__(rank, host, native, guard, by_block=by_block)
        self._shard = shard
        self._weights: Sequence[Any] | None = None
        self._pool: Pool | None = None
        self._replica: PoolAddress | None = None
        self._own: PoolAddress | None = None
        self._spaces: dict[int, Namespace] = {}
        self._saver = True
        self._held: dict[int, tuple[int, int]] = {}
        """Leased slots, and bytes of each, by ref of the scheduler half."""
        self._held_bytes = 0
        self._reserved: dict[int, int] = {}
        self._saves_under_way: dict[int, tuple[dict[int, int], list[int]]] = {}
        """By job: refs of the scheduler half by slot, and those that got none."""
        self._loads_under_way: dict[str, dict[int, int]] = {}
        self._answers: dict[int, ShardAnswer] = {}
        self._resets: dict[bytes, None] = {}
        """Fingerprints that are to be reset as soon as it can be done, in their order."""
        self._retry_at = 0.0
        self._given: StepPlan | None = None
        self._plan_here = StepPlan()
        self._sampling = threading.Thread(target=self._sample, name="pegaflow-weights", daemon=True)
        self._sampling.start()

    @property
    def holds(self) -> int:
        """Slots that are leased or reserved for the scheduler half."""
        return len(self._held) + len(self._reserved)

    def start_loads(self, plan: StepPlan) -> None:
        """See ``WorkerHalf.start_loads``."""
        super().start_loads(self._here(plan))

    def start_saves(self, plan: StepPlan) -> None:
        """See ``WorkerHalf.start_saves``."""
        super().start_saves(self._here(plan))

    def take_report(self) -> RankReport | None:
        """See ``WorkerHalf.take_report``."""
        report = super().take_report()
        answers, self._answers = self._answers, {}
        if report is None and not answers:
            return None
        report = report if report is not None else RankReport()
        report.answers = answers
        for job_id, save in report.saves.items():
            refs, missed = self._saves_under_way.pop(job_id, ({}, []))
            failed = frozenset([*(refs[slot] for slot in save.failed if slot in refs), *missed])
            report.saves[job_id] = replace(save, failed=failed)
        for request_id, load in report.loads.items():
            refs = self._loads_under_way.pop(request_id, {})
            report.loads[request_id] = replace(
                load, failed=frozenset(refs[slot] for slot in load.failed if slot in refs)
            )
        return report

    def shutdown(self) -> None:
        """See ``WorkerHalf.shutdown``."""
        super().shutdown()
        pool, self._pool = self._pool, None
        self._held.clear()
        self._reserved.clear()
        if pool is not None:
            pool.close()

    def _attached(self, address: PoolAddress | None) -> Copies | None:
        """See ``WorkerHalf._attached``. While the weights are being read, or the pool is busy, jobs just fail."""
        return super()._attached(address) if self._own is not None else None

    # -- from the scheduler half's refs to slots ----------------------------------------------------------------------

    def _here(self, plan: StepPlan) -> StepPlan:
        """``plan`` with this rank's slots. Whatever fails, each job of it still ends, if only as failed."""
        if plan is self._given:
            return self._plan_here
        self._given = plan
        run = self._guard.run
        orders = plan.shards or ShardOrders()
        for verb in ("published", "aborted", "quarantined"):
            run(f"having blocks {verb}", None, partial(self._end, verb, getattr(orders, verb)))
        run("releasing blocks", None, partial(self._release, orders.released))
        self._resets.update(dict.fromkeys(orders.resets))
        run("following the names of blocks", None, partial(self._take_names, plan.pool or self._replica))
        for ask in orders.asks:
            nothing = ShardAnswer(1, tuple(bytes(len(keys)) for _, _, keys, _ in ask.groups))
            self._answers[ask.number] = run("looking for blocks", nothing, partial(self._answer, ask))
        loads = [replace(job, **self._to_load(job.request_id, job.blocks, job.doomed)) for job in plan.loads]
        saves = [replace(job, blocks=self._to_save(job.job_id, job.blocks, orders.slots)) for job in plan.saves]
        self._plan_here = replace(plan, pool=self._own, loads=tuple(loads), saves=tuple(saves))
        return self._plan_here

    def _take_names(self, replica: PoolAddress | None) -> None:
        """As ``_follow_names``. A pool that is busy is tried again with a later plan; any other error is for good."""
        try:
            self._follow_names(replica)
        except PoolBusy as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            logger.warning("PegaFlow: the pool of this host is busy, trying again: %s", error)
        except PegaFlowError as error:
            self._resets.clear()
            self.refuse(f"a worker cannot use the pool of its host: {error}")
            logger.error("PegaFlow: %s", self._problem)

    def _follow_names(self, replica: PoolAddress | None) -> None:
        """Open the pool of this host and this rank's names in it; first of all forget those of before. While a reset
        is due, nothing is found and nothing is saved, whatever comes in between."""
        if replica != self._replica or self._resets:
            self._replica, self._spaces = replica, {}
        if replica is None or self._weights is None or self._spaces:
            return
        if self._problem is not None and (self._pool is None or not self._resets):
            return
        if time.monotonic() < self._retry_at:
            return
        pool = self._open()
        parts = replica.parts[self._rank]
        mine = [(*name, part) for name, part in zip(replica.namespaces, parts, strict=True) if part is not None]
        for fingerprint in list(self._resets):
            for group, _, sizes, part in mine:
                # Other engines of this host find nothing any more of what ranks had saved.
                self._space(pool, fingerprint, group, sizes, part).reset(wait=False)
            del self._resets[fingerprint]
        if self._problem is not None:
            return  # it was for other engines only
        spaces = {group: self._space(pool, name, group, sizes, part) for group, name, sizes, part in mine}
        for space in spaces.values():
            pool.set_nodes(space, [self._numa_node])
            pool.grow_ahead(space)
        self._saver = self._rank in replica.savers
        self._own = PoolAddress(
            pool.name,
            pool.shm_dir,
            pool.member(),
            {self._rank: tuple(None if part is None else 0 for part in parts)},
            frozenset({self._rank} if self._saver else ()),
            tuple((group, self._name(name, part), (sizes[part],)) for group, name, sizes, part in mine),
        )
        self._spaces = spaces

    def _space(self, pool: "Pool", fingerprint: bytes, group: int, sizes: Sequence[int], part: int) -> "Namespace":
        label = f"{self._shard.label} rank {self._rank[1]}, shard {self._shard.number + 1} of {self._shard.count}"
        return pool.namespace(self._name(fingerprint, part), group, [sizes[part]], label=label)

    def _open(self) -> "Pool":
        if self._pool is None:
            assert self._native.create_pool is not None
            self._pool = self._native.create_pool()
            logger.info("PegaFlow: this rank uses pool %s at %s.", self._pool.name, self._pool.path)
        return self._pool

    def _name(self, fingerprint: bytes, part: int) -> bytes:
        assert self._weights is not None
        assert self._replica is not None
        # Each process makes up a name of its own for weights that are nobody else's. All ranks of a replica have those.
        own = [PRIVATE, self._replica.engine]
        weights = [own if identity[:1] == [PRIVATE] else identity for identity in self._weights]
        return shard_fingerprint(fingerprint, self._shard.number, self._shard.count, part, weights)

    def _sample(self) -> None:
        try:
            self._weights = self._shard.sample()
        except Exception as error:  # a thread has nobody to raise to
            self.refuse(f"a worker cannot identify its weights: {error!r}")

    def _answer(self, ask: ShardAsk) -> ShardAnswer:
        """Lease what there is."""
        present = []
        bytes_max = self._held_bytes_max()
        for group, first, keys, chained in ask.groups:
            space = self._spaces.get(group)
            leased: Iterable[tuple[int, int]] = ()
            if space is not None and self._pool is not None:
                room = (bytes_max - self._held_bytes) // max(1, space.block_bytes)
                leased = _lease(space, keys[: max(0, room)], chained)
                for position, slot in leased:
                    self._held[first + position] = (slot, space.block_bytes)
                    self._held_bytes += space.block_bytes
            flags = bytearray(len(keys))
            for position, _ in leased:
                flags[position] = 1
            present.append(bytes(flags))
        return ShardAnswer(1, tuple(present))

    def _held_bytes_max(self) -> int:
        """This rank's share of what may be held here. Ranks that find the same blocks hold them but once."""
        if self._pool is None or self._replica is None:
            return 0
        ranks = len(self._replica.parts) // self._shard.count
        first = self._shard.number * ranks
        copies = sum(first <= rank[1] < first + ranks for rank in self._replica.savers)
        return self._pool.pool_bytes // (HELD_SHARE_MAX * self._shard.here * max(1, copies))

    def _release(self, refs: Sequence[int]) -> None:
        known = [self._held.pop(ref) for ref in refs if ref in self._held]
        self._held_bytes -= sum(size for _, size in known)
        if known and self._pool is not None:
            self._pool.release([slot for slot, _ in known])

    def _end(self, verb: str, refs: Sequence[int]) -> None:
        slots = [self._reserved.pop(ref) for ref in refs if ref in self._reserved]
        if slots and self._pool is not None:
            ends = {"published": self._pool.publish, "aborted": self._pool.abort, "quarantined": self._pool.quarantine}
            ends[verb](slots)

    def _to_load(self, request_id: str, blocks: Sequence[GroupBlocks], doomed: bool) -> Mapping[str, Any]:
        if doomed or any(ref not in self._held for _, refs, _ in blocks for ref in refs):
            return {"doomed": True, "blocks": tuple((group, (), ids) for group, _, ids in blocks)}
        self._loads_under_way[request_id] = {self._held[ref][0]: ref for _, refs, _ in blocks for ref in refs}
        return {"blocks": tuple((group, tuple(self._held[ref][0] for ref in refs), ids) for group, refs, ids in blocks)}

    def _to_save(
        self, job_id: int, blocks: Sequence[GroupBlocks], wanted: Mapping[int, ShardSlot]
    ) -> tuple[GroupBlocks, ...]:
        """What of a job this rank has to copy: not what is there already, nor what finds no room."""
        refs_by_slot: dict[int, int] = {}
        missed: list[int] = []
        self._saves_under_way[job_id] = refs_by_slot, missed
        made = []
        for group, refs, ids in blocks:
            nothing: tuple[dict[int, int], list[int]] = ({}, list(refs))
            slots, left_out = self._guard.run("reserving", nothing, partial(self._reserve, group, refs, wanted))
            missed += left_out
            refs_by_slot.update({slot: ref for ref, slot in slots.items()})
            chosen = [(slots[ref], block) for ref, block in zip(refs, ids, strict=True) if ref in slots]
            if chosen:
                made.append((group, tuple(slot for slot, _ in chosen), tuple(block for _, block in chosen)))
        return tuple(made)

    def _reserve(
        self, group: int, refs: Sequence[int], wanted: Mapping[int, ShardSlot]
    ) -> tuple[dict[int, int], list[int]]:
        """Slots by ref, and the refs that found no room. A rank that holds a copy of another one's bytes needs none."""
        if not self._saver:
            return {}, []
        space, known = self._spaces.get(group), [ref for ref in refs if ref in wanted]
        if space is None:
            return {}, list(refs)
        keys = [wanted[ref][0] for ref in known]
        got = space.reserve(keys, parents=[wanted[ref][1] for ref in known])
        slots = {known[position]: slot for position, slot in got}
        self._reserved.update(slots)
        there = {ref for ref, present in zip(known, space.contains(keys), strict=True) if present}
        return slots, [ref for ref in refs if ref not in slots and ref not in there]


def _lease(space: "Namespace", keys: Sequence[bytes], chained: bool) -> list[tuple[int, int]]:
    """``(position, slot)`` of what could be leased."""
    if chained:
        return list(enumerate(space.lease(keys)))
    leased: list[tuple[int, int]] = []
    present = space.contains(keys)
    at = present.find(1)
    while at >= 0:
        stop = present.find(0, at)
        run = space.lease(keys[at : stop if stop >= 0 else len(keys)])
        leased += enumerate(run, at)
        at = present.find(1, at + max(1, len(run)))
    return leased
