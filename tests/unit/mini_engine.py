"""A scheduler and its workers in one small loop: drives the connector's halves the way vLLM does, without a model.

"Computing" a block writes bytes that follow from its key, group and rank, so every load can be checked to the byte.
Caches are in host memory, or wherever ``memory`` puts them.
"""

import ctypes
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from pegaflow.config import ConnectorConfig
from pegaflow.connector.copies import NativeTypes
from pegaflow.connector.geometry import Geometry, Group, GroupKind
from pegaflow.connector.guard import Guard
from pegaflow.connector.layout import LayerTensor, group_layout
from pegaflow.connector.metadata import RankReport, StepPlan
from pegaflow.connector.namespaces import Store
from pegaflow.connector.scheduler import SchedulerHalf
from pegaflow.connector.shard_pool import ShardPool
from pegaflow.connector.shard_worker import Shard, ShardWorkerHalf
from pegaflow.connector.worker import WorkerHalf
from pegaflow.metrics import Recorder
from tests.fakes import FakeBlockPool, FakeCopier, FakeIdentity, FakeLayout, FakePool
from tests.patience import await_

HASH_TOKENS = 4
PART_BYTES = 48
PATIENT: dict[str, Any] = {
    "prefetch_wait_ms_max": 600_000,
    "wait_for_full_prefix_seconds": 600.0,
    "load_timeout_seconds": 3600.0,
}
"""Limits that no test reaches by itself, whatever keeps the machine busy."""


def full_group(index: int = 0, block_tokens: int = 4) -> Group:
    """Full attention."""
    return Group(index, GroupKind.FULL, block_tokens, block_tokens // HASH_TOKENS, 0, "FullAttentionSpec")


def window_group(index: int, window_blocks: int = 2, block_tokens: int = 4) -> Group:
    """Sliding window."""
    hashes = block_tokens // HASH_TOKENS
    return Group(index, GroupKind.WINDOW, block_tokens, hashes, window_blocks, "SlidingWindowSpec")


def chunk_group(index: int, chunk_tokens: int = 16, block_tokens: int = 4) -> Group:
    """Chunked local attention."""
    hashes = block_tokens // HASH_TOKENS
    return Group(index, GroupKind.CHUNK, block_tokens, hashes, 0, "ChunkedLocalAttentionSpec", chunk_tokens)


def state_group(index: int, block_tokens: int = 8) -> Group:
    """Recurrent layers."""
    return Group(index, GroupKind.STATE, block_tokens, block_tokens // HASH_TOKENS, 0, "MambaSpec")


SINGLE = Geometry((full_group(),), whole_prompt=True)
HYBRID = Geometry((full_group(0), window_group(1), window_group(2, 1, 8)))
CHUNKED = Geometry((chunk_group(0), full_group(1)))
RECURRENT = Geometry((full_group(0, 8), state_group(1), state_group(2)))
DRAFTED = Geometry((replace(full_group(), drafts=True),))
DRAFTED_RECURRENT = Geometry((replace(full_group(0, 8), drafts=True), state_group(1)))
EVERY_KIND = {
    "single": SINGLE,
    "hybrid": HYBRID,
    "chunked": CHUNKED,
    "recurrent": RECURRENT,
    "drafted": DRAFTED,
    "drafted recurrent": DRAFTED_RECURRENT,
}


@dataclass(eq=False)
class MiniRequest:
    """What the connector reads of a vLLM request."""

    request_id: str
    tokens: list[int]
    target_tokens: int
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    lora_request: Any = None
    resumable: bool = False
    tables: list[list[int]] = field(default_factory=list)
    state: str = "waiting"
    hit_tokens: int = 0

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.append()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_tokens

    def append(self, *tokens: int) -> None:
        """Add confirmed tokens; hashes follow."""
        self.tokens.extend(tokens)
        while (len(self.block_hashes) + 1) * HASH_TOKENS <= len(self.tokens):
            start = len(self.block_hashes) * HASH_TOKENS
            parent = self.block_hashes[-1] if self.block_hashes else None
            self.block_hashes.append(hash_tokens(self, start, start + HASH_TOKENS, parent))


def hash_tokens(request: MiniRequest, start: int, stop: int, parent: bytes | None) -> bytes:
    """As vLLM's hash of a block."""
    return hashlib.sha256((parent or b"root") + repr(request.tokens[start:stop]).encode()).digest()


class HostMemory:
    """The cache of one group on one rank."""

    device = "cpu"
    part_bytes = PART_BYTES
    """Bytes of a block."""

    def __init__(self, size: int) -> None:
        self._buffer = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self._buffer)

    def write(self, offset: int, data: bytes) -> None:
        """Bytes from ``offset`` on."""
        ctypes.memmove(self.address + offset, data, len(data))

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from ``offset`` on."""
        return ctypes.string_at(self.address + offset, size)


class MiniEngine:
    """One engine on a pool that others may share."""

    pool_paths: Sequence[str] = ()
    """Of real pools, where each host has one."""

    def __init__(
        self,
        geometry: Geometry = SINGLE,
        pool: Any = None,
        *,
        ranks: int = 1,
        replicas: int = 1,
        stages: int = 1,
        blocks: int = 64,
        native: NativeTypes | None = None,
        memory: Any = HostMemory,
        layers: int = 1,
        wiped_by_first_pass: bool = False,
        wrapped: bool = False,
        settle: bool = False,
        event_maker: Any = None,
        peers: Any = None,
        hosts: Sequence[tuple[NativeTypes, str]] = (),
        **options: Any,
    ) -> None:
        """``replicas``: consecutive ranks of a stage that hold the same bytes. ``stages``: of a pipeline; with several
        groups each stage holds its share of them. ``native``: the engine's own types, with ``pool`` one of its pools;
        by default all of it is faked. ``memory``: where caches are, see ``HostMemory``. ``layers``: of each group; a
        model of several names each before it reads its bytes. ``wrapped``: nobody asks the workers for their shapes,
        as if other connectors had answered first. ``settle``: nobody steps the engine once it is idle.
        ``event_maker``: who makes KV events of what is stored. ``peers``: connections to other hosts.
        ``hosts``: that the ranks are divided over, each with a pool of its own and with what identifies its weights."""
        self._memory_type = memory
        self.geometry, self.ranks, self.blocks = geometry, ranks, blocks
        self.replicas, self.stages, self.hosts = replicas, stages, hosts
        self.pool = ShardPool() if hosts else pool or FakePool()
        self.block_pool = FakeBlockPool(blocks)
        self.recorder = Recorder()
        self.identity = FakeIdentity()
        self.by_block = len(geometry.groups) == 1 and geometry.groups[0].kind is GroupKind.FULL
        self.chunk_tokens = 12
        self.layers, self.unasked = layers, False
        """Whether steps read blocks without naming layers, as in a graph of the whole model."""
        self.before_workers: Callable[[], None] = lambda: None
        """Called in each step when it is planned but no worker has heard of it."""
        config = ConnectorConfig(**(PATIENT | options))
        link: Any = SimpleNamespace(client=peers, server=None, close=lambda: None) if peers is not None else None
        layout: Any = FakeLayout
        self._native = native or NativeTypes(lambda name, shm_dir: self.pool, self._fake_copier, layout)
        self.store = Store(self.pool, geometry, self.identity, ranks, replicas, shards=max(1, len(hosts)))
        self.scheduler = SchedulerHalf(
            config,
            geometry,
            self.store,
            self.recorder,
            ranks=ranks,
            settle=settle,
            bypasses=lambda request: request.resumable,
            names_layers=layers > 1,
            wiped_by_first_pass=wiped_by_first_pass,
            hash_tokens=hash_tokens,
            event_maker=event_maker,
            link=link,
        )
        self.scheduler.bind_block_pool(self.block_pool)
        self.copiers: list[FakeCopier] = []
        self.memory: list[list[Any]] = []
        self.workers = [self._make_worker(rank) for rank in range(ranks)]
        if not wrapped:
            shapes = [worker.tell_shape() for worker in self.workers]
            self.store.set_shapes({shape.rank: shape for shape in shapes})
        self.requests: dict[str, MiniRequest] = {}
        self.plans: list[StepPlan] = []
        self.received: dict[str, int] = {}
        self._ids = itertools.count()

    def _fake_copier(self, pool: Any, device: str) -> Any:
        self.copiers.append(FakeCopier(pool))
        return self.copiers[-1]

    def _make_worker(self, rank: int) -> WorkerHalf:
        guard = Guard(self.recorder, lambda reason: None)
        place = divmod(rank, self.ranks // self.stages)
        if self.hosts:
            number = rank // (self.ranks // len(self.hosts))
            native, weights = self.hosts[number]
            shard = Shard(number, len(self.hosts), lambda: [[weights]], "mini")
            name = f"host {number}"
            worker: WorkerHalf = ShardWorkerHalf(place, name, native, guard, by_block=self.by_block, shard=shard)
        else:
            worker = WorkerHalf(place, "host", self._native, guard, by_block=self.by_block)
        layouts = {}
        caches = []
        part_bytes = self._memory_type.part_bytes
        for group in self.geometry.groups:
            cache = self._memory_type(self.blocks * part_bytes)
            caches.append(cache)
            size = part_bytes // self.layers
            tensors = [
                LayerTensor(
                    f"group{group.index}.layer{layer}",
                    cache.address + layer * self.blocks * size,
                    (self.blocks, size),
                    (size, 1),
                    1,
                    "int8",
                )
                for layer in range(self.layers)
                if self.holds(rank, group)
            ]
            layouts[group.index] = group_layout(tensors, self.blocks)
        self.memory.append(caches)
        worker.register(layouts, self.blocks, caches, self._memory_type.device)
        return worker

    def holds(self, rank: int, group: Group) -> bool:
        """Whether a rank holds layers of a group."""
        stage = rank // (self.ranks // self.stages)
        return len(self.geometry.groups) == 1 or group.index % self.stages == stage

    # -- what a user does -------------------------------------------------------------------------------------------

    def add(self, tokens: list[int], more: int = 1, **fields: Any) -> MiniRequest:
        """A request with a prompt that generates ``more`` tokens."""
        request = MiniRequest(f"request-{next(self._ids)}", list(tokens), len(tokens) + more, **fields)
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, request: MiniRequest) -> None:
        """The client went away."""
        self._finish(request)

    def preempt(self, request: MiniRequest) -> None:
        """vLLM needs the blocks of a running request."""
        assert request.state == "running"
        self._free(request)
        request.state, request.num_computed_tokens, request.hit_tokens = "waiting", 0, 0

    def run(self, steps_max: int = 200) -> None:
        """Step until nothing is left to do."""
        for _ in range(steps_max):
            if not self.requests and not self.scheduler.has_pending_saves():
                return
            self.step()
        raise AssertionError("the engine never came to rest")

    # -- one step of vLLM -------------------------------------------------------------------------------------------

    def step(self) -> StepPlan:
        """Schedule, run the workers, take their results."""
        scheduled = self._schedule()
        running = [request for request in self.requests.values() if request.state == "running"]
        if running and not scheduled and not self.scheduler.has_pending_saves():
            self.preempt(running[-1])  # out of blocks, and nobody is about to give some back
        step = [(r, min(r.num_computed_tokens + n, r.num_tokens)) for r, n in scheduled.items()]
        states = [(self.scheduler.table.get(r.request_id), r.tables, after) for r, after in step]
        plan = self.scheduler.plan(
            lambda: [
                (self._with_snapshots(state, tables, after), lambda _, tables=tables: list(tables), after)
                for state, tables, after in states
                if state and not state.left_alone
            ],
            sum(scheduled.values()),
            lambda landing: self.unasked or bool({r.request_id for r in scheduled} - set(landing)),
        )
        self.plans.append(plan)
        for request, count in scheduled.items():
            request.num_computed_tokens += count
        self.before_workers()
        self._wait_for_adapters()
        self._run_workers(plan, scheduled)
        for request in scheduled:
            if request.num_computed_tokens == request.num_tokens:
                request.append(1000 + request.num_tokens)
                if request.num_tokens >= request.target_tokens:
                    self._finish(request)
        return plan

    def _wait_for_adapters(self) -> None:
        """A forward pass takes longer than a look at some files."""
        adapters = self.scheduler._adapters._known.values()
        await_(lambda: not any(one.queued for one in adapters))

    def _schedule(self) -> dict[MiniRequest, int]:
        scheduled = {}
        for request in list(self.requests.values()):
            if request.state == "waiting" and not self._admit(request):
                continue
            if request.state != "running":
                continue
            count = self._count(request)
            if self._allocate(request, request.num_computed_tokens + count):
                scheduled[request] = count
        return scheduled

    def _count(self, request: MiniRequest) -> int:
        """Tokens of the next step. Those of a prompt end where a state is to be kept, as in vLLM."""
        start = request.num_computed_tokens
        end = start + min(self.chunk_tokens, request.num_tokens - start)
        whole = max(request.num_prompt_tokens, request.num_tokens - 1)
        for group in self.geometry.groups:
            if group.kind is GroupKind.STATE and start < whole:
                size = group.block_tokens
                drop = size if self.geometry.drafts else 1
                last = (request.num_tokens - drop) // size * size
                end = end // size * size if start < end // size * size and end < whole else end
                end = last if start < last < end else end
        return end - start

    def _with_snapshots(self, state: Any, tables: list[list[int]], after: int) -> Any:
        """``state`` with what vLLM would hand out of the states that this step makes."""
        state.snapshots = [
            (group.index, table[after // group.block_tokens - 1], after)
            for group, table in zip(self.geometry.groups, tables, strict=True)
            if group.kind is GroupKind.STATE and after % group.block_tokens == 0
        ]
        return state

    def _admit(self, request: MiniRequest) -> bool:
        if request.num_computed_tokens == 0:
            external, is_async = self.scheduler.match(request, 0, False)
            if external is None:
                return False
            assert is_async == (external > 0)
            if not self._allocate(request, external or self.chunk_tokens, external):
                return False
            self.scheduler.allocated(request, request.tables if external else (), external)
            if external:
                request.state, request.num_computed_tokens, request.hit_tokens = "loading", external, external
                return False
        request.state = "running"
        return True

    def _allocate(self, request: MiniRequest, tokens: int, external: int = 0) -> bool:
        tokens = min(tokens, request.num_tokens)
        tables = [list(table) for table in request.tables] or [[] for _ in self.geometry.groups]
        taken = []
        for group, table in zip(self.geometry.groups, tables, strict=True):
            while len(table) < -(-tokens // group.block_tokens):
                outside = len(table) < group.first_needed(external // group.block_tokens)
                if group.kind is GroupKind.STATE:
                    outside = len(table) < -(-tokens // group.block_tokens) - 1
                block = 0 if outside else self.block_pool.allocate()
                if block is None:
                    self.block_pool.free_blocks([self.block_pool.blocks[b] for b in taken])
                    return False
                table.append(block)
                taken += [block] if block else []
        request.tables = tables
        return True

    def _run_workers(self, plan: StepPlan, scheduled: dict[MiniRequest, int]) -> None:
        report: RankReport | None = None
        ended: set[str] = set()
        failed: set[str] = set()
        invalid: set[int] = set()
        for rank, worker in enumerate(self.workers):
            worker.start_step(plan)
            worker.start_loads(plan)
            self._forward(rank, worker, scheduled)
            worker.start_saves(plan)
            received, broken = worker.poll(plan.settle)
            for request_id in received:
                self.received[request_id] = self.received.get(request_id, 0) + 1
                if self.received[request_id] == self.ranks:
                    ended.add(request_id)
            failed |= broken
            invalid |= worker.take_invalid_blocks()
            own = worker.take_report()
            report = own if report is None else report.aggregate(own) if own else report
        for request in self.requests.values():
            # As vLLM: cut to the first bad block now, go on when the load has ended.
            if request.state == "loading" and invalid and any(block in invalid for block in request.tables[0]):
                first = next(i for i, block in enumerate(request.tables[0]) if block in invalid)
                request.num_computed_tokens = min(
                    request.num_computed_tokens, first * self.geometry.groups[0].block_tokens
                )
                request.hit_tokens = min(request.hit_tokens, request.num_computed_tokens)
            elif request.state == "loading" and request.request_id in failed and not self.by_block:
                request.num_computed_tokens = request.hit_tokens = 0
        self.scheduler.update(report, ended)
        for request_id in ended:
            del self.received[request_id]
            self._loaded(request_id)

    def _loaded(self, request_id: str) -> None:
        request = self.requests[request_id]
        if request.state == "aborted":
            self._free(request)
            del self.requests[request_id]
            return
        if self.layers == 1:
            self.check(request)
        request.state = "running" if request.num_computed_tokens else "waiting"
        if not request.num_computed_tokens:
            self._free(request)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)

    def _finish(self, request: MiniRequest) -> None:
        self.scheduler.finish_request(request, request.tables or [[] for _ in self.geometry.groups], True)
        if request.state == "loading":
            request.state = "aborted"  # vLLM keeps the blocks until the load has ended
            return
        self._free(request)
        del self.requests[request.request_id]

    def _free(self, request: MiniRequest) -> None:
        self.block_pool.free_blocks([self.block_pool.blocks[b] for table in request.tables for b in table])
        request.tables = []

    # -- bytes ------------------------------------------------------------------------------------------------------

    def rows(self, rank: int, group: Group, request: MiniRequest, block: int, tokens: range) -> list[bytes]:
        """What the given tokens of a block hold in each layer: a row each, which follows from all tokens up to it."""
        row_bytes = self._memory_type.part_bytes // self.layers // group.block_tokens
        start = block * group.block_tokens
        before = request.block_hashes[block * group.hashes_per_block - 1] if block else b"root"
        by_layer = [b""] * self.layers
        for token in tokens:
            text = before + repr(request.tokens[start : start + token + 1]).encode()
            text += bytes([rank - rank % self.replicas, group.index])
            digest = hashlib.sha256(text).digest()
            row = (digest * (row_bytes * self.layers // len(digest) + 1))[: row_bytes * self.layers]
            for layer in range(self.layers):
                by_layer[layer] += row[layer * row_bytes :][:row_bytes]
        return by_layer

    def state(self, rank: int, group: Group, request: MiniRequest, tokens: int) -> list[bytes]:
        """The state after so many tokens in each layer."""
        size = self._memory_type.part_bytes // self.layers
        text = repr(request.tokens[:tokens]).encode() + bytes([rank - rank % self.replicas, group.index])
        return [(hashlib.sha256(text + bytes([layer])).digest() * size)[:size] for layer in range(self.layers)]

    def _place(self, group: Group, layer: int, block: int, token: int) -> int:
        """Where in a cache the row of a token is."""
        size = self._memory_type.part_bytes // self.layers
        return int((layer * self.blocks + block) * size + token * (size // group.block_tokens))

    def _compute(self, rank: int, request: MiniRequest) -> None:
        first, last = request.hit_tokens, request.num_computed_tokens
        for position, group in enumerate(self.geometry.groups):
            size = group.block_tokens
            if not self.holds(rank, group):
                continue
            if group.kind is GroupKind.STATE:
                block = request.tables[position][(last - 1) // size]
                for layer, state in enumerate(self.state(rank, group, request, last)):
                    self.memory[rank][position].write(self._place(group, layer, block, 0), state)
                continue
            for index in range(first // size, -(-last // size)):
                block = request.tables[position][index]
                tokens = range(max(0, first - index * size), min(size, last - index * size))
                for layer, rows in enumerate(self.rows(rank, group, request, index, tokens) if block else ()):
                    self.memory[rank][position].write(self._place(group, layer, block, tokens.start), rows)

    def _forward(self, rank: int, worker: WorkerHalf, scheduled: dict[MiniRequest, int]) -> None:
        """Read what was loaded, layer by layer, then compute."""
        for layer in range(self.layers if scheduled and self.layers > 1 else 0):
            if worker.listens and not self.unasked:
                worker.layer_needed(f"group0.layer{layer}")
            for request in scheduled:
                self.check(request, [rank], [layer])
        for request in scheduled:
            self._compute(rank, request)

    def check(
        self, request: MiniRequest, ranks: Iterable[int] | None = None, layers: Iterable[int] | None = None
    ) -> None:
        """What was loaded is what had been computed, to the byte."""
        ranks, layers = ranks or range(self.ranks), list(layers or range(self.layers))
        for rank, (position, group) in itertools.product(ranks, enumerate(self.geometry.groups)):
            size = group.block_tokens
            if not self.holds(rank, group):
                continue
            if group.kind is GroupKind.STATE:
                block = request.tables[position][request.hit_tokens // size - 1] if request.hit_tokens else 0
                states = self.state(rank, group, request, request.hit_tokens) if block else []
                assert block or not request.hit_tokens
                for layer, state in enumerate(states):
                    assert self.memory[rank][position].read(self._place(group, layer, block, 0), len(state)) == state
                continue
            for index in range(-(-request.hit_tokens // size)):
                block = request.tables[position][index]
                tokens = range(min(size, request.hit_tokens - index * size))
                expected = self.rows(rank, group, request, index, tokens) if block else []
                for layer in layers if block else ():
                    place = self._place(group, layer, block, 0)
                    found = self.memory[rank][position].read(place, len(expected[layer]))
                    assert found == expected[layer], (rank, group, index, layer)

    # -- what must be true at rest ------------------------------------------------------------------------------------

    def assert_nothing_held(self) -> None:
        """No lease, no reservation, no pin, no block and no memory of any request is left."""
        if isinstance(self.pool, FakePool):
            assert self.pool.leased() == 0
            assert self.pool.reserved() == []
        for worker in self.workers if self.hosts else ():
            assert isinstance(worker, ShardWorkerHalf)
            assert worker.holds == 0
        assert self.block_pool.used() == 0
        assert len(self.scheduler.table) == 0
        assert not self.scheduler.has_pending_saves()
        assert not self.recorder.counters.get("hook_errors")
