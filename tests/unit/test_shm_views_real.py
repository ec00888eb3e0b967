"""Views of blocks in a real pool."""

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegaflow.shm import view_block, view_prefix
from pegaflow.shm.views import block_view
from tests.unit.pool_processes import BLOCKS, PART_BYTES, block_bytes, keys, open_namespace, store

EVICTION_SECONDS_MAX = 240.0


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    pool, namespace = open_namespace("views", str(tmp_path))
    store(pool, namespace)
    yield pool, namespace
    pool.close()


def evict(pool: Any, namespace: Any, victim: bytes) -> None:
    """Store other blocks, of which the pool cannot hold all, until ``victim`` has made room for one."""
    deadline = time.monotonic() + EVICTION_SECONDS_MAX
    number = 0
    while namespace.contains([victim]) == b"\1":
        assert time.monotonic() < deadline, "the block was never evicted"
        others = [b"other" + (number + index).to_bytes(8, "big") for index in range(100)]
        number += len(others)
        refs = [ref for _, ref in namespace.reserve(others)]
        pool.mark_written(0, refs)
        pool.publish(refs)


def test_view_has_what_was_saved(opened: tuple[Any, Any]) -> None:
    made = view_prefix(*opened, keys())
    assert [bytes(view.memory) for view in made] == [block_bytes(index) for index in range(BLOCKS)]


def test_absent_block_is_none(opened: tuple[Any, Any]) -> None:
    assert view_block(*opened, b"absent") is None


def test_viewed_block_outlives_eviction_of_all_others(opened: tuple[Any, Any]) -> None:
    pool, namespace = opened
    view = view_block(pool, namespace, keys()[5])
    assert view is not None
    array = view.numpy()
    view.close()
    evict(pool, namespace, keys()[7])
    assert namespace.contains(keys()[5:6]) == b"\1"
    assert array.tobytes() == block_bytes(5)
    del array, view
    gc.collect()
    evict(pool, namespace, keys()[5])


def test_view_outlives_the_callers_handle(tmp_path: Path) -> None:
    pool, namespace = open_namespace("handle", str(tmp_path))
    store(pool, namespace)
    view = view_block(pool, namespace, keys()[1])
    assert view is not None
    pool.close()
    assert bytes(view.memory) == block_bytes(1)
    view.close()


def test_block_view_takes_the_callers_lease_over(opened: tuple[Any, Any]) -> None:
    pool, namespace = opened
    (ref,) = namespace.lease(keys()[:1])
    with block_view(pool, ref) as view:
        assert len(view) == PART_BYTES
    with pytest.raises(ValueError, match="lease"):
        pool.release([ref])


def test_forked_child_may_read_and_harms_nobody(opened: tuple[Any, Any]) -> None:
    pool, namespace = opened
    view = view_block(pool, namespace, keys()[2])
    assert view is not None
    child = os.fork()
    if child == 0:
        good = bytes(view.memory) == block_bytes(2)
        view.close()
        os._exit(0 if good else 1)
    _pid, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    evict(pool, namespace, keys()[7])
    assert bytes(view.memory) == block_bytes(2)
    view.close()
