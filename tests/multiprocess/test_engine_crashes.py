"""kill -9 on the way through ``put`` and ``remove``: the old value or the new one is left, and no slot lost."""

import signal
from pathlib import Path

import pytest

from pegaflow import PegaEngine, PoolFull
from tests.multiprocess.engine_crash import (
    KEY,
    NEW,
    OLD,
    SMALL,
    bytes_held,
    check_sound,
    open_engine,
)
from tests.multiprocess.engine_processes import start
from tests.patience import WAIT_SECONDS_MAX

pytestmark = pytest.mark.kill

PUT_POINTS = (
    "lease.marked",
    "lease.released",
    "reserve.claimed",
    "reserve.keyed",
    "part.copied",
    "part.written",
    "publish.locked",
    "publish.odd",
    "publish.linked",
    "publish.sealed",
    "replace.superseded",
    "free.freed",
    "publish.unlocked",
)
# Only values of several slots link members, and only they make this pool grow.
LARGE_PUT_POINTS = ("chain.linked", "grow.claimed", "grow.segment_created", "grow.allocated", "grow.ready")
REMOVE_POINTS = ("lease.marked", "evict.claimed", "evict.unlinked", "lease.released", "free.freed")
EVICT_POINTS = ("evict.locked", "evict.claimed", "evict.unlinked", "evict.freeing", "free.freed")
RETIRE_POINTS = ("retire.claimed", "retire.dropping")


def die(function: str, *arguments: object) -> None:
    """Run a function of ``engine_crash`` in a process that has to be killed on its way."""
    process = start("call", "tests.multiprocess.engine_crash", function, *arguments)
    output, errors = process.communicate(timeout=WAIT_SECONDS_MAX)
    assert process.returncode == -signal.SIGKILL, f"it never came by there: {output} {errors}"


def fill(engine: PegaEngine, value: bytes) -> None:
    """Put values until there is no room."""
    for number in range(100_000):
        try:
            engine.put(f"filler {number}", value)
        except PoolFull:
            return
    raise AssertionError("the pool never got full")


def check_can_be_removed(engine: PegaEngine, value: str | bytes) -> None:
    """The value is there once: after its removal neither it nor an older one comes back, and all slots are free."""
    assert engine.remove(KEY) == value
    assert engine.get(KEY) is None
    check_sound(engine)
    assert (len(engine), list(engine), bytes_held(engine)) == (0, [], 0)


@pytest.mark.parametrize(("point", "new"), [(point, "small") for point in PUT_POINTS])
def test_a_killed_put_of_a_small_value_leaves_the_old_or_the_new_one(tmp_path: Path, point: str, new: str) -> None:
    check_killed_put(tmp_path, point, new)


@pytest.mark.parametrize("point", PUT_POINTS + LARGE_PUT_POINTS)
def test_a_killed_put_of_many_slots_leaves_the_old_or_the_new_one(tmp_path: Path, point: str) -> None:
    check_killed_put(tmp_path, point, "new")


def check_killed_put(shm_dir: Path, point: str, new: str) -> None:
    with open_engine(shm_dir) as engine:
        engine.put(KEY, OLD)
        die("die_in_put", "crash", str(shm_dir), point, new, False)
        left = engine.get(KEY)
        assert left in (OLD, {"new": NEW, "small": SMALL}[new])
        check_sound(engine)
        assert engine.get(KEY) == left
        assert (len(engine), list(engine)) == (1, [KEY])
        check_can_be_removed(engine, left)
        fill(engine, OLD)


@pytest.mark.parametrize("point", [point for point in PUT_POINTS if point not in ("lease.marked", "lease.released")])
def test_a_killed_first_put_leaves_the_value_or_nothing(tmp_path: Path, point: str) -> None:
    if point in ("replace.superseded", "free.freed"):
        point = "chain.linked"
    with open_engine(tmp_path) as engine:
        die("die_in_put", "crash", str(tmp_path), point, "new", False)
        assert engine.get(KEY) in (None, NEW)
        check_sound(engine)
        if KEY in engine:
            check_can_be_removed(engine, NEW)
        assert bytes_held(engine) == 0


@pytest.mark.parametrize("point", REMOVE_POINTS)
def test_a_killed_remove_leaves_the_value_or_nothing(tmp_path: Path, point: str) -> None:
    with open_engine(tmp_path) as engine:
        engine.put(KEY, OLD)
        die("die_in_remove", "crash", str(tmp_path), point)
        check_sound(engine)
        assert engine.get(KEY) in (None, OLD)
        if KEY in engine:
            check_can_be_removed(engine, OLD)
        assert bytes_held(engine) == 0


@pytest.mark.parametrize("point", EVICT_POINTS)
def test_a_killed_eviction_costs_old_values_alone(tmp_path: Path, point: str) -> None:
    check_killed_eviction(tmp_path, point, b"filler" * 3000)


@pytest.mark.parametrize("point", RETIRE_POINTS)
def test_a_killed_change_of_a_segments_size_class_costs_old_values_alone(tmp_path: Path, point: str) -> None:
    check_killed_eviction(tmp_path, point, SMALL)


def check_killed_eviction(shm_dir: Path, point: str, filler: bytes) -> None:
    with open_engine(shm_dir) as engine:
        engine.put(KEY, SMALL)
        fill(engine, filler)
        count = len(engine)
        assert engine.get(KEY) == SMALL, "and so it is used last"
        die("die_in_put", "crash", str(shm_dir), point, "new", True)
        check_sound(engine)
        assert engine.get(KEY) in (SMALL, NEW)
        assert count // 2 < len(engine) <= count
        assert all(engine.get(key) == filler for key in engine if key != KEY)
    with open_engine(shm_dir, evict=True) as engine:
        engine.put(KEY, NEW)
        assert engine.get(KEY) == NEW
