"""Small pools with a real SSD tier: files in a directory, read and written by threads."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.unit.native_engine import open_pool

CAPACITY_BYTES = 64 << 20
WAIT_SECONDS_MAX = 60.0


def await_(what: Callable[[], bool]) -> None:
    """Until it is so."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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
