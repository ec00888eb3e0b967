"""Stand-ins for the native engine and for the parts of vLLM that the connector's halves talk to.

The fake engine keeps a pool in this process's memory and follows ``pegaflow/_native.pyi``; copies happen when the test
says so. It counts what the connector holds, so that tests can ask whether anything was forgotten.
"""

import ctypes
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pegaflow.errors import InvalidArgument, PoolBusy, PoolRefused
from tests.fake_ssd import FakePrefetch, FakeSsd


@dataclass
class FakeSlot:
    """One block of the fake pool."""

    namespace: "FakeNamespace"
    key: bytes
    epoch: int
    parent: bytes | None = None
    state: str = "reserved"
    parts: dict[int, bytes] = field(default_factory=dict)


class FakePool:
    """A pool of ``slots_max`` blocks. Blocks without leases are evicted, oldest first."""

    def __init__(self, name: str = "fake", slots_max: int = 1_000) -> None:
        self.name, self.path, self.shm_dir = name, f"/nowhere/{name}", "/nowhere"
        self.pool_bytes, self.segment_bytes, self.slots_max, self.created = 1 << 30, 1 << 20, slots_max, True
        self.slots: dict[int, FakeSlot] = {}
        self.leases: Counter[int] = Counter()
        self.quarantined: list[int] = []
        self.nodes: dict[int, list[int | None]] = {}
        self.joined: list[tuple[int, int]] = []
        self.closed = False
        self.fail_publish: Exception | None = None
        self.tier: FakeSsd | None = None
        self.others = 0
        """Other living processes that use the pool's namespaces."""
        self._namespaces: dict[tuple[bytes, int], FakeNamespace] = {}
        self.epochs: dict[bytes, list[int]] = {}
        """One for all groups of a fingerprint."""
        self._refs = itertools.count(1 << 32)

    def member(self) -> tuple[int, int]:
        return (0, 1)

    def join(self, leader: tuple[int, int]) -> None:
        self.joined.append(leader)

    def namespace(
        self, fingerprint: bytes, group: int, part_bytes: Sequence[int], *, label: str = ""
    ) -> "FakeNamespace":
        if len(fingerprint) != 32 or not all(part_bytes):
            raise InvalidArgument("a fingerprint has 32 bytes and every part some")
        fresh = FakeNamespace(self, group, list(part_bytes), self.epochs.setdefault(fingerprint, [1]))
        known = self._namespaces.setdefault((fingerprint, group), fresh)
        if known.part_bytes != list(part_bytes):
            raise PoolRefused("the namespace exists with other sizes")
        return known

    def release(self, refs: Sequence[int]) -> None:
        for ref in refs:
            if not self.leases[ref]:
                raise InvalidArgument("released more often than leased")
            self.leases[ref] -= 1

    def publish(self, refs: Sequence[int]) -> int:
        if self.fail_publish:
            raise self.fail_publish
        visible = 0
        for ref in refs:
            slot = self.slots.get(ref)
            if slot is None or slot.state != "reserved":
                continue
            space = slot.namespace
            whole = len(slot.parts) == len(space.part_bytes) and slot.epoch == space.epoch
            rooted = slot.parent is None or space.find(slot.parent) is not None
            if whole and rooted and space.find(slot.key) is None:
                slot.state = "sealed"
                visible += 1
            else:
                del self.slots[ref]
        return visible

    def abort(self, refs: Sequence[int]) -> None:
        for ref in refs:
            if ref in self.slots and self.slots[ref].state == "reserved":
                del self.slots[ref]

    def quarantine(self, refs: Sequence[int]) -> None:
        for ref in refs:
            if ref in self.slots and self.slots[ref].state == "reserved":
                self.slots[ref].state = "quarantined"
                self.quarantined.append(ref)

    def grow_ahead(self, namespace: "FakeNamespace") -> None:
        assert namespace.pool is self

    def set_nodes(self, namespace: "FakeNamespace", nodes: Sequence[int | None]) -> None:
        assert len(nodes) == namespace.parts
        self.nodes[namespace.id] = list(nodes)

    def serve_ssd(self, directories: Sequence[str], *, capacity_bytes: int, **options: Any) -> None:
        self.tier = self.tier or FakeSsd()

    def windows(self) -> list[tuple[int, int, int]]:
        return [(300, 40, 10), (3600, 400, 100), (86400, 0, 0)]

    def ssd(self) -> dict[str, Any] | None:
        return self.tier.report() if self.tier else None

    def ssd_read_seconds(self, block_bytes: int) -> float | None:
        return self.tier.read_seconds(block_bytes) if self.tier else None

    def close(self) -> None:
        self.closed = True

    def reserved(self) -> list[int]:
        """Refs of reserved blocks."""
        return [ref for ref, slot in self.slots.items() if slot.state == "reserved"]

    def leased(self) -> int:
        """Leases held."""
        return sum(self.leases.values())

    def take_slot(self, namespace: "FakeNamespace", key: bytes) -> int | None:
        """A free slot, after eviction if need be."""
        if len(self.slots) >= self.slots_max:
            victims = (ref for ref, slot in self.slots.items() if slot.state == "sealed" and not self.leases[ref])
            victim = next(victims, None)
            if victim is None:
                return None
            del self.slots[victim]
        ref = next(self._refs)
        self.slots[ref] = FakeSlot(namespace, key, namespace.epoch)
        return ref


class FakeNamespace:
    """Blocks of one group."""

    def __init__(self, pool: FakePool, group: int, part_bytes: list[int], epochs: list[int]) -> None:
        self.pool, self.id, self.parts, self.part_bytes, self._epochs = pool, group, len(part_bytes), part_bytes, epochs
        self.block_bytes = sum(part_bytes)
        self.prompts: list[tuple[int, ...]] = []
        """``start, ram, ssd, peer, late, stop`` of each that was counted."""
        self.blocks_loaded = 0

    @property
    def epoch(self) -> int:
        """Number of resets and one."""
        return self._epochs[0]

    def find(self, key: bytes) -> int | None:
        """Ref of a visible block."""
        for ref, slot in self.pool.slots.items():
            if slot.namespace is self and slot.key == key and slot.state == "sealed" and slot.epoch == self.epoch:
                return ref
        return None

    def lookup(self, keys: Sequence[bytes], start: int = 0) -> int:
        return sum(1 for _ in itertools.takewhile(lambda key: self.find(key) is not None, keys[start:]))

    def contains(self, keys: Sequence[bytes]) -> bytes:
        return bytes(self.find(key) is not None for key in keys)

    def lease(self, keys: Sequence[bytes], start: int = 0, stop: int | None = None) -> list[int]:
        refs = []
        for key in keys[start:stop]:
            ref = self.find(key)
            if ref is None:
                break
            self.pool.leases[ref] += 1
            refs.append(ref)
        return refs

    def reserve(
        self, keys: Sequence[bytes], *, parents: Sequence[bytes | None] | None = None, evict: bool = True
    ) -> list[tuple[int, int]]:
        assert parents is None or len(parents) == len(keys)
        slots = []
        for index, key in enumerate(keys):
            if self.find(key) is not None:
                continue
            ref = self.pool.take_slot(self, key)
            if ref is None:
                break
            default = keys[index - 1] if index else None
            self.pool.slots[ref].parent = parents[index] if parents is not None else default
            slots.append((index, ref))
        return slots

    def others(self) -> int:
        return self.pool.others

    def note_prompt(
        self, keys: Sequence[bytes], *, start: int, ram: int, ssd: int, peer: int, late: int, stop: int | None = None
    ) -> tuple[int, int, int, int, int]:
        stop = len(keys) if stop is None else min(stop, len(keys))
        assert 0 <= start <= ram <= ssd <= peer <= late <= stop
        self.prompts.append((start, ram, ssd, peer, late, stop))
        return (stop - late, 0, 0, late - peer, 0)

    def note_loaded(self, blocks: int) -> None:
        self.blocks_loaded += blocks

    def use_ssd(self) -> bool:
        if self.pool.tier is None:
            return False
        self.pool.tier.used.add(id(self._epochs))
        return True

    def tiers(self, keys: Sequence[bytes]) -> bytes:
        tier = self.pool.tier
        return bytes(1 if self.find(key) is not None else 2 * bool(tier and tier.has(self, key)) for key in keys)

    def prefetch(
        self, keys: Sequence[bytes], *, parent: bytes | None = None, chained: bool = True
    ) -> "FakePrefetch | None":
        return self.pool.tier.ask(self, keys, parent, chained) if self.pool.tier else None

    def reset(self, *, wait: bool = True) -> int:
        self._epochs[0] += 1
        if wait and self.pool.tier is not None:
            self.pool.tier.forget()
        return self.epoch


class FakeLayout:
    """Regions of memory, as ``KVLayout``."""

    def __init__(self, regions: Sequence[tuple[int, int, int]], blocks: int) -> None:
        self.regions, self.blocks = list(regions), blocks
        self.block_bytes = sum(length for _, _, length in regions)

    def read(self, block: int) -> bytes:
        return b"".join(ctypes.string_at(base + block * stride, length) for base, stride, length in self.regions)

    def write(self, block: int, data: bytes) -> None:
        assert len(data) == self.block_bytes
        for base, stride, length in self.regions:
            ctypes.memmove(base + block * stride, data[:length], length)
            data = data[length:]


@dataclass(frozen=True)
class FakeDone:
    """As ``CopyDone``."""

    job: int
    ok: bool
    failed: list[int]
    bytes: int = 0
    seconds: float = 0.001


class FakeCopier:
    """Copies at ``poll``, unless ``held``. At most ``jobs_max`` jobs may be queued."""

    def __init__(self, pool: FakePool, jobs_max: int = 64) -> None:
        self.pool, self.jobs_max, self.threads = pool, jobs_max, 1
        self.held = False
        self.newest_first = False
        """Copies one job per poll, the last one queued."""
        self.failing_loads: set[int] = set()
        """Indices of refs that every load fails on."""
        self.closed = False
        self.queued: dict[int, tuple[str, int, FakeLayout, list[int], list[int]]] = {}
        self._ids = itertools.count(1)

    def save(self, part: int, layout: FakeLayout, refs: Sequence[int], block_ids: Sequence[int]) -> int:
        return self._queue("save", part, layout, refs, block_ids)

    def load(self, part: int, layout: FakeLayout, refs: Sequence[int], block_ids: Sequence[int]) -> int:
        return self._queue("load", part, layout, refs, block_ids)

    def poll(self) -> list[FakeDone]:
        if self.held:
            return []
        jobs, self.queued = self.queued, {}
        if self.newest_first and jobs:
            newest = max(jobs)
            self.queued = {job: what for job, what in jobs.items() if job != newest}
            jobs = {newest: jobs[newest]}
        return [self._copy(job, *what) for job, what in jobs.items()]

    def wait(self, timeout_ms: int) -> list[FakeDone]:
        return self.poll()

    def in_flight(self) -> int:
        return len(self.queued)

    def close(self) -> None:
        self.held = False
        self.poll()
        self.closed = True

    def _queue(self, kind: str, part: int, layout: FakeLayout, refs: Sequence[int], block_ids: Sequence[int]) -> int:
        if len(refs) != len(block_ids) or any(not 0 < block < layout.blocks for block in block_ids):
            raise InvalidArgument("refs and block ids do not match the layout")
        if len(self.queued) >= self.jobs_max:
            raise PoolBusy("too many jobs")
        job = next(self._ids)
        self.queued[job] = (kind, part, layout, list(refs), list(block_ids))
        return job

    def _copy(
        self, job: int, kind: str, part: int, layout: FakeLayout, refs: list[int], block_ids: list[int]
    ) -> FakeDone:
        failed = []
        for index, (ref, block) in enumerate(zip(refs, block_ids, strict=True)):
            slot = self.pool.slots.get(ref)
            if kind == "load":
                if slot is None or index in self.failing_loads or not self.pool.leases[ref]:
                    failed.append(index)
                else:
                    layout.write(block, slot.parts[part])
            elif slot is not None and slot.state == "reserved":
                slot.parts[part] = layout.read(block)
        return FakeDone(job, not failed, failed)


class FakeIdentity:
    """Factors of a fingerprint that are there once the test says so."""

    label = "fake model"

    def __init__(self, ready: bool = True) -> None:
        self.ready = ready

    def sample(self) -> None:
        """Nothing takes long here."""

    def factors(self) -> dict[str, Any] | None:
        return {"model": "fake"} if self.ready else None


@dataclass(eq=False)
class FakeBlock:
    """As vLLM's ``KVCacheBlock``."""

    block_id: int
    ref_cnt: int = 0
    is_null: bool = False


class FakeBlockPool:
    """As vLLM's ``BlockPool``, with block 0 as the null block."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [FakeBlock(index) for index in range(blocks)]
        self.blocks[0].is_null = True

    def allocate(self) -> int | None:
        """A free block, if there is one."""
        block = next((block for block in self.blocks[1:] if block.ref_cnt == 0), None)
        if block is None:
            return None
        block.ref_cnt = 1
        return block.block_id

    def touch(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            if not block.is_null:
                assert block.ref_cnt > 0
                block.ref_cnt -= 1

    def used(self) -> int:
        """Blocks that somebody holds."""
        return sum(block.ref_cnt > 0 for block in self.blocks)
