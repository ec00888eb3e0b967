"""Copies of one rank: jobs of the plan become copies of the engine, and finished copies become ended jobs.

A job has one copy per KV cache group and ends with its last copy. A load always ends, if only as failed, since vLLM
waits for it; and never before its last copy has ended, since vLLM then reuses the blocks.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from pegaflow.connector.metadata import GroupBlocks, PoolAddress, Rank
from pegaflow.errors import InvalidArgument, PoolBusy

if TYPE_CHECKING:
    from pegaflow._native import CopyDone, KVLayout, Pool
    from pegaflow.connector.device import DeviceCopier
    from pegaflow.connector.early import EarlyStart

WAIT_MS = 50


class Copier(Protocol):
    """What copies on this rank: ``_native.HostCopier``, or ``DeviceCopier`` for caches on a device."""

    def save(self, part: int, layout: "KVLayout", refs: Sequence[int], block_ids: Sequence[int]) -> int:
        """Start copying blocks into reserved slots. Returns a job id."""
        ...

    def load(self, part: int, layout: "KVLayout", refs: Sequence[int], block_ids: Sequence[int]) -> int:
        """Start copying leased slots into blocks. Returns a job id."""
        ...

    def poll(self) -> "list[CopyDone]":
        """Jobs that completed since the last call."""
        ...

    def wait(self, timeout_ms: int) -> "list[CopyDone]":
        """Like ``poll``, but waits a while for one."""
        ...

    def in_flight(self) -> int:
        """Jobs that are not completed."""
        ...

    def close(self) -> None:
        """Finish and stop."""
        ...


@dataclass(frozen=True)
class NativeTypes:
    """The engine's constructors that a worker uses."""

    open_pool: "Callable[[str, str], Pool]"
    """Attach to an existing pool: name, directory."""
    copier: "Callable[[Pool, str], Copier]"
    """For the device that the caches are on: ``"cpu"`` or ``"cuda:0"``."""
    layout: "Callable[[Sequence[tuple[int, int, int]], int], KVLayout]"
    create_pool: "Callable[[], Pool] | None" = None
    """Attach to the configured pool before its address is known, and create it if it is not there."""


@dataclass(eq=False)
class Task:
    """One job on this rank."""

    load: str | None = None
    """Request id of a load."""
    save: int | None = None
    """Job id of a save."""
    started: float = field(default_factory=time.monotonic)
    copies: int = 0
    """Copies in flight."""
    waiting: list[GroupBlocks] = field(default_factory=list)
    """Copies that the copier had no room for yet."""
    failed_refs: set[int] = field(default_factory=set)
    bad_refs: set[int] = field(default_factory=set)
    """Failed refs whose slots the copy itself found to be unusable."""
    failed_blocks: set[int] = field(default_factory=set)
    ok: bool = True
    copied_after: float = 0.0
    """Seconds that the slowest copy took, once it is over."""
    stage_ends: tuple[int, ...] = ()
    """Of a load that vLLM may go on with before it is over."""
    followed: int | None = None
    """The copy of such a load once vLLM was told to go on."""

    def fail(self, refs: Sequence[int], block_ids: Sequence[int]) -> None:
        """Book blocks that were not copied."""
        self.ok = False
        self.failed_refs.update(refs)
        self.failed_blocks.update(block_ids)

    @property
    def seconds(self) -> float:
        """Time from the start of the job to the end of its last copy."""
        return self.copied_after or time.monotonic() - self.started


class Copies:
    """The copier of this rank and all jobs that use it."""

    def __init__(self, pool: "Pool", copier: Copier, address: PoolAddress, rank: Rank, groups: Sequence[int]) -> None:
        """``groups``: vLLM's numbers of the KV cache groups, in the order of ``address.parts``."""
        self._pool = pool
        self._copier = copier
        self.staged = cast("DeviceCopier", copier) if hasattr(copier, "wait_stage") else None
        """The same copier, if its loads can be followed."""
        self._parts = dict(zip(groups, address.parts[rank], strict=True))
        self._saves = rank in address.savers
        self._registered: set[tuple[int, bytes, tuple[int, ...]]] = set()
        self._in_flight: dict[int, tuple[Task, GroupBlocks]] = {}
        self._backlog: list[Task] = []
        self._ended: list[Task] = []
        self._open_saves = 0
        self._stepping = False

    @classmethod
    def open(
        cls,
        native: NativeTypes,
        address: PoolAddress,
        rank: Rank,
        groups: Sequence[int],
        device: str,
        early: "EarlyStart | None" = None,
    ) -> "Copies":
        """Attach to the pool and join the scheduler's process, so that what it reserves outlives neither alone.
        ``early``: has made pool and copier, if it could."""
        made = early.take(address.name, address.shm_dir) if early is not None else None
        pool, copier = made or (native.open_pool(address.name, address.shm_dir), None)
        try:
            if pool.member() != address.leader:
                pool.join(address.leader)
            copier = copier or native.copier(pool, device)
            copies = cls(pool, copier, address, rank, groups)
            copies.follow(address)
        except Exception:
            if copier is not None:
                copier.close()
            pool.close()
            raise
        return copies

    def follow(self, address: PoolAddress) -> None:
        """Tell a copier that has to get ready where this rank's blocks will be: at first, and again after a reset."""
        register = getattr(self._copier, "register", None)
        if register is None:
            return
        for named in address.namespaces:
            group, fingerprint, sizes = named
            part = self._parts.get(group)
            if part is not None and named not in self._registered:
                register(self._pool.namespace(fingerprint, group, sizes), part)
                self._registered.add(named)
        forget = getattr(self._copier, "forget_expected", None)
        if forget is not None:
            forget()

    def set_stepping(self, stepping: bool) -> None:
        """Tell a copier that has to get ready whether a step of the model is going on."""
        tell = getattr(self._copier, "set_stepping", None)
        if tell is not None and stepping != self._stepping:
            self._stepping = stepping
            tell(stepping)

    def progress(self) -> dict[str, int] | None:
        """How far a copier that has to get ready has come (see ``DeviceCopier.progress``); ``None`` for others."""
        ask = getattr(self._copier, "progress", None)
        return ask() if ask is not None else None

    @property
    def idle(self) -> bool:
        """Whether there is no job that ``poll`` has not told of yet."""
        return not (self._in_flight or self._backlog or self._ended)

    def problem(self) -> str | None:
        """Why nothing can be copied any more, if so."""
        ask = getattr(self._copier, "problem", None)
        return ask() if ask is not None else None

    def start(self, task: Task, blocks: Sequence[GroupBlocks], layouts: "dict[int, KVLayout]") -> None:
        """Start all copies of a job. Parts that other ranks hold, or save for this one, need none.

        The job ends whatever happens, if only as failed; errors of a kind that nobody expects are raised besides.
        """
        self._open_saves += task.save is not None
        mine = [item for item in blocks if self._parts.get(item[0], 0) is not None]
        task.waiting.extend(mine if self._saves or task.load is not None else ())
        self._advance(task, layouts)

    def retry(self, layouts: "dict[int, KVLayout]") -> None:
        """Try again what the copier had no room for."""
        backlog, self._backlog = self._backlog, []
        for position, task in enumerate(backlog):
            try:
                self._advance(task, layouts)
            except Exception:
                self._backlog += backlog[position + 1 :]
                raise

    def poll(self) -> list[Task]:
        """Jobs that ended since the last call. Never waits."""
        for done in self._copier.poll():
            self._book(done)
        return self._take_ended()

    def take_queued(self) -> list[Task]:
        """Loads of which all was handed to the device since the last call, and which did not end yet."""
        if self.staged is None:
            return []
        queued = []
        for copy in self.staged.take_queued():
            task, _ = self._in_flight[copy]
            if task.copies == 1 and not task.waiting and task.ok:
                task.followed = copy
                queued.append(task)
        return queued

    def _take_ended(self) -> list[Task]:
        ended, self._ended = self._ended, []
        return ended

    def settle(self, seconds_max: float) -> None:
        """Wait until all saves have ended, but no longer than ``seconds_max``."""
        deadline = time.monotonic() + seconds_max
        while self._open_saves and self._copier.in_flight() and time.monotonic() < deadline:
            for done in self._copier.wait(WAIT_MS):
                self._book(done)

    def drain(self, seconds_max: float) -> bool:
        """Wait until no copy is in flight. False if some still are after ``seconds_max``."""
        deadline = time.monotonic() + seconds_max
        while self._copier.in_flight() and time.monotonic() < deadline:
            for done in self._copier.wait(WAIT_MS):
                self._book(done)
        return not self._copier.in_flight()

    def close(self) -> None:
        """Finish what is queued and leave the pool."""
        self._copier.close()
        self._pool.close()

    def _advance(self, task: Task, layouts: "dict[int, KVLayout]") -> None:
        """Start what a job still waits for; one that has nothing left in flight has ended."""
        while task.waiting:
            group, refs, block_ids = task.waiting[0]
            part = self._parts.get(group)
            try:
                if part is None or group not in layouts:
                    raise InvalidArgument(f"KV cache group {group} is not mapped on this rank.")
                copy = self._submit(task, part, layouts[group], refs, block_ids)
            except PoolBusy:
                if task.load is not None:
                    self._backlog.append(task)
                    return
                task.fail(refs, block_ids)  # a save is not worth keeping blocks pinned for
            except Exception:
                for _, later_refs, later_ids in task.waiting:
                    task.fail(later_refs, later_ids)
                task.waiting.clear()
                self._end_if_idle(task)
                raise
            else:
                task.copies += 1
                self._in_flight[copy] = (task, task.waiting[0])
            task.waiting.pop(0)
        self._end_if_idle(task)

    def _submit(self, task: Task, part: int, layout: "KVLayout", refs: Sequence[int], block_ids: Sequence[int]) -> int:
        if task.load is None:
            return self._copier.save(part, layout, refs, block_ids)
        if task.stage_ends and self.staged is not None and len(task.waiting) == 1:
            return self.staged.load(part, layout, refs, block_ids, task.stage_ends)
        return self._copier.load(part, layout, refs, block_ids)

    def _book(self, done: "CopyDone") -> None:
        task, (_, refs, block_ids) = self._in_flight.pop(done.job)
        task.copies -= 1
        task.copied_after = max(task.copied_after, done.seconds)
        if not done.ok:
            failed = done.failed or range(len(refs))
            task.fail([refs[index] for index in failed], [block_ids[index] for index in failed])
            task.bad_refs.update(refs[index] for index in done.failed)
        if not task.waiting:
            self._end_if_idle(task)

    def _end_if_idle(self, task: Task) -> None:
        if task.copies == 0:
            self._open_saves -= task.save is not None
            self._ended.append(task)
