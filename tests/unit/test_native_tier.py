"""The SSD tier of a pool through the native module: written, evicted with the pool, and brought back."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pegaflow import _native
from pegaflow.errors import InvalidArgument
from tests.patience import await_, patiently

BLOCK_BYTES = 4096
BLOCKS = 40


def keys() -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(1, BLOCKS + 1)]


class Life:
    """One life of a pool whose tier is in ``tmp_path``."""

    def __init__(self, shm_dir: Path, files: Path) -> None:
        self.pool = _native.Pool.open("tier", shm_dir=str(shm_dir), pool_bytes=16 << 20)
        self.pool.serve_ssd([str(files)], capacity_bytes=32 << 20, admission="all", backend="threads")
        self.namespace = self.pool.namespace(bytes(32), 0, [BLOCK_BYTES])
        assert self.namespace.use_ssd()
        await_(lambda: self.facts()["state"] == "serving")

    def facts(self) -> dict[str, object]:
        facts = self.pool.ssd()
        assert facts is not None
        return facts

    def end(self) -> None:
        """As a reboot: nothing of the pool is left."""
        path = self.pool.path
        self.pool.close()
        _native.remove(path)

    def store(self) -> None:
        def stored() -> bool:
            refs = [ref for _, ref in self.namespace.reserve(keys())]
            self.pool.mark_written(0, refs)
            self.pool.publish(refs)
            return self.namespace.lookup(keys()) == BLOCKS

        await_(stored)
        await_(lambda: self.facts()["records"] == BLOCKS)


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Callable[[], Life]]:
    shm_dir, files = tmp_path / "shm", tmp_path / "files"
    shm_dir.mkdir()
    files.mkdir()
    made: list[Life] = []

    def make() -> Life:
        made.append(Life(shm_dir, files))
        return made[-1]

    yield make
    for life in made:
        life.pool.close()


def test_blocks_come_back_after_the_pool_was_removed(lives: Callable[[], Life]) -> None:
    life = lives()
    life.store()
    assert life.namespace.tiers(keys()) == b"\x01" * BLOCKS
    life.end()
    life = lives()
    await_(lambda: life.namespace.tiers(keys()) == b"\x02" * BLOCKS)
    # Who leads may have got no processor for a while; then nothing is expected of the tier.
    await_(lambda: life.pool.ssd_read_seconds(BLOCKS * BLOCK_BYTES) is not None)
    assert (life.pool.ssd_read_seconds(BLOCKS * BLOCK_BYTES) or 1.0) > 0
    request = None

    def asked() -> bool:
        nonlocal request
        if request is not None:
            request.close()
        request = life.namespace.prefetch(keys())
        if request is None:
            return False
        assert request.keys == BLOCKS
        await_(lambda: request.poll() is not None)
        assert request.poll() == request.found()
        return request.found() == BLOCKS

    await_(asked)
    leased = life.namespace.lease(keys())
    assert len(leased) == BLOCKS
    request.close()
    request.close()
    assert (request.poll(), request.found()) == (0, 0)
    life.pool.release(leased)
    assert life.facts()["read_blocks"] == BLOCKS


def test_a_reset_reaches_the_files(lives: Callable[[], Life]) -> None:
    life = lives()
    life.store()
    assert patiently(life.namespace.reset) >= 2  # once more where the files took long to take note
    assert life.namespace.tiers(keys()) == b"\x00" * BLOCKS
    life.end()
    life = lives()
    request = None

    def asked() -> bool:
        nonlocal request
        request = life.namespace.prefetch(keys())
        return request is not None

    await_(asked)
    await_(lambda: request.poll() is not None)
    assert request.poll() == 0


def test_a_pool_without_a_tier_says_so(tmp_path: Path) -> None:
    pool = _native.Pool.open("none", shm_dir=str(tmp_path), pool_bytes=16 << 20)
    namespace = pool.namespace(bytes(32), 0, [BLOCK_BYTES])
    assert pool.ssd() is None
    assert pool.ssd_read_seconds(1) is None
    assert not namespace.use_ssd()
    assert namespace.prefetch(keys()) is None
    assert namespace.tiers(keys()) == b"\x00" * BLOCKS
    for wrong in ({"admission": "none"}, {"backend": "none"}, {"read_depth": 0}):
        with pytest.raises(InvalidArgument):
            pool.serve_ssd([str(tmp_path)], capacity_bytes=1 << 30, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        pool.serve_ssd([], capacity_bytes=1 << 30)
    pool.close()
