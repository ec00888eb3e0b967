"""Small pools with a real SSD tier: files in a directory, read and written by threads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.patience import await_
from tests.unit.native_engine import open_pool

CAPACITY_BYTES = 64 << 20
TRIES_MAX = 20


def in_some_try(tmp_path: Path, scenario: Callable[[Path], bool]) -> None:
    """Until ``scenario`` has come about in a directory of its own. Nothing is expected of a tier whose leader got no
    processor for a while: then what is on its disk is computed, which is right, and shows nothing."""
    for number in range(TRIES_MAX):
        place = tmp_path / str(number)
        place.mkdir()
        if scenario(place):
            return
    raise AssertionError("it never came about")


@contextmanager
def pool_with_tier(place: Path, disk: Path) -> Iterator[Any]:
    """A pool whose tier serves."""
    for directory in (place, disk):
        directory.mkdir(exist_ok=True)
    pool = open_pool(str(place))
    try:
        pool.serve_ssd([str(disk)], capacity_bytes=CAPACITY_BYTES, admission="all", backend="threads")
        await_(lambda: pool.ssd()["state"] == "serving")
        yield pool
    finally:
        pool.close()


def await_written(pool: Any, engine: Any) -> None:
    """Until every block in memory is on SSD as well."""
    spaces = list(engine.store.namespaces().values())
    sealed = sum(space.stats()["blocks_sealed"] for space in spaces)
    await_(lambda: pool.ssd()["records"] >= sealed)
