"""A worker's half: copies what the plan says and reports what is done. Never searches the index.

One rank of one engine. vLLM calls from one thread; the copies run on the engine's own threads and are polled once per
step.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from pegaflow.connector.copies import Copies, NativeTypes, Task
from pegaflow.connector.early import EarlyStart
from pegaflow.connector.following import Follower, StagedCopier
from pegaflow.connector.guard import Guard, MustStop
from pegaflow.connector.layout import GroupLayout
from pegaflow.connector.log import logger
from pegaflow.connector.metadata import (
    GroupBlocks,
    GroupShape,
    LoadOutcome,
    PoolAddress,
    Rank,
    RankReport,
    SaveOutcome,
    StepPlan,
    WorkerShape,
)
from pegaflow.connector.numa import node_of_device
from pegaflow.errors import PegaFlowError, PoolBusy

if TYPE_CHECKING:
    from pegaflow._native import KVLayout

SETTLE_SECONDS_MAX = 2.0
"""Longest wait for saves of an engine that nobody steps once it is idle."""

DRAIN_SECONDS_MAX = 30.0
"""Longest wait for copies before the caches are unmapped for sleep."""

LOST_LOAD = (
    "PegaFlow: a load that vLLM already computes with has failed, most likely with its device; the engine has to stop, "
    "since whatever it said next would be wrong: start it again."
)


class WorkerHalf:
    """All state of one rank."""

    def __init__(self, rank: Rank, host: str, native: NativeTypes, guard: Guard, *, by_block: bool) -> None:
        """``by_block``: failed loads are reported by block ids, which mean something in a single group only."""
        self._rank = rank
        self._host = host
        self._native = native
        self._guard = guard
        self._by_block = by_block
        self._copies: Copies | None = None
        self._early: EarlyStart | None = None
        self._group_layouts: dict[int, GroupLayout] = {}
        self._layouts: dict[int, KVLayout] = {}
        self._blocks = 0
        self._keep_alive: object = None
        self._device = "cpu"
        self._numa_node: int | None = None
        self._problem: str | None = "the KV caches of a worker were never registered."
        self._problem_reported = False
        self._shape_told = False
        self._follower: Follower | None = None
        self._loads_started: StepPlan | None = None
        self._saves_started: StepPlan | None = None
        self._queued: set[str] = set()
        self._ended: list[Task] = []
        self._ended_since_rest = False
        self._invalid_blocks: set[int] = set()
        self._report = RankReport()

    def register(
        self, layouts: Mapping[int, GroupLayout], blocks: int, keep_alive: object, device: str = "cpu"
    ) -> None:
        """Take the caches: regions by group in the order of groups, whatever keeps their memory alive, and the device
        that they are on (``"cpu"`` or ``"cuda:0"``)."""
        self._group_layouts, self._device = dict(layouts), device
        only = next(iter(layouts.values())) if len(layouts) == 1 and self._by_block else None
        self._follower = Follower(only.layer_ends) if only is not None else None
        self._numa_node = self._guard.run("finding the NUMA node", None, partial(node_of_device, device))
        self._blocks, self._keep_alive, self._problem = blocks, keep_alive, None
        self.restore()

    def prepare(self, early: EarlyStart) -> None:
        """Pool and copier are being made before the first plan names the pool."""
        self._early = early

    def refuse(self, problem: str) -> None:
        """This rank cannot take part."""
        self._problem = problem

    def shape(self) -> WorkerShape:
        """What the scheduler has to know of this rank."""
        groups = tuple(GroupShape(layout.part_bytes, layout.digest) for layout in self._group_layouts.values())
        return WorkerShape(self._rank, self._host, groups, self._problem, self._numa_node)

    def tell_shape(self) -> WorkerShape:
        """``shape()``, for somebody who passes it on to the scheduler; otherwise the first report has it."""
        self._shape_told = True
        return self.shape()

    def unregister(self) -> None:
        """The caches go away (sleep). vLLM has drained all transfers; should some still run, they are waited for.

        Raises ``PoolBusy`` if they do not end: memory that is being copied must not be unmapped.
        """
        if self._copies is not None and not self._copies.drain(DRAIN_SECONDS_MAX):
            raise PoolBusy("copies are still running, so the KV caches cannot be unmapped: retry.")
        self._layouts = {}

    def restore(self) -> None:
        """The caches are there (again), at the same addresses."""
        self._layouts = {
            group: self._native.layout(layout.regions, self._blocks)
            for group, layout in self._group_layouts.items()
            if layout.regions
        }

    def shutdown(self) -> None:
        """Finish what is queued and leave the pool. Idempotent."""
        copies, self._copies = self._copies, None
        early, self._early = self._early, None
        self._problem, self._problem_reported = self._problem or "the worker has shut down.", True
        if copies is not None:
            copies.close()
        elif early is not None:
            early.close()

    def start_loads(self, plan: StepPlan) -> None:
        """Start the plan's loads, once. vLLM waits for each of them, so each will end, if only as failed."""
        if plan is self._loads_started:
            return
        self._loads_started = plan
        if plan.pool is not None:
            self._attached(plan.pool)  # with the first plan that names the pool, so that the first job need not
        for job in plan.loads:
            task = Task(load=job.request_id)
            if job.follow and self._follower is not None and self._follower.ready:
                task.stage_ends = self._follower.stage_ends
            self._start(task, job.blocks, plan.pool, doomed=job.doomed)
        if self._copies is not None and plan.runs_model:
            self._copies.set_stepping(True)

    def start_step(self, plan: StepPlan) -> None:
        """A step begins, before anything of it is queued on the device."""
        if self._copies is not None and plan.runs_model:
            self._copies.set_stepping(True)
        follower = self._follower
        if plan.unasked and follower is not None:
            self._follow(lambda: follower.everything(self._staged()))

    @property
    def listens(self) -> bool:
        """Whether ``layer_needed`` has to be called; it costs less not to."""
        return self._follower is not None and self._follower.listens

    def layer_needed(self, name: str) -> None:
        """An attention layer is about to run: it has to stay behind the loads that vLLM was told to go on with."""
        follower = self._follower
        if follower is not None:
            self._follow(lambda: follower.layer(name, self._staged()))

    def forget_named_layers(self) -> None:
        """What vLLM has named so far does not count."""
        if self._follower is not None:
            self._follower.forget()

    def start_saves(self, plan: StepPlan) -> None:
        """Start the plan's saves, once; the forward pass has filled their blocks."""
        if plan is self._saves_started:
            return
        self._saves_started = plan
        for job in plan.saves:
            self._start(Task(save=job.job_id), job.blocks, plan.pool)

    def poll(self, settle: bool = False) -> tuple[set[str], set[str]]:
        """``(ended, failed)`` loads since the last call, the failed ones in both. ``settle``: wait for saves.

        Raises ``MustStop`` if a load failed after vLLM was told to go on: vLLM can recompute what waits for its blocks,
        but not what runs on them. What it has sampled stays said, and of several steps under way it takes back one.
        """
        copies = self._copies
        if copies is not None:
            copies.set_stepping(False)
            self._guard.run("starting loads", None, lambda: copies.retry(self._layouts))
            if settle:
                copies.settle(SETTLE_SECONDS_MAX)
            self._queued |= self._take_queued(copies)
            self._ended += copies.poll()
            self._problem = self._problem or copies.problem()
        # Kept until here: should a call above fail, vLLM hears of them the next time.
        received, self._queued = self._queued, set()
        failed: set[str] = set()
        ended, self._ended = self._ended, []
        self._ended_since_rest |= bool(ended)
        for task in ended:
            if task.save is not None:
                self._report.saves[task.save] = SaveOutcome(1, frozenset(task.failed_refs), task.seconds)
            elif task.load is not None:
                # What merely could not be started says nothing against the slots.
                self._report.loads[task.load] = LoadOutcome(task.ok, frozenset(task.bad_refs), task.seconds)
                if task.followed is None:
                    received.add(task.load)
                elif not task.ok and task.load not in received:
                    raise MustStop(LOST_LOAD)
                elif self._follower is not None:
                    self._follower.close(task.followed)
                if not task.ok:
                    failed.add(task.load)
                    self._invalid_blocks |= task.failed_blocks if self._by_block else set()
        return received, failed

    def take_invalid_blocks(self) -> set[int]:
        """Ids of blocks that could not be loaded since the last call."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def came_to_rest(self) -> bool:
        """Whether jobs have ended since this was true the last time, and none is left."""
        ended = self._ended_since_rest
        at_rest = ended and (self._copies is None or self._copies.idle)
        self._ended_since_rest = ended and not at_rest
        return at_rest

    def progress(self) -> dict[str, int] | None:
        """How far page-locking has come, where there is any."""
        return self._copies.progress() if self._copies is not None else None

    def take_report(self) -> RankReport | None:
        """What ended since the last call, or ``None``."""
        if not self._shape_told:
            self._report.shapes[self._rank] = self.tell_shape()
        if self._problem and not self._problem_reported:
            self._report.problem, self._problem_reported = self._problem, True
        if not self._report:
            return None
        report, self._report = self._report, RankReport()
        return report

    def _take_queued(self, copies: Copies) -> set[str]:
        queued = set()
        for task in copies.take_queued():
            if self._follower is not None and task.followed is not None and task.load is not None:
                self._follower.open(task.followed)
                queued.add(task.load)
        return queued

    def _staged(self) -> StagedCopier | None:
        return self._copies.staged if self._copies is not None else None

    def _follow(self, wait: Callable[[], None]) -> None:
        """Let the device wait. If it does not take that, the caller waits: what follows needs the bytes."""
        try:
            wait()
        except Exception as error:
            self._guard.note("following a load", error)
            if self._copies is not None and not self._copies.drain(DRAIN_SECONDS_MAX):
                raise MustStop(LOST_LOAD) from error

    def _start(
        self, task: Task, blocks: tuple[GroupBlocks, ...], address: PoolAddress | None, doomed: bool = False
    ) -> None:
        copies = None if doomed else self._attached(address)
        if copies is None:
            for _, refs, block_ids in blocks:
                task.fail(refs, block_ids)
            self._ended.append(task)
            return
        self._guard.run("starting a copy", None, lambda: copies.start(task, blocks, self._layouts))

    def _attached(self, address: PoolAddress | None) -> Copies | None:
        """This rank's copies, opened at the first job; ``None`` if it can copy nothing, or not now. Never raises."""
        if self._problem is not None:
            return None
        try:
            if self._copies is not None:
                if address is not None:
                    self._copies.follow(address)
            elif address is None or self._rank not in address.parts:
                raise PegaFlowError("the job came without the pool's address.")
            else:
                early, self._early = self._early, None
                groups = list(self._group_layouts)
                self._copies = Copies.open(self._native, address, self._rank, groups, self._device, early)
        except PoolBusy as error:
            self._guard.note("attaching to the pool", error)  # the next job tries again
        except Exception as error:
            self._problem = f"a worker cannot use the pool: {error}"
            logger.error("PegaFlow: %s", self._problem, exc_info=None if isinstance(error, PegaFlowError) else error)
        return self._copies if self._problem is None else None
