"""Views of blocks: right bytes, no copy, and leases that last exactly as long as somebody looks."""

import gc
import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from pegaflow.errors import InvalidArgument, PoolClosed, PoolCorrupt, PoolRefused
from pegaflow.shm import views
from pegaflow.shm.mapping import map_segment

KEYS = [bytes([index]) * 16 for index in range(4)]
PART_BYTES = 8192


class FakePool:
    """A pool of one segment file in which key *i* is slot *i*, filled with the byte *i* + 1."""

    handles: list["FakePool"]
    leases: dict[int, int]

    def __init__(self, directory: Path, leases: dict[int, int]) -> None:
        self.path = str(directory)
        self.name = directory.name
        self.shm_dir = str(directory.parent)
        self.leases = leases
        self.stale: set[int] = set()
        self.closed = False
        FakePool.handles.append(self)

    def locate(self, ref: int, part: int) -> tuple[str, int, int] | None:
        assert not self.closed
        if ref in self.stale:
            return None
        return f"{self.path}/segment-{part}", ref * PART_BYTES, PART_BYTES

    def lease(self, keys: list[bytes]) -> list[int]:
        refs = [KEYS.index(key) for key in keys]
        for ref in refs:
            self.leases[ref] = self.leases.get(ref, 0) + 1
        return refs

    def release(self, refs: list[int]) -> None:
        if self.closed:
            raise PoolClosed("This handle was closed.")
        for ref in refs:
            assert self.leases[ref] > 0, "released more often than leased"
            self.leases[ref] -= 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    directory = tmp_path / "pool"
    directory.mkdir()
    for part in range(2):
        slots = [bytes([index + 1 + 100 * part]) * PART_BYTES for index in range(len(KEYS))]
        (directory / f"segment-{part}").write_bytes(b"".join(slots))
    FakePool.handles = []
    made = FakePool(directory, {})

    class Native:
        class Pool:
            @staticmethod
            def open(name: str, *, shm_dir: str, create: bool) -> FakePool:
                assert not create
                handle = FakePool(Path(shm_dir) / name, made.leases)
                handle.stale = made.stale
                return handle

    monkeypatch.setattr(views, "_native", Native)
    yield made
    gc.collect()
    assert sum(made.leases.values()) == 0, "a lease was lost"
    assert all(handle.closed for handle in FakePool.handles[1:]), "a handle was lost"


def test_view_has_the_bytes_of_its_part(pool: Any) -> None:
    for part in range(2):
        view = views.view_block(pool, pool, KEYS[2], part)
        assert view is not None
        assert len(view) == PART_BYTES
        assert bytes(view.memory) == bytes([3 + 100 * part]) * PART_BYTES
        view.close()


def test_view_is_no_copy(pool: Any) -> None:
    view = views.view_block(pool, pool, KEYS[0])
    assert view is not None
    with open(f"{pool.path}/segment-0", "r+b") as segment:
        segment.write(b"zz")
    assert bytes(view.memory[:3]) == b"zz\x01"


def test_view_cannot_be_written(pool: Any) -> None:
    view = views.view_block(pool, pool, KEYS[0])
    assert view is not None
    assert view.memory.readonly
    assert not view.numpy().flags.writeable
    with pytest.raises(TypeError):
        view.memory[0] = 1


def test_numpy_and_torch_see_the_same_bytes(pool: Any) -> None:
    with views.block_view(pool, pool.lease(KEYS[1:2])[0]) as view:
        halves = view.numpy("<u2")
        tensor = view.torch(torch.int16)
        assert halves.shape == (PART_BYTES // 2,)
        assert tensor.shape == (PART_BYTES // 2,)
        assert int(halves[0]) == 0x0202
        assert int(tensor[-1]) == 0x0202


def test_closed_view_gives_its_lease_back(pool: Any) -> None:
    view = views.view_block(pool, pool, KEYS[0])
    assert view is not None
    assert pool.leases == {0: 1}
    view.close()
    view.close()
    assert pool.leases == {0: 0}
    with pytest.raises(PoolClosed):
        _ = view.memory


def test_forgotten_view_gives_its_lease_back(pool: Any) -> None:
    view = views.view_block(pool, pool, KEYS[0])
    del view
    gc.collect()
    assert pool.leases == {0: 0}


@pytest.mark.parametrize("kind", ["memory", "numpy", "torch"])
def test_lease_lasts_as_long_as_what_was_made_of_the_view(pool: Any, kind: str) -> None:
    view = views.view_block(pool, pool, KEYS[3])
    assert view is not None
    made = view.memory if kind == "memory" else getattr(view, kind)()
    tail = made[100:]
    view.close()
    del view, made
    gc.collect()
    assert pool.leases == {3: 1}
    assert int(tail[0]) == 4
    del tail
    gc.collect()
    assert pool.leases == {3: 0}


def test_closing_the_callers_pool_does_not_end_a_view(pool: Any) -> None:
    view = views.view_block(pool, pool, KEYS[0])
    assert view is not None
    pool.close()
    assert bytes(view.memory[:1]) == b"\x01"
    view.close()
    assert pool.leases == {0: 0}


def test_absent_block_is_none(pool: Any) -> None:
    assert views.view_block(pool, NothingCached(), KEYS[0]) is None


class NothingCached:
    def lease(self, keys: list[bytes]) -> list[int]:
        return []


def test_prefix_is_viewed_in_order(pool: Any) -> None:
    made = views.view_prefix(pool, pool, KEYS)
    assert [view.memory[0] for view in made] == [1, 2, 3, 4]


def test_prefix_ends_at_a_block_that_went_away(pool: Any) -> None:
    pool.stale.add(2)
    made = views.view_prefix(pool, pool, KEYS)
    assert [view.ref for view in made] == [0, 1]
    assert pool.leases == {0: 1, 1: 1, 2: 0, 3: 0}


def test_stale_ref_is_an_error_and_keeps_no_lease(pool: Any) -> None:
    (ref,) = pool.lease(KEYS[:1])
    pool.stale.add(ref)
    with pytest.raises(InvalidArgument, match="not in the pool"):
        views.block_view(pool, ref)
    assert pool.leases == {0: 0}


def test_failure_half_way_gives_every_lease_back(pool: Any) -> None:
    os.truncate(f"{pool.path}/segment-0", 2 * PART_BYTES)
    with pytest.raises(PoolCorrupt, match="outside"):
        views.view_prefix(pool, pool, KEYS)
    gc.collect()
    assert set(pool.leases.values()) == {0}


def test_symlink_in_place_of_a_segment_is_refused(pool: Any) -> None:
    os.rename(f"{pool.path}/segment-0", f"{pool.path}/elsewhere")
    os.symlink("elsewhere", f"{pool.path}/segment-0")
    with pytest.raises(PoolRefused):
        views.view_block(pool, pool, KEYS[0])


def test_views_of_one_segment_share_one_mapping_and_no_descriptor(pool: Any) -> None:
    before = len(os.listdir("/proc/self/fd"))
    made = views.view_prefix(pool, pool, KEYS) + views.view_prefix(pool, pool, KEYS)
    assert len(os.listdir("/proc/self/fd")) == before
    file = f"{pool.path}/segment-0"
    with open("/proc/self/maps") as maps:
        assert sum(file in line for line in maps) == 1
    del made
    gc.collect()
    with open("/proc/self/maps") as maps:
        assert not any(file in line for line in maps)


def test_replaced_segment_file_is_mapped_anew(pool: Any) -> None:
    file = f"{pool.path}/segment-0"
    old = map_segment(file)
    os.unlink(file)
    Path(file).write_bytes(b"\x09" * PART_BYTES)
    new = map_segment(file)
    assert bytes(memoryview(new.buffer(0, 1))) == b"\x09"
    assert bytes(memoryview(old.buffer(0, 1))) == b"\x01"


def test_empty_segment_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "segment").write_bytes(b"")
    with pytest.raises(PoolCorrupt, match="is empty"):
        map_segment(str(tmp_path / "segment"))


def test_numpy_refuses_a_length_that_is_no_multiple(pool: Any) -> None:
    view = views.view_block(pool, pool, KEYS[0])
    assert view is not None
    with pytest.raises(ValueError, match="multiple"):
        view.numpy(numpy.dtype([("three", "u1", 3)]))
