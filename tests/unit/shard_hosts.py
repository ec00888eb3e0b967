"""Hosts over which the ranks of one replica are divided, each with a pool of its own: real ones, or fakes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pegaflow import _native
from pegaflow.connector.copies import NativeTypes
from tests.fakes import FakeCopier, FakeLayout, FakePool
from tests.patience import await_
from tests.unit.mini_engine import SINGLE, MiniEngine

STEPS_MAX = 1_000_000
WARM_UP = [7] * 40
PROMPT = list(range(40))


class RealHosts:
    """Each is a directory with a pool in it."""

    def __init__(self, root: Path, count: int = 2) -> None:
        self.dirs = [root / f"host{number}" for number in range(count)]
        self.pools = []
        for directory in self.dirs:
            directory.mkdir()
            self.pools.append(open_pool(directory))

    def engine(self, geometry: Any = SINGLE, *, ranks: int = 4, blocks: int = 400, **options: Any) -> MiniEngine:
        """A replica on all of them, once there is room for its blocks."""
        hosts = [(types_of(directory), "sampled") for directory in self.dirs]
        engine = MiniEngine(geometry, ranks=ranks, blocks=blocks, hosts=hosts, **options)
        engine.pool_paths = [pool.path for pool in self.pools]
        settle(engine)
        engine.add(WARM_UP)
        engine.run(STEPS_MAX)
        await_(lambda: all(space["slots"] for number in range(len(self.dirs)) for space in self.spaces(number)))
        return engine

    def spaces(self, number: int) -> list[dict[str, Any]]:
        """Namespaces of one host's pool."""
        found: list[dict[str, Any]] = json.loads(_native.inspect(self.pools[number].path))["namespaces"]
        return found

    def close(self) -> None:
        """Leave all pools."""
        for pool in self.pools:
            pool.close()


class FakeHosts:
    """Each has a pool whose blocks can be looked at and taken away."""

    def __init__(self, count: int = 2, weights: Sequence[str] = ()) -> None:
        self.pools = [FakePool(f"host{number}") for number in range(count)]
        self.weights = list(weights) or ["sampled"] * count
        self.busy: list[Exception] = []
        """Raised one after the other when a rank opens its pool."""
        self.copiers: list[FakeCopier] = []

    def engine(self, geometry: Any = SINGLE, *, ranks: int = 4, blocks: int = 400, **options: Any) -> MiniEngine:
        """A replica on all of them."""
        types = [self._types(pool) for pool in self.pools]
        hosts = list(zip(types, self.weights, strict=True))
        engine = MiniEngine(geometry, ranks=ranks, blocks=blocks, hosts=hosts, **options)
        settle(engine)
        return engine

    def blocks(self, number: int) -> int:
        """Visible blocks of one host."""
        return sum(
            slot.state == "sealed" and slot.epoch == slot.namespace.epoch for slot in self.pools[number].slots.values()
        )

    def evict(self, number: int, keep: Sequence[bytes] = ()) -> int:
        """Take away what nobody holds on one host, except for some keys. Returns how many blocks that were."""
        pool = self.pools[number]
        gone = [
            ref
            for ref, slot in pool.slots.items()
            if slot.state == "sealed" and not pool.leases[ref] and slot.key not in keep
        ]
        for ref in gone:
            del pool.slots[ref]
        return len(gone)

    def assert_nothing_held(self) -> None:
        """No lease and no reservation is left on any host."""
        assert [pool.leased() for pool in self.pools] == [0] * len(self.pools)
        assert [pool.reserved() for pool in self.pools] == [[]] * len(self.pools)

    def _types(self, pool: FakePool) -> NativeTypes:
        def create() -> Any:
            if self.busy:
                raise self.busy.pop()
            return pool

        def copier(opened: Any, device: str) -> Any:
            self.copiers.append(FakeCopier(opened))
            return self.copiers[-1]

        layout: Any = FakeLayout
        return NativeTypes(lambda name, shm_dir: pool, copier, layout, create)  # type: ignore[arg-type,return-value]


def settle(engine: MiniEngine) -> None:
    """All ranks know their weights."""
    for worker in engine.workers:
        worker._sampling.join()  # type: ignore[attr-defined]


def open_pool(directory: Path) -> _native.Pool:
    """A small pool."""
    sizes = {"pool_bytes": 4 << 20, "segment_bytes": 1 << 16, "slots_max": 1 << 15}
    return _native.Pool.open("shards", shm_dir=str(directory), **sizes)


def types_of(directory: Path) -> NativeTypes:
    """What the ranks of a host use."""

    def attach(name: str, shm_dir: str) -> Any:
        return _native.Pool.open(name, shm_dir=shm_dir, create=False)

    return NativeTypes(
        attach, lambda pool, device: _native.HostCopier(pool), _native.KVLayout, lambda: open_pool(directory)
    )


def hit(engine: MiniEngine, tokens: Sequence[int] = PROMPT) -> int:
    """Tokens of a prompt that are loaded; the small engine compares all bytes."""
    request = engine.add(list(tokens))
    engine.run(STEPS_MAX)
    engine.assert_nothing_held()
    return request.hit_tokens
