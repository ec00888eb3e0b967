"""One replica whose ranks are on several hosts, each with a real pool of its own. Every byte loaded is checked."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegaflow import _native
from pegaflow.connector.copies import NativeTypes
from tests.engine_races import PROMPT
from tests.real_peers import await_
from tests.unit.mini_engine import EVERY_KIND, SINGLE, MiniEngine

STEPS_MAX = 1_000_000


class Hosts:
    """As many hosts as a test wants; each is a directory with a pool in it."""

    def __init__(self, root: Path, count: int = 2) -> None:
        self.dirs = [root / f"host{number}" for number in range(count)]
        for directory in self.dirs:
            directory.mkdir()
        self.pools = [self._open(directory) for directory in self.dirs]

    def _open(self, directory: Path) -> Any:
        sizes = {"pool_bytes": 4 << 20, "segment_bytes": 1 << 16, "slots_max": 1 << 15}
        return _native.Pool.open("shards", shm_dir=str(directory), **sizes)

    def types(self) -> list[NativeTypes]:
        """What the ranks of each host use."""

        def attach(name: str, shm_dir: str) -> Any:
            return _native.Pool.open(name, shm_dir=shm_dir, create=False)

        def types_of(directory: Path) -> NativeTypes:
            copier = lambda pool, device: _native.HostCopier(pool)  # noqa: E731
            return NativeTypes(attach, copier, _native.KVLayout, lambda: self._open(directory))

        return [types_of(directory) for directory in self.dirs]

    def engine(self, geometry: Any = SINGLE, *, ranks: int = 4, **options: Any) -> MiniEngine:
        """A replica on all of them, once there is room for its blocks."""
        engine = MiniEngine(geometry, ranks=ranks, blocks=400, hosts=self.types(), **options)
        for worker in engine.workers:
            worker._sampling.join()
        engine.add([7] * 40)
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


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    made.close()


def hit(engine: MiniEngine, tokens: list[int] = PROMPT) -> int:
    request = engine.add(tokens)
    engine.run(STEPS_MAX)
    engine.assert_nothing_held()
    return request.hit_tokens


def finish(engine: MiniEngine, hosts: Hosts) -> None:
    """Nothing is held and all pools are sound."""
    engine.assert_nothing_held()
    for worker in engine.workers:
        worker.shutdown()
    for number, pool in enumerate(hosts.pools):
        await_(lambda number=number: sum(int(space["leases"]) for space in hosts.spaces(number)) == 0)
        assert json.loads(_native.verify(pool.path))["problems"] == []


@pytest.mark.parametrize("geometry", EVERY_KIND.values(), ids=EVERY_KIND)
def test_what_the_ranks_of_two_hosts_saved_is_loaded_to_the_byte(hosts: Hosts, geometry: Any) -> None:
    first = hosts.engine(geometry)
    assert hit(first) == 0
    finish(first, hosts)
    second = hosts.engine(geometry)
    assert hit(second) == geometry.hit_tokens_max(len(PROMPT)) >= 24
    finish(second, hosts)
