"""What the native module takes, what it refuses, and which exception says so."""

import array
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import pytest

from pegaflow import _native
from pegaflow.errors import InvalidArgument, PoolClosed, PoolNotFound
from tests.unit.native_pools import FINGERPRINT, keys, open_pool, reserve_all


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[_native.Pool]:
    opened = open_pool(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def namespace(pool: _native.Pool) -> _native.Namespace:
    made = pool.namespace(FINGERPRINT, 3, [512, 1024], label="two parts")
    refs = reserve_all(made, keys(4))
    for part in range(2):
        assert pool.mark_written(part, refs) == 4
    assert pool.publish(refs) == 4
    return made


class Lazy(Sequence[bytes]):
    """A sequence that is neither list nor tuple."""

    def __init__(self, items: list[bytes]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]


def test_module_says_which_build_it_is() -> None:
    assert _native.__version__ == version("pegaflow")
    assert _native.build_profile in ("release", "debug")
    assert _native.LAYOUT_VERSION >= 1


def test_pool_shows_its_geometry(pool: Any, tmp_path: Path) -> None:
    assert (pool.name, pool.shm_dir, pool.created) == ("native", str(tmp_path), True)
    assert Path(pool.path).parent == tmp_path
    assert (pool.pool_bytes, pool.segment_bytes) == (8 << 20, 2 << 20)
    again = open_pool(tmp_path)
    assert again.member() == pool.member()


def test_namespace_shows_its_sizes(namespace: Any) -> None:
    assert (namespace.parts, namespace.part_bytes, namespace.block_bytes) == (2, [512, 1024], 1536)


@pytest.mark.parametrize("make", [list, tuple, Lazy, iter])
def test_keys_may_come_in_any_sequence(namespace: Any, make: Any) -> None:
    assert namespace.lookup(make(keys(6))) == 4
    assert namespace.contains(make(keys(6))) == b"\1\1\1\1\0\0"


@pytest.mark.parametrize(("start", "found"), [(0, 4), (1, 3), (4, 0), (6, 0), (99, 0)])
def test_lookup_counts_from_start(namespace: Any, start: int, found: int) -> None:
    assert namespace.lookup(keys(6), start) == found


@pytest.mark.parametrize(("start", "stop", "found"), [(0, None, 4), (1, 3, 2), (3, 2, 0), (0, 99, 4), (9, None, 0)])
def test_lease_takes_a_slice(pool: Any, namespace: Any, start: int, stop: int | None, found: int) -> None:
    refs = namespace.lease(keys(6), start, stop)
    assert len(refs) == found
    pool.release(refs)


@pytest.mark.parametrize("bad", ["text", bytearray(b"mutable"), 5, None, ("nested",)])
def test_keys_that_are_not_bytes_are_refused_by_place(namespace: Any, bad: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"keys\[1\] is of type {type(bad).__name__}, not bytes"):
        namespace.lookup([b"fine", bad])


@pytest.mark.parametrize("bad", [b"", b"x" * 33])
def test_keys_of_impossible_length_are_refused(namespace: Any, bad: bytes) -> None:
    with pytest.raises(InvalidArgument, match="1 to 32 bytes"):
        namespace.contains([bad])


def test_an_exception_of_the_sequence_itself_comes_through(namespace: Any) -> None:
    def items() -> Iterator[bytes]:
        yield b"fine"
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        namespace.lookup(items())


def test_keys_that_are_no_sequence_are_refused(namespace: Any) -> None:
    with pytest.raises(InvalidArgument, match="keys is of type int, not a sequence"):
        namespace.lookup(5)


def test_parents_are_keys_or_none_and_one_per_key(namespace: Any) -> None:
    more = keys(2, prefix=b"more")
    assert len(namespace.reserve(more, parents=[None, more[0]])) == 2
    with pytest.raises(InvalidArgument, match="differ in length"):
        namespace.reserve(more, parents=[None])
    with pytest.raises(InvalidArgument, match=r"parents\[1\] is of type int"):
        namespace.reserve(more, parents=[None, 7])


@pytest.mark.parametrize("kind", [int, numpy.int64, numpy.uint64])
def test_refs_may_be_any_kind_of_integer(pool: Any, namespace: Any, kind: Any) -> None:
    pool.release([kind(ref) for ref in namespace.lease(keys(4))])
    assert pool.mark_written(0, array.array("Q", [])) == 0


@pytest.mark.parametrize("bad", [-1, 2**64, 1.5, "1", None])
def test_refs_that_are_no_whole_numbers_are_refused_by_place(pool: Any, bad: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"refs\[0\] is .*from 0 of at most 64 bits"):
        pool.release([bad])


def test_the_largest_number_is_a_number(pool: Any, namespace: Any) -> None:
    refs = reserve_all(namespace, keys(1, prefix=b"largest"))
    assert pool.mark_written(0, refs, [2**64 - 1]) == 1
    with pytest.raises(InvalidArgument, match="one checksum per ref"):
        pool.mark_written(1, refs, [])


def test_releasing_what_was_not_leased_is_refused(pool: Any, namespace: Any) -> None:
    refs = namespace.lease(keys(1))
    pool.release(refs)
    with pytest.raises(InvalidArgument, match="not leased"):
        pool.release(refs)


@pytest.mark.parametrize("fingerprint", [b"", b"x" * 31, b"x" * 33])
def test_fingerprints_have_32_bytes(pool: Any, fingerprint: bytes) -> None:
    with pytest.raises(InvalidArgument, match="32 bytes"):
        pool.namespace(fingerprint, 0, [512])


def test_locate_names_file_and_place_of_each_part(pool: Any, namespace: Any) -> None:
    (ref,) = namespace.lease(keys(1))
    places = [pool.locate(ref, part) for part in range(2)]
    assert [place[2] for place in places] == [512, 1024]
    assert all(os.path.getsize(file) >= offset + length for file, offset, length in places)
    assert pool.locate(ref + (1 << 32), 0) is None
    pool.release([ref])


def test_a_closed_pool_refuses_everything_that_needs_it(pool: Any, namespace: Any) -> None:
    pool.close()
    pool.close()
    for call in (
        lambda: pool.stats(),
        lambda: pool.namespace(FINGERPRINT, 0, [512]),
        lambda: namespace.lookup(keys(1)),
        lambda: _native.HostCopier(pool),
    ):
        with pytest.raises(PoolClosed, match="closed"):
            call()
    assert pool.name == "native"


def test_closing_one_handle_leaves_the_other_open(pool: Any, namespace: Any, tmp_path: Path) -> None:
    again = open_pool(tmp_path)
    pool.close()
    assert again.namespace(FINGERPRINT, 3, [512, 1024]).lookup(keys(4)) == 4
    again.close()


def test_an_absent_pool_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(PoolNotFound):
        _native.Pool.open("absent", shm_dir=str(tmp_path), create=False)


def test_counters_are_numbers_by_name(pool: Any, namespace: Any) -> None:
    before = pool.stats()["lookups"]
    namespace.lookup(keys(2))
    after = pool.stats()
    assert after["lookups"] == before + 1
    assert all(isinstance(value, int) for value in after.values())
    assert namespace.stats()["blocks_sealed"] == 4


def test_progress_of_a_check_is_reported_and_may_raise(pool: Any, namespace: Any) -> None:
    seen: list[tuple[int, int]] = []
    _native.verify(pool.path, True, lambda done, total: seen.append((done, total)))
    assert seen
    assert seen[-1][0] == seen[-1][1] > 0
    with pytest.raises(ZeroDivisionError):
        _native.verify(pool.path, True, lambda done, total: 1 // 0)


def test_unknown_crash_points_are_refused() -> None:
    assert _native.crash_points()
    with pytest.raises(InvalidArgument):
        _native.crash_point_arm("no such point")
    with pytest.raises(InvalidArgument):
        _native.crash_point_arm(_native.crash_points()[0], "explode")


def test_engine_logs_to_standard_error_as_much_as_asked_for(tmp_path: Path) -> None:
    script = (
        "from pegaflow import _native\n"
        f"_native.Pool.open('logs', shm_dir={str(tmp_path)!r}, pool_bytes=1 << 20).rebuild_index()\n"
    )
    for level, expected in (("info", True), ("error", False)):
        environment = {**os.environ, "PEGAFLOW_LOG": level}
        command = [sys.executable, "-c", script]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert ("INFO pegaflow: rebuilt the index of pool logs" in ended.stderr) is expected
        assert ended.stdout == ""
