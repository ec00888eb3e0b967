"""``PegaEngine`` on a file system that is smaller than its pool."""

from pathlib import Path

import pytest

from pegaflow import PegaEngine, PoolFull, ShmFull
from tests.own_tmpfs import run_on_tmpfs

TMPFS_BYTES = 12 << 20
POOL_SIZE = "64mib"
VALUE_BYTES = 20_000


def value(number: int) -> bytes:
    """A value that tells which one it is."""
    return bytes([number % 251]) * VALUE_BYTES


def fill(shm_dir: str) -> None:
    """Put until the file system is full."""
    with PegaEngine(name="small", shm_dir=shm_dir, pool_size=POOL_SIZE) as engine:
        stored = 0

        def fill_up() -> None:
            nonlocal stored
            while True:
                engine.put(f"key {stored}", value(stored))
                stored += 1

        with pytest.raises(ShmFull, match="--shm-size"):
            fill_up()
        assert stored * VALUE_BYTES > TMPFS_BYTES // 2
        with pytest.raises(PoolFull):
            engine.put("key 0", bytes(3 << 20))
        assert len(engine) == stored
        assert all(engine.get(f"key {number}") == value(number) for number in range(stored))
        engine.remove("key 0")
        engine.put("fits", value(0))


def fill_with_eviction(shm_dir: str) -> None:
    """Put more than the file system holds, small values and large ones."""
    with PegaEngine(name="small", shm_dir=shm_dir, pool_size=POOL_SIZE, evict=True) as engine:
        for number in range(2000):
            engine.put(f"key {number}", value(number))
        assert engine.get("key 1999") == value(1999)
        engine.put("large", bytes(3 << 20))
        assert engine.get("large") == bytes(3 << 20)
        assert engine.get("key 1999") == value(1999), "the newest stay"


@pytest.mark.parametrize("function", [fill, fill_with_eviction], ids=lambda function: function.__name__)
def test_a_full_file_system_is_an_error_or_evicts_and_never_a_crash(tmp_path: Path, function: object) -> None:
    name = function.__name__  # type: ignore[attr-defined]
    code = f"from tests.multiprocess import test_engine_small_shm as t\nt.{name}({str(tmp_path)!r})"
    run_on_tmpfs(tmp_path, str(TMPFS_BYTES), code)
