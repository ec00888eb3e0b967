"""The real copier, made slow, unreliable and exact: copies end when the storm says so, never by chance.

What a load will write is made unreadable as soon as it was asked for, as a device might leave it half-way.
"""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pegaflow import _native
from pegaflow.errors import PoolBusy
from tests.storm.plan import Trouble
from tests.storm.texts import chance

LATE = 1 / 2
"""How much rarer loads fail that vLLM was told to go on with: each ends an engine."""

POISON = 0xDD
DAMAGE = b"\x5astorm\x5a"


@dataclass(frozen=True)
class Layout:
    """The engine's layout, and the regions that it was made of: address, bytes from block to block, bytes."""

    regions: tuple[tuple[int, int, int], ...]
    blocks: int
    native: Any

    @classmethod
    def of(cls, regions: Sequence[tuple[int, int, int]], blocks: int) -> "Layout":
        """As ``KVLayout``."""
        return cls(tuple(regions), blocks, _native.KVLayout(regions, blocks))

    def poison(self, block: int) -> None:
        """Let a block hold what no text has."""
        for address, stride, length in self.regions:
            ctypes.memset(address + block * stride, POISON, length)


@dataclass
class Done:
    """As ``CopyDone``."""

    job: int
    ok: bool
    failed: list[int]
    bytes: int = 0
    seconds: float = 0.001


@dataclass
class Job:
    """One copy that was asked for."""

    kind: str
    part: int
    layout: Layout
    refs: list[int]
    blocks: list[int]
    due: int
    stage_ends: tuple[int, ...] = ()
    told: bool = False
    """Whether the caller goes on with it before it is over."""
    landed: bytes = b""
    """What a load in stages has read, by block."""
    there: int = 0
    """Bytes of each block that have been written."""
    result: Done | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it is known to have failed, as a device that is lost tells of all its copies at once."""
        return self.result is not None and not self.result.ok


@dataclass
class Tally:
    """What happened to copies."""

    loads: int = 0
    saves: int = 0
    blocks_loaded: int = 0
    blocks_saved: int = 0
    loads_failed: int = 0
    failed_late: int = 0
    """Of those, how many after vLLM was told to go on."""
    saves_failed: int = 0
    refused: int = 0
    followed: int = 0
    damaged: int = 0


@dataclass
class StormCopier:
    """One rank's copies. ``seed``: what becomes of each of them."""

    pool: Any
    seed: tuple[object, ...]
    trouble: Trouble
    tally: Tally
    failed_late: set[int] = field(default_factory=set)
    """Blocks that vLLM went on with and that could not be loaded after all: the engine has to end before it says
    anything that it has computed from them."""
    jobs: dict[int, Job] = field(default_factory=dict)
    polls: int = 0
    ids: int = 0

    def __post_init__(self) -> None:
        self.host = _native.HostCopier(self.pool, threads=1)

    def save(self, part: int, layout: Layout, refs: Sequence[int], block_ids: Sequence[int]) -> int:
        """As the engine's."""
        return self._take("save", part, layout, refs, block_ids)

    def load(
        self,
        part: int,
        layout: Layout,
        refs: Sequence[int],
        block_ids: Sequence[int],
        stage_ends: Sequence[int] = (),
    ) -> int:
        """As the engine's."""
        job = self._take("load", part, layout, refs, block_ids)
        for block in block_ids:
            layout.poison(block)
        self.jobs[job].stage_ends = tuple(stage_ends)
        return job

    def poll(self) -> list[Done]:
        """What is over by now."""
        self.polls += 1
        return [self._end(number) for number, job in list(self.jobs.items()) if job.due <= self.polls or job.has_failed]

    def wait(self, timeout_ms: int) -> list[Done]:
        """Everything."""
        return [self._end(job) for job in list(self.jobs)]

    def in_flight(self) -> int:
        """Copies that are not over."""
        return len(self.jobs)

    def close(self) -> None:
        """Finish and stop."""
        self.wait(0)
        self.host.close()
        del self.host  # as long as it is there, so is this process in the pool

    # -- loads that are followed --------------------------------------------------------------------------------------

    def take_queued(self) -> list[int]:
        """Loads in stages that the device knows of, but has not ended."""
        queued = [
            number
            for number, job in self.jobs.items()
            if job.stage_ends and not job.told and chance(*self.seed, "queued", number, self.polls) < 0.7
        ]
        for number in queued:
            self.jobs[number].told = True
            self.tally.followed += 1
        return queued

    def wait_stage(self, copy: int, stage: int, stream: int) -> None:
        """What comes next on the stream finds the bytes of this stage."""
        job = self.jobs.get(copy)
        if job is not None:
            self._read(job)
            self._land(job, job.stage_ends[stage])

    def stream(self) -> int:
        """There is one."""
        return 7

    # -- inside -------------------------------------------------------------------------------------------------------

    def _take(self, kind: str, part: int, layout: Layout, refs: Sequence[int], block_ids: Sequence[int]) -> int:
        self.ids += 1
        if chance(*self.seed, kind, "busy", self.ids) < self.trouble.busy:
            self.tally.refused += 1
            raise PoolBusy("the storm has no room for a copy now.")
        delay = int(chance(*self.seed, kind, "delay", self.ids) * self.trouble.delay_max)
        self.jobs[self.ids] = Job(kind, part, layout, list(refs), list(block_ids), self.polls + delay)
        return self.ids

    def _end(self, number: int) -> Done:
        job = self.jobs.pop(number)
        if job.kind == "save":
            done = self._copied(self.host.save(job.part, job.layout.native, job.refs, job.blocks))
            self.tally.saves += 1
            self.tally.blocks_saved += len(job.refs)
            if done.ok and chance(*self.seed, "save fails", number) < self.trouble.save_fails:
                done = Done(number, False, self._some(number, len(job.refs)))
                self.tally.saves_failed += 1
        else:
            done = self._read(job, number)
            if job.stage_ends:
                self._land(job, len(job.landed) // max(1, len(job.blocks)))
        return Done(number, done.ok, done.failed)

    def _read(self, job: Job, number: int = 0) -> Done:
        """Load all of a job, if that has not been done: into its blocks, or beside them if they fill up in stages."""
        if job.result is not None:
            return job.result
        number = number or next(known for known, other in self.jobs.items() if other is job)
        if not job.told:
            self._damage(job, number)
        target, blocks = job.layout, job.blocks
        if job.stage_ends:
            size = sum(length for _, _, length in job.layout.regions)
            beside = (ctypes.c_ubyte * (size * (len(blocks) + 1)))()
            target = Layout.of([(ctypes.addressof(beside), size, size)], len(blocks) + 1)
            blocks = list(range(1, len(job.blocks) + 1))
        done = self._copied(self.host.load(job.part, target.native, job.refs, blocks))
        if done.ok and chance(*self.seed, "load fails", number) < self.trouble.load_fails * (LATE if job.told else 1):
            done = Done(number, False, self._some(number, len(job.refs)))
            for index in done.failed or range(len(blocks)):
                target.poison(blocks[index])
        if job.stage_ends:
            job.landed = bytes(beside)[size:]
        if not done.ok and job.told:
            self.tally.failed_late += 1
            self.failed_late.update(job.blocks[index] for index in done.failed or range(len(job.blocks)))
        self.tally.loads += 1
        self.tally.blocks_loaded += len(job.refs)
        self.tally.loads_failed += not done.ok
        job.result = done
        return done

    def _land(self, job: Job, end: int) -> None:
        """Write each block's bytes up to ``end`` to where they belong."""
        size = len(job.landed) // max(1, len(job.blocks))
        for index, block in enumerate(job.blocks):
            place = 0
            for address, stride, length in job.layout.regions:
                first, last = max(place, job.there), min(place + length, end)
                if first < last:
                    piece = job.landed[index * size + first : index * size + last]
                    ctypes.memmove(address + block * stride + first - place, piece, len(piece))
                place += length
        job.there = max(job.there, end)

    def _damage(self, job: Job, number: int) -> None:
        if chance(*self.seed, "damage", number) >= self.trouble.damage:
            return
        ref = job.refs[int(chance(*self.seed, "which", number) * len(job.refs))]
        place = self.pool.locate(ref, job.part)
        if place is not None:
            file, offset, _ = place
            segment = os.open(file, os.O_RDWR)
            os.pwrite(segment, DAMAGE, offset)
            os.close(segment)
            self.tally.damaged += 1

    def _copied(self, job: int) -> Done:
        while True:
            for done in self.host.wait(1000):
                assert done.job == job
                return Done(job, done.ok, list(done.failed))

    def _some(self, number: int, count: int) -> list[int]:
        """Indices of what failed; none: it is not known what."""
        if chance(*self.seed, "unknown", number) < 0.2:
            return []
        return [index for index in range(count) if chance(*self.seed, "bad", number, index) < 0.4] or [count - 1]
