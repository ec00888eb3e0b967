"""What a pool says to Python when files, options, memory or processes are not as they should be."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pegaflow import _native
from pegaflow.errors import ForkedProcess, InvalidArgument, PegaFlowError, PoolRefused, ShmFull
from tests.own_tmpfs import run_on_tmpfs
from tests.patience import WAIT_SECONDS_MAX, await_, times_slept
from tests.unit.native_pools import FINGERPRINT, keys, open_pool, reserve_all

ROOT = Path(__file__).parents[2]
SLEEPS_MAX = 1000
"""A wait of 20 ms for a lock is over after 400."""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[_native.Pool]:
    opened = open_pool(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def namespace(pool: _native.Pool) -> _native.Namespace:
    """A namespace with four blocks."""
    made = pool.namespace(FINGERPRINT, 0, [4096])
    refs = reserve_all(made, keys(4))
    assert pool.mark_written(0, refs) == 4
    assert pool.publish(refs) == 4
    return made


@pytest.mark.parametrize(
    "options",
    [
        {"pool_bytes": "8gb"},
        {"pool_bytes": -1},
        {"pool_bytes": 1.5},
        {"pool_bytes": 2**64},
        {"segment_bytes": []},
        {"slots_max": "many"},
        {"shm_dir": 5},
        {"label": b"bytes"},
        {"create": "perhaps"},
        {"no_such_option": 1},
    ],
    ids=str,
)
def test_options_of_the_wrong_type_are_refused_and_create_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    arguments = {"shm_dir": str(tmp_path)} | options
    with pytest.raises((TypeError, OverflowError, InvalidArgument)):
        _native.Pool.open("options", **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "x" * 65, "a\0b", "\N{SNOWMAN}"])
def test_names_that_are_no_names_are_refused_and_create_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="pool name"):
        _native.Pool.open(name, shm_dir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="choose"):
        _native.Pool.open("p", shm_dir=str(tmp_path / "absent"))


def test_a_foreign_file_is_refused_and_never_followed(pool: Any, tmp_path: Path) -> None:
    place = Path(pool.path)
    pool.close()
    control = place / "control"
    control.rename(tmp_path / "elsewhere")
    control.symlink_to(tmp_path / "elsewhere")
    for look in (lambda: open_pool(tmp_path), lambda: _native.inspect(str(place)), lambda: _native.verify(str(place))):
        with pytest.raises(PoolRefused, match="symbolic link"):
            look()
    control.unlink()
    control.write_bytes(os.urandom(100_000))
    control.chmod(0o600)
    with pytest.raises(PoolRefused, match="remove it with `pegaflow rm --force /"):
        open_pool(tmp_path)
    assert json.loads(_native.list_pools(str(tmp_path)))[0]["state"] == "refused"


def in_child(work: Callable[[], None]) -> None:
    """Run ``work`` in a forked child, which has to end well."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0, "the child failed"


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except ForkedProcess as error:
        return "before fork()" in str(error)
    return False


def test_a_forked_child_is_refused_everything_and_its_parent_unharmed(pool: Any, namespace: Any) -> None:
    leased = namespace.lease(keys(4))

    def child() -> None:
        calls = (
            lambda: namespace.lookup(keys(4)),
            lambda: namespace.lease(keys(4)),
            lambda: namespace.reserve(keys(8)),
            lambda: namespace.reset(),
            lambda: pool.release(leased),
            lambda: pool.reap(),
            lambda: pool.member(),
            lambda: pool.namespace(FINGERPRINT, 0, [4096]),
        )
        assert all(refused(call) for call in calls)
        pool.close()

    in_child(child)
    assert namespace.lookup(keys(4)) == 4
    pool.release(leased)
    assert json.loads(_native.verify(pool.path))["ok"]


def test_a_forked_child_may_open_the_pool_for_itself(pool: Any, namespace: Any, tmp_path: Path) -> None:
    parent = pool.member()

    def child() -> None:
        mine = open_pool(tmp_path)
        assert mine.member() != parent
        assert mine.namespace(FINGERPRINT, 0, [4096]).lookup(keys(4)) == 4
        mine.close()

    in_child(child)
    assert pool.member() == parent
    assert len(json.loads(_native.inspect(pool.path))["processes"]) == 1


def test_multiprocessing_by_fork_gets_the_same_sentence(pool: Any, namespace: Any) -> None:
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()

    def child() -> None:
        try:
            namespace.lookup(keys(4))
        except PegaFlowError as error:
            said.put(f"{type(error).__name__}: {error}")

    process = context.Process(target=child)
    process.start()
    assert "ForkedProcess: pool 'native' was opened before fork(): open it again" in said.get()
    process.join()
    assert process.exitcode == 0


HOLDER = """
import os, sys, time
from tests.unit.native_pools import FINGERPRINT, keys, open_pool
from pathlib import Path
pool = open_pool(Path(sys.argv[1]))
namespace = pool.namespace(FINGERPRINT, 0, [4096])
leased, reserved = namespace.lease(keys(4)), namespace.reserve(keys(2, prefix=b"more"))
assert len(leased) == 4 and len(reserved) == 2
if os.fork() == 0:
    time.sleep(3600)
    os._exit(0)
print("ready", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_held_comes_back_although_its_child_lives(
    pool: Any, namespace: Any, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    pipe = subprocess.PIPE
    holder = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        assert namespace.stats()["blocks_reserved"] == 2
        holder.kill()
        holder.wait()

        def is_reaped() -> bool:
            pool.reap()
            facts = json.loads(_native.inspect(pool.path))
            return [process["alive"] for process in facts["processes"]] == [True]

        await_(is_reaped)
        assert namespace.stats()["blocks_reserved"] == 0
        report = json.loads(_native.verify(pool.path))
        assert report["ok"], report["problems"]
    finally:
        # The sleeping child.
        os.killpg(holder.pid, signal.SIGKILL)


STOPPED = """
import sys
from pathlib import Path
from pegaflow import _native
from tests.unit.native_pools import FINGERPRINT, keys, open_pool, reserve_all
pool = open_pool(Path(sys.argv[1]))
namespace = pool.namespace(FINGERPRINT, 0, [4096])
refs = reserve_all(namespace, keys(2, prefix=b"stopped"))
pool.mark_written(0, refs)
_native.crash_point_arm("publish.odd", "stop")
assert pool.publish(refs) == 2
pool.close()
"""


def test_siblings_of_a_stopped_process_miss_instead_of_waiting(pool: Any, namespace: Any, tmp_path: Path) -> None:
    stopped = subprocess.Popen([sys.executable, "-c", STOPPED, str(tmp_path)], cwd=ROOT)
    try:
        assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])
        # Two hundred of them are behind the lock that it holds.
        absent = keys(200_000, prefix=b"absent") + keys(2, prefix=b"stopped")
        before = times_slept()
        assert namespace.contains(absent) == bytes(len(absent))
        assert times_slept() - before < SLEEPS_MAX, "one wait of 20 ms, not one for each key"
        assert namespace.lookup(keys(4)) == 4
        assert pool.stats()["lock_timeouts"] >= 1
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.wait(WAIT_SECONDS_MAX) == 0
    assert namespace.lookup(keys(2, prefix=b"stopped")) == 2
    assert json.loads(_native.verify(pool.path))["ok"]


def test_a_crash_point_in_the_environment_kills_where_it_says(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.unit.native_pools import open_pool as o; o(Path(sys.argv[1]))"
    )
    for point in ("create.linked", "process.registered"):
        run = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=os.environ | {"PEGAFLOW_CRASH_POINT": point}
        )
        assert run.returncode == -signal.SIGKILL, point
    pool = open_pool(tmp_path)
    pool.reap()
    assert not pool.created
    assert sorted(os.listdir(pool.path)) == ["control", "gone-v1"]
    assert json.loads(_native.verify(pool.path))["ok"]
    pool.close()


def grow_until_full(shm_dir: str) -> None:
    """In a tmpfs of 64 MiB: store until the pool cannot grow, and go on."""
    pool = _native.Pool.open(
        "small", shm_dir=shm_dir, pool_bytes=1 << 30, segment_bytes=4 << 20, slots_max=1 << 16, policy="lru"
    )
    namespace = pool.namespace(FINGERPRINT, 0, [64 << 10])
    stored, deadline = 0, time.monotonic() + WAIT_SECONDS_MAX
    while stored < 2000:
        assert time.monotonic() < deadline, pool.last_grow_error()
        refs = [ref for _, ref in namespace.reserve([stored.to_bytes(8, "big")])]
        pool.mark_written(0, refs)
        stored += pool.publish(refs)
        if not refs:
            time.sleep(0.001)
    assert "--shm-size" in str(pool.last_grow_error())
    assert pool.stats()["grow_failures"] > 0
    assert pool.stats()["blocks_evicted"] > 0
    slots = namespace.stats()["slots"]
    newest = [number.to_bytes(8, "big") for number in range(stored - slots, stored)]
    assert namespace.contains(newest) == b"\1" * slots
    with pytest.raises(ShmFull, match="--shm-size"):
        _native.Pool.open("huge", shm_dir=shm_dir, pool_bytes=1 << 40, slots_max=1 << 26)
    assert json.loads(_native.verify(pool.path))["ok"]
    pool.close()


def test_a_file_system_of_64_mib_is_an_error_message_and_no_bus_error(tmp_path: Path) -> None:
    code = f"from tests.multiprocess import test_pool_faults as t\nt.grow_until_full({str(tmp_path)!r})"
    run_on_tmpfs(tmp_path, "64m", code)
