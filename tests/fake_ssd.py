"""A stand-in for a pool's SSD tier: what was spilled comes back as many blocks at a time as a test says."""

from collections.abc import Sequence
from typing import Any

from pegaflow.errors import PegaFlowError, PoolBusy

COUNTERS = (
    "zones_done", "zones", "records", "read_bytes_per_second", "queued_bytes", "spilled_bytes", "read_bytes",
    "read_joined", "read_damaged", "read_failed", "read_wait_ms_max", "ssd_dropped",
)  # fmt: skip


class FakeSsd:
    """Blocks on SSD of one fake pool."""

    def __init__(self) -> None:
        self.records: dict[tuple[int, int, int, bytes], dict[int, bytes]] = {}
        self.open: list[FakePrefetch] = []
        self.asked: list[int] = []
        """Keys of each request."""
        self.blocks_per_poll = 1_000
        self.bytes_per_second = 1e9
        self.open_max = 128
        self.keys_max = 1_024
        """Of a request only so many are brought."""
        self.alive = True
        """Whether somebody leads the tier and its disks answer."""
        self.recovering = False
        self.used: set[int] = set()
        """Fingerprints that take part."""
        self.lags = False
        """Whether its files take long to take note of a reset."""
        self.waits = 0
        """How often somebody waited for that."""
        self.fails: Exception | None = None
        """What every call raises."""

    def spill(self, pool: Any, evict: bool = True) -> int:
        """Write everything that is sealed, and drop it from memory unless it is leased."""
        sealed = [(ref, slot) for ref, slot in pool.slots.items() if slot.state == "sealed"]
        for ref, slot in sealed:
            self.records[self._name(slot.namespace, slot.key)] = dict(slot.parts)
            if evict and not pool.leases[ref]:
                del pool.slots[ref]
        return len(sealed)

    def has(self, namespace: Any, key: bytes) -> bool:
        """Whether a block is here."""
        if self.fails:
            raise self.fails
        return self.alive and self._name(namespace, key) in self.records

    def read(self, namespace: Any, key: bytes) -> dict[int, bytes]:
        """Parts of a block."""
        return dict(self.records[self._name(namespace, key)])

    def ask(self, namespace: Any, keys: Sequence[bytes], parent: bytes | None, chained: bool) -> "FakePrefetch | None":
        """As ``Namespace.prefetch``."""
        if not self.alive or len(self.open) >= self.open_max:
            return None
        assert 0 < len(keys) <= 1_024
        self.asked.append(len(keys))
        self.open.append(FakePrefetch(self, namespace, list(keys[: self.keys_max]), parent, chained))
        return self.open[-1]

    def read_seconds(self, block_bytes: int) -> float | None:
        """As ``Pool.ssd_read_seconds``."""
        return block_bytes / self.bytes_per_second if self.alive else None

    def forget(self) -> None:
        """Take note of a reset."""
        self.waits += 1
        if self.lags or not self.alive:
            raise PoolBusy("the blocks are reset, but the files have not forgotten them")

    def report(self) -> dict[str, Any]:
        """As ``Pool.ssd``."""
        state = "recovering" if self.recovering else "serving" if self.alive else "off"
        facts = {"state": state, "leads": True, "problem": None, **dict.fromkeys(COUNTERS, 0)}
        return facts | {"records": len(self.records), "zones": 4, "zones_done": 4}

    @staticmethod
    def _name(namespace: Any, key: bytes) -> tuple[int, int, int, bytes]:
        return id(namespace._epochs), namespace.id, namespace.epoch, key


class FakePrefetch:
    """As ``Prefetch``; blocks arrive at ``poll``."""

    def __init__(self, tier: FakeSsd, namespace: Any, keys: list[bytes], parent: bytes | None, chained: bool) -> None:
        self._tier, self._namespace, self._left = tier, namespace, keys
        self._parent, self._chained, self._found = parent, chained, 0
        self._held: list[int] = []
        self.keys = len(keys)
        self.closed = False

    def poll(self) -> int | None:
        """Bring some more blocks."""
        assert not self.closed
        if self._tier.fails:
            raise self._tier.fails
        for _ in range(self._tier.blocks_per_poll):
            if self._left and self._tier.alive:
                self._bring(self._left.pop(0))
        return None if self._left and self._tier.alive else self._found

    def found(self) -> int:
        """What is there so far."""
        return self._found

    def close(self) -> None:
        """Give up what is held; what is on its way arrives all the same."""
        if self.closed:
            return
        for key in self._left[: int(self._tier.fails is None)]:
            self._bring(key)
        self.closed = True
        self._tier.open.remove(self)
        self._namespace.pool.release(self._held)

    def _bring(self, key: bytes) -> None:
        pool, namespace = self._namespace.pool, self._namespace
        ref = namespace.find(key)
        if ref is None and self._tier.has(namespace, key) and self._joins():
            ref = pool.take_slot(namespace, key)
            if ref is not None:
                pool.slots[ref].parts, pool.slots[ref].state = self._tier.read(namespace, key), "sealed"
                pool.slots[ref].parent = self._parent if self._chained else None
        if ref is not None:
            pool.leases[ref] += 1
            self._held.append(ref)
            self._found += 1
        elif self._chained:
            self._left.clear()
        self._parent = key

    def _joins(self) -> bool:
        return not self._chained or self._parent is None or self._namespace.find(self._parent) is not None


BROKEN = PegaFlowError("the tier's tables are damaged")
