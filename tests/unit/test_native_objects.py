"""Values of the native object store: what goes in comes out as the same type, and nothing stays held."""

import array
import mmap
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegaflow import _native
from pegaflow.errors import ForkedProcess, InvalidArgument, PoolBusy, PoolClosed, PoolFull
from tests.own_tmpfs import run_on_tmpfs
from tests.patience import patiently

POOL_BYTES = 32 << 20
MIB = 1 << 20
IN_THE_WAY = (PoolBusy, PoolFull)
"""With eviction there is no room while all that is left is in use."""


@pytest.fixture(scope="module")
def store() -> Iterator[_native.ObjectStore]:
    """A store that lives in this process alone."""
    opened = _native.ObjectStore.open(None, pool_bytes=POOL_BYTES, evict=True)
    yield opened
    opened.close()


TEXTS = ["", "plain", "naive \u00e9\u20ac\U0001f600", "nul \0 inside", "\ud800 lone surrogate \udfff"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_text(store: Any, text: str) -> None:
    store.put("text", text)
    assert store.get("text") == text
    assert type(store.get("text")) is str


@given(value=st.text() | st.binary())
def test_every_value_comes_back_equal_and_of_its_type(store: Any, value: str | bytes) -> None:
    store.put("any", value)
    found = store.get("any")
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"plain",
        bytearray(b"mutable"),
        memoryview(b"viewed"),
        memoryview(b"longer")[2:],
        memoryview(b"").cast("B"),
        array.array("d", [1.0, 2.0]),
        numpy.arange(12, dtype=numpy.float32).reshape(3, 4),
        numpy.zeros((0, 4)),
    ],
)
def test_bytes_like_comes_back_as_bytes(store: Any, value: Any) -> None:
    store.put("bytes", value)
    assert store.get("bytes") == bytes(value)
    assert type(store.get("bytes")) is bytes


def test_memory_mapped_file_is_bytes_like(store: Any) -> None:
    with mmap.mmap(-1, 8192) as mapped:
        mapped[:4] = b"page"
        store.put("mapped", mapped)
    assert store.get("mapped") == b"page" + bytes(8188)


@pytest.mark.parametrize("bytes_", [1, 511, 512, 513, 16 << 10, 100_000, MIB - 1, MIB, 5 * MIB + 3])
def test_values_of_all_sizes_come_back_equal(store: Any, bytes_: int) -> None:
    value = random.Random(bytes_).randbytes(bytes_)
    store.put("sized", value)
    assert store.get("sized") == value
    text = value.hex()
    store.put("sized", text)
    assert store.get("sized") == text


def test_a_buffer_is_let_go_after_put(store: Any) -> None:
    value = bytearray(b"x" * 1000)
    store.put("grown", value)
    value.append(1)
    with pytest.raises(InvalidArgument):
        store.put("grown", memoryview(value)[::2])
    value.append(2)
    assert store.get("grown") == b"x" * 1000


@pytest.mark.parametrize(
    "value", [None, 5, 1.5, ["list"], {"a": 1}, object(), memoryview(b"abcdef")[::2], numpy.eye(4)[:, 1]]
)
def test_other_values_are_refused_with_what_to_pass(store: Any, value: Any) -> None:
    store.remove("refused")
    with pytest.raises(InvalidArgument, match="pass str, bytes or a C-contiguous"):
        store.put("refused", value)
    assert store.get("refused") is None


@pytest.mark.parametrize("key", ["", "k", "key with spaces", "\u00e9\u20ac", "x" * 1000])
def test_keys_are_any_text(store: Any, key: str) -> None:
    store.put(key, "value")
    assert store.contains(key)
    assert store.keys().count(key) == 1
    assert store.remove(key) == "value"
    assert not store.contains(key)
    assert store.remove(key) is None


def test_keys_that_are_no_unicode_are_refused(store: Any) -> None:
    for call in (store.get, store.remove, store.contains, lambda key: store.put(key, "value")):
        with pytest.raises(InvalidArgument, match="surrogate"):
            call("\ud800")


@pytest.mark.parametrize("key", [b"bytes", 5, None])
def test_keys_of_other_types_are_refused(store: Any, key: Any) -> None:
    with pytest.raises(TypeError):
        store.get(key)


def together(works: Sequence[Callable[[], None]]) -> None:
    """Each in a thread of its own, to its end; what one raises is raised."""
    with ThreadPoolExecutor(len(works)) as threads:
        for done in [threads.submit(work) for work in works]:
            done.result()


def test_threads_never_see_a_mix_of_two_values(store: Any) -> None:
    values = [bytes([number]) * (300_000 + number) for number in range(4)]
    store.put("raced", values[0])
    wrong: list[int] = []

    def write(number: int) -> None:
        for _ in range(50):
            patiently(lambda: store.put("raced", values[number]), IN_THE_WAY)

    def read() -> None:
        for _ in range(100):
            found = patiently(lambda: store.get("raced"))
            if found not in values:
                wrong.append(-1 if found is None else len(found))

    together([partial(write, number) for number in range(4)] + [read] * 2)
    assert wrong == []


def test_removed_value_goes_to_one_of_those_who_race_for_it(store: Any) -> None:
    taken: list[Any] = []

    def take() -> None:
        for number in range(50):
            value = patiently(partial(store.remove, f"once-{number}"))
            if value is not None:
                taken.append(value)

    for number in range(50):
        store.put(f"once-{number}", str(number))
    together([take] * 4)
    assert sorted(taken, key=int) == [str(number) for number in range(50)]


def test_named_store_is_shared_and_outlives_its_handles(tmp_path: Path) -> None:
    first = _native.ObjectStore.open("shared", shm_dir=str(tmp_path), pool_bytes=POOL_BYTES)
    second = _native.ObjectStore.open("shared", shm_dir=str(tmp_path))
    first.put("key", "value")
    assert (second.get("key"), second.count(), second.keys()) == ("value", 1, ["key"])
    assert Path(first.path).parent == tmp_path
    assert first.pool_bytes == second.pool_bytes
    first.close()
    second.close()
    third = _native.ObjectStore.open("shared", shm_dir=str(tmp_path))
    assert third.get("key") == "value"
    third.close()


def test_a_closed_store_refuses_everything() -> None:
    store = _native.ObjectStore.open(None, pool_bytes=POOL_BYTES)
    store.put("key", "value")
    store.close()
    store.close()
    for call in (store.count, store.keys, store.stats, lambda: store.get("key"), lambda: store.put("key", "value")):
        with pytest.raises(PoolClosed):
            call()


def test_a_forked_child_is_refused_and_its_parent_unharmed(store: Any) -> None:
    store.put("forked", "value")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            store.get("forked")
        except ForkedProcess:
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("forked") == "value"


def test_counters_tell_hits_from_misses(store: Any) -> None:
    before = store.stats()
    store.put("counted", b"1")
    store.get("counted")
    store.get("absent")
    after = store.stats()
    assert after["values_put"] == before["values_put"] + 1
    assert after["values_asked_for"] == before["values_asked_for"] + 2
    assert after["values_found"] == before["values_found"] + 1


OPEN_PRIVATELY = """
import os
from pegaflow import _native
store = _native.ObjectStore.open(None, pool_bytes=8 << 20)
store.put("key", b"value")
assert os.listdir("/dev/shm") == []
store.close()
assert os.listdir("/dev/shm") == []
"""


def test_a_private_store_leaves_nothing_behind() -> None:
    run_on_tmpfs("/dev/shm", "64m", OPEN_PRIVATELY)
