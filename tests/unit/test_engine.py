"""``PegaEngine`` in one process: values of every kind and size, full pools, options, threads."""

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pegaflow import PegaEngine, _native
from pegaflow.errors import InvalidArgument, PoolClosed, PoolFull, PoolRefused
from tests.own_tmpfs import run_on_tmpfs
from tests.patience import patiently

KIB = 1 << 10
MIB = 1 << 20
# Around what one small, medium and large slot hold, and where the next larger class takes over.
BORDERS = (0, 496, 512, 496 + 8 * KIB, 16 * KIB, 496 + 16 * KIB, 496 + 512 * KIB, MIB, 496 + MIB, 3 * MIB)

sizes = st.sampled_from(BORDERS).flatmap(lambda border: st.integers(max(0, border - 40), border + 40))


@pytest.fixture(scope="module")
def engine() -> Iterator[PegaEngine]:
    """A private engine; values go when it is full."""
    with PegaEngine(pool_size="64mb", evict=True) as opened:
        yield opened


@given(bytes_=sizes, seed=st.integers(0, 2**32), key=st.text(max_size=30))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_values_around_the_borders_of_slots_come_back_equal(
    engine: PegaEngine, bytes_: int, seed: int, key: str
) -> None:
    value = random.Random(seed).randbytes(bytes_)
    engine.put(key, value)
    assert engine.get(key) == value


@given(value=st.text(st.characters(exclude_categories=()), max_size=2000) | st.binary(max_size=3000))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_text_and_bytes_come_back_equal_and_of_their_type(engine: PegaEngine, value: str | bytes) -> None:
    engine.put("any", value)
    got = engine.get("any")
    assert type(got) is type(value)
    assert got == value


@pytest.mark.parametrize(
    "value",
    [bytearray(b"mutable"), memoryview(b"a view")[2:], numpy.arange(10_000).reshape(100, 100), memoryview(b"")],
    ids=lambda value: type(value).__name__,
)
def test_any_bytes_like_comes_back_as_bytes(engine: PegaEngine, value: Any) -> None:
    engine.put("bytes-like", value)
    assert engine.get("bytes-like") == bytes(value)
    removed = engine.remove("bytes-like")
    assert type(removed) is bytes


@pytest.mark.parametrize("value", [5, None, ["a"], numpy.eye(3)[:, 1], object()], ids=repr)
def test_a_value_of_another_type_is_refused_and_stores_nothing(engine: PegaEngine, value: Any) -> None:
    with pytest.raises(InvalidArgument):
        engine.put("refused", value)
    assert "refused" not in engine


@pytest.mark.parametrize("key", [5, None, b"bytes", "lone \ud800 surrogate"], ids=ascii)
def test_a_key_that_is_no_text_is_refused_everywhere(engine: PegaEngine, key: Any) -> None:
    for call in (
        lambda: engine.put(key, b""),
        lambda: engine.get(key),
        lambda: engine.remove(key),
        lambda: key in engine,
    ):
        with pytest.raises(InvalidArgument):
            call()


def test_a_key_that_is_too_long_is_refused_and_never_found(engine: PegaEngine) -> None:
    with pytest.raises(InvalidArgument, match="65537 bytes is too long"):
        engine.put("x" * (64 * KIB + 1), b"")
    assert engine.get("x" * (64 * KIB + 1)) is None
    engine.put("x" * (64 * KIB), "longest")
    assert engine.remove("x" * (64 * KIB)) == "longest"


class EngineAgainstDict(RuleBasedStateMachine):
    """Any sequence of operations does to an engine what it does to a dict."""

    keys = st.sampled_from(["", "a", "b", "\u00e9", "k" * 600, "k" * 601])
    values = st.tuples(sizes, st.booleans(), st.integers(0, 255))

    def __init__(self) -> None:
        super().__init__()
        self.engine = PegaEngine(pool_size="64mb")
        self.model: dict[str, str | bytes] = {}

    def teardown(self) -> None:
        self.engine.close()

    @rule(key=keys, shape=values)
    def put(self, key: str, shape: tuple[int, bool, int]) -> None:
        bytes_, is_text, seed = shape
        value = chr(seed % 90 + 33) * bytes_ if is_text else bytes([seed]) * bytes_
        self.engine.put(key, value)
        self.model[key] = value

    @rule(key=keys)
    def remove(self, key: str) -> None:
        assert self.engine.remove(key) == self.model.pop(key, None)

    @rule(key=keys)
    def get(self, key: str) -> None:
        assert self.engine.get(key) == self.model.get(key)
        assert (key in self.engine) == (key in self.model)

    @invariant()
    def has_the_same_keys(self) -> None:
        assert len(self.engine) == len(self.model)
        assert sorted(self.engine) == sorted(self.model)


def test_an_engine_does_what_a_dict_does() -> None:
    run_state_machine_as_test(EngineAgainstDict, settings=settings(deadline=None, max_examples=30))


def test_a_value_of_a_gibibyte_comes_back_and_a_larger_one_is_refused() -> None:
    with PegaEngine(pool_size="1200mib", checksum=False) as engine:
        value = bytearray(1 << 30)
        value[::4096] = os.urandom(1 << 18)
        engine.put("large", value)
        got = engine.get("large")
        assert isinstance(got, bytes)
        assert got == value
        value += b"x"
        with pytest.raises(InvalidArgument, match="1 GiB"):
            engine.put("large", value)
        assert engine.get("large") == got


def test_a_full_pool_refuses_and_loses_nothing() -> None:
    with PegaEngine(pool_size="4mib") as engine:
        stored = 0

        def fill() -> None:
            nonlocal stored
            while True:
                engine.put(f"key {stored}", b"%d" % stored * 5000)
                stored += 1

        with pytest.raises(PoolFull, match="remove values"):
            fill()
        with pytest.raises(PoolFull):
            engine.put("key 0", bytes(3 * MIB))
        assert len(engine) == stored
        assert all(engine.get(f"key {index}") == b"%d" % index * 5000 for index in range(stored))
        engine.remove("key 0")
        engine.put("another", b"fits again" * 400)


def test_a_value_larger_than_the_pool_is_refused_in_one_sentence() -> None:
    with PegaEngine(pool_size="4mib", evict=True) as engine:
        engine.put("key", "value")
        with pytest.raises(PoolFull, match=r"larger than a pool of 4194304 bytes .* larger pool_size"):
            engine.put("key", bytes(5 * MIB))
        assert engine.get("key") == "value"


def test_with_evict_the_newest_values_stay() -> None:
    with PegaEngine(pool_size="4mib", evict=True) as engine:
        for index in range(2000):
            engine.put(f"key {index}", bytes(8 * KIB))
            assert engine.get("key 0") is not None, "it is used all the time"
        assert engine.get("key 1999") is not None
        assert engine.get("key 1") is None
        assert engine.stats()["values_evicted"] > 1000


@pytest.mark.parametrize(
    "options",
    [
        {"name": 5},
        {"name": "no/slash"},
        {"name": ""},
        {"pool_size": "many"},
        {"pool_size": 1.5},
        {"pool_size": True},
        {"pool_size": 1000},
        {"pool_size": -1},
        {"evict": "yes"},
        {"checksum": 1},
        {"shm_dir": 5},
        {"shm_dir": b"/dev/shm"},
        {"shm_dir": "/no/such/directory"},
    ],
    ids=repr,
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        PegaEngine(**options)


def test_another_sort_of_file_in_place_of_the_pool_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"pegaflow-v{_native.LAYOUT_VERSION}-{os.geteuid()}-mine").write_bytes(b"mine")
    with pytest.raises(PoolRefused):
        PegaEngine(name="mine", shm_dir=tmp_path)
    assert (tmp_path / f"pegaflow-v{_native.LAYOUT_VERSION}-{os.geteuid()}-mine").read_bytes() == b"mine"


def test_a_closed_engine_refuses_everything_but_closing() -> None:
    with PegaEngine(pool_size="4mib") as engine:
        engine.put("key", "value")
    engine.close()
    calls = [
        lambda: engine.put("key", b""),
        lambda: engine.get("key"),
        lambda: engine.remove("key"),
        lambda: "key" in engine,
        lambda: len(engine),
        lambda: list(engine),
        lambda: engine.stats(),
    ]
    for call in calls:
        with pytest.raises(PoolClosed):
            call()
    assert "private" in repr(engine)


OPEN_PRIVATELY = """
import os
from pegaflow import PegaEngine
with PegaEngine() as one, PegaEngine() as other:
    one.put("key", b"value")
    assert "key" not in other
    assert one.path is None
    assert os.listdir("/dev/shm") == []
assert os.listdir("/dev/shm") == []
"""


def test_a_private_engine_leaves_nothing_and_shares_nothing() -> None:
    run_on_tmpfs("/dev/shm", "64m", OPEN_PRIVATELY)


def test_values_of_a_named_engine_stay_when_it_is_closed(tmp_path: Path) -> None:
    with PegaEngine(name="stays", shm_dir=tmp_path, pool_size="8mib") as engine:
        engine.put("text", "text")
        engine.put("bytes", bytes(2 * MIB))
        assert engine.path == str(tmp_path / f"pegaflow-v{_native.LAYOUT_VERSION}-{os.geteuid()}-stays")
    with PegaEngine(name="stays", shm_dir=tmp_path) as engine:
        assert engine.pool_bytes == 8 * MIB
        assert (engine.get("text"), engine.get("bytes")) == ("text", bytes(2 * MIB))
        assert sorted(engine) == ["bytes", "text"]


def test_two_engines_of_one_name_are_one_store(tmp_path: Path) -> None:
    with (
        PegaEngine(name="one", shm_dir=tmp_path, pool_size="8mib") as first,
        PegaEngine(name="one", shm_dir=tmp_path) as second,
    ):
        first.put("key", "value")
        assert second.remove("key") == "value"
        assert first.get("key") is None
        second.close()
        first.put("key", "still open")


def test_iterating_while_changing_sees_what_was_there_all_along() -> None:
    with PegaEngine(pool_size="16mib") as engine:
        for index in range(500):
            engine.put(f"stays {index}", b"")
        stop = threading.Event()

        def change() -> None:
            number = 0
            while not stop.is_set():
                patiently(partial(engine.put, f"stays {number % 500}", bytes(number % 700)))
                patiently(lambda: engine.put("comes and goes", b""))
                patiently(lambda: engine.remove("comes and goes"))
                number += 1

        thread = threading.Thread(target=change)
        thread.start()
        try:
            for _ in range(20):
                keys = [key for key in patiently(lambda: list(engine)) if key != "comes and goes"]
                assert sorted(keys) == sorted(f"stays {index}" for index in range(500))
                assert 500 <= patiently(lambda: len(engine)) <= 502
        finally:
            stop.set()
            thread.join()


def test_a_get_during_replacement_sees_one_of_the_values_whole() -> None:
    with PegaEngine(pool_size="64mib") as engine:
        values = [bytes([number]) * (number * 300_000 + 10) for number in range(1, 5)]
        engine.put("key", values[0])
        wrong: list[object] = []

        def read() -> None:
            for _ in range(300):
                got = patiently(lambda: engine.get("key"))
                if got not in values:
                    wrong.append(got if got is None else len(got))

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        while any(reader.is_alive() for reader in readers):
            for value in values:
                patiently(partial(engine.put, "key", value))
        assert wrong == []


def test_threads_with_keys_of_their_own_see_their_own_values() -> None:
    with PegaEngine(pool_size="64mib") as engine:
        failures: list[str] = []

        def work(number: int) -> None:
            picks = random.Random(number)
            mine: dict[str, bytes] = {}
            for _ in range(3000):
                key = f"{number} {picks.randrange(8)}"
                if picks.random() < 0.5:
                    mine[key] = picks.randbytes(picks.choice((8, 700, 9000, 40_000)))
                    patiently(partial(engine.put, key, mine[key]))
                elif picks.random() < 0.3:
                    if patiently(partial(engine.remove, key)) != mine.pop(key, None):
                        failures.append(f"remove {key}")
                elif patiently(partial(engine.get, key)) != mine.get(key):
                    failures.append(f"get {key}")

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(work, range(6)))
        assert failures == []
