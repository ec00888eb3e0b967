"""Several processes on one ``PegaEngine``: sharing, hammering, random kills, restart, fork."""

import os
import random
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from pegaflow import ForkedProcess, PegaEngine, PoolBusy
from tests.multiprocess.engine_crash import KEY, OLD, bytes_held, check_sound
from tests.multiprocess.engine_processes import CHECKED_MIN, KEYS, finish, is_whole, make_value, start
from tests.patience import await_, patiently, times_slept

MIB = 1 << 20
HAMMER_SECONDS = 3.0
KILL_SECONDS = 12.0
KILLS_MIN = 25
SLEEPS_MAX = 1000
"""Of a thread that is in nobody's way; a wait for a stopped process has some thousands."""


def test_what_one_process_puts_another_gets_after_it_is_gone(tmp_path: Path) -> None:
    finish(start("put_all", "shared", str(tmp_path), 1))
    with PegaEngine(name="shared", shm_dir=tmp_path) as engine:
        assert sorted(engine) == sorted(KEYS)
        assert all((value := engine.get(key)) is not None and is_whole(key, value) for key in KEYS)


@pytest.mark.parametrize("evict", [False, True])
def test_processes_that_hammer_one_engine_never_get_a_wrong_value(tmp_path: Path, evict: bool) -> None:
    # With eviction the pool is too small for all values.
    with PegaEngine(name="shared", shm_dir=tmp_path, pool_size=(4 if evict else 256) * MIB, evict=evict) as engine:
        processes = [start("hammer", "shared", str(tmp_path), seed, HAMMER_SECONDS, evict) for seed in range(4)]
        assert all(int(finish(process)) >= CHECKED_MIN for process in processes)
        check_sound(engine)
        for key in engine:
            value = engine.remove(key)
            assert value is not None
            assert is_whole(key, value)
        assert bytes_held(engine) == 0


@pytest.mark.kill
def test_processes_killed_at_random_moments_leave_whole_values_and_no_leak(tmp_path: Path) -> None:
    picks = random.Random(5)
    kills = 0
    with PegaEngine(name="shared", shm_dir=tmp_path, pool_size=256 * MIB) as engine:
        seeds = iter(range(10_000))
        processes = [start("hammer", "shared", str(tmp_path), next(seeds), 600.0, False) for _ in range(3)]
        deadline = time.monotonic() + KILL_SECONDS
        while kills < KILLS_MIN or time.monotonic() < deadline:
            time.sleep(picks.random() * 0.3)
            victim = picks.randrange(len(processes))
            if not patiently(partial(list, engine)):
                continue
            assert processes[victim].poll() is None, processes[victim].communicate()[1]
            processes[victim].kill()
            assert processes[victim].wait() == -signal.SIGKILL
            processes[victim].communicate()
            kills += 1
            processes[victim] = start("hammer", "shared", str(tmp_path), next(seeds), 600.0, False)
            for key in KEYS:
                value = patiently(partial(engine.get, key))
                assert value is None or is_whole(key, value)
                if picks.random() < 0.1:
                    patiently(partial(engine.put, key, make_value(picks, key)))
        for process in processes:
            process.kill()
            process.communicate()
        check_sound(engine)
        for key in KEYS:
            patiently(partial(engine.remove, key))
        check_sound(engine)
        assert (len(engine), bytes_held(engine)) == (0, 0)


def test_a_value_held_by_a_reader_outlives_the_writers_of_other_processes(tmp_path: Path) -> None:
    with PegaEngine(name="shared", shm_dir=tmp_path, pool_size=64 * MIB) as engine:
        picks = random.Random(1)
        engine.put(KEYS[0], make_value(picks, KEYS[0]))
        writers = [start("hammer", "shared", str(tmp_path), seed, 2.0, False) for seed in range(2)]
        while any(writer.poll() is None for writer in writers):
            for key in KEYS:
                value = patiently(partial(engine.get, key))
                assert value is None or is_whole(key, value)
        for writer in writers:
            finish(writer)


@pytest.mark.parametrize("name", [None, "shared"])
def test_a_forked_child_is_told_to_open_its_own_and_harms_nobody(tmp_path: Path, name: str | None) -> None:
    with PegaEngine(name=name, shm_dir=tmp_path, pool_size=8 * MIB) as engine:
        engine.put("key", "value")
        child = os.fork()
        if child == 0:
            os._exit(use_in_child(engine, name, tmp_path))
        assert os.waitpid(child, 0)[1] == 0
        assert engine.get("key") == "value"
        assert engine.get("of the child") == (None if name is None else "put")
        engine.put("key", bytes(MIB))
        assert engine.remove("key") == bytes(MIB)


def use_in_child(engine: PegaEngine, name: str | None, shm_dir: Path) -> int:
    """0 if every call says what to do and a new engine works."""
    calls = [
        lambda: engine.put("key", b""),
        lambda: engine.get("key"),
        lambda: engine.remove("key"),
        lambda: "key" in engine,
        lambda: len(engine),
        lambda: list(engine),
        lambda: engine.stats(),
    ]
    for number, call in enumerate(calls):
        try:
            call()
        except ForkedProcess:
            continue
        except BaseException:
            return 100 + number
        return 10 + number
    engine.close()
    with PegaEngine(name=name, shm_dir=shm_dir, pool_size=8 * MIB) as own:
        own.put("of the child", "put")
        return int((own.get("key") == "value") != (name is not None))


def test_a_process_stopped_in_a_put_costs_a_bounded_wait_for_its_key_alone(tmp_path: Path) -> None:
    with PegaEngine(name="shared", shm_dir=tmp_path, pool_size=64 * MIB) as engine:
        process = start_stopping("publish.linked", tmp_path)
        with pytest.raises(PoolBusy, match="is it stopped"):
            engine.get(KEY)
        before = times_slept()
        for key in KEYS:
            engine.put(key, "value")
            assert engine.get(key) == "value"
        others = times_slept() - before
        os.kill(process.pid, signal.SIGCONT)
        finish(process)
        assert engine.get(KEY) == OLD
        assert others < SLEEPS_MAX


def test_a_process_stopped_while_it_makes_the_pool_grow_is_not_waited_for(tmp_path: Path) -> None:
    with PegaEngine(name="shared", shm_dir=tmp_path, pool_size=64 * MIB) as engine:
        engine.put("small", "value")
        process = start_stopping("grow.claimed", tmp_path)
        engine.put("needs the slots that the other one makes", bytes(30_000))
        os.kill(process.pid, signal.SIGCONT)
        finish(process)
        assert engine.get(KEY) == OLD
        assert engine.get("needs the slots that the other one makes") == bytes(30_000)
        check_sound(engine)


def start_stopping(point: str, shm_dir: Path) -> "subprocess.Popen[str]":
    """A process that puts ``KEY`` and has stopped at a crash point on its way."""
    process = start("call", "tests.multiprocess.engine_crash", "stop_in_put", "shared", str(shm_dir), point)
    wait_until_stopped(process.pid)
    return process


def wait_until_stopped(pid: int) -> None:
    await_(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
