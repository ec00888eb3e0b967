"""Two processes on one pool: one computes prompts, the other waits for them."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegaflow import _native
from tests.engine_races import STEPS_MAX, finish
from tests.unit.mini_engine import MiniEngine
from tests.unit.native_engine import engine_on, open_pool
from tests.unit.pool_processes import open_namespace, python

PROMPT = list(range(500, 542))

# Computes the prompt that each line of input names by its first token.
PREFILL = """
import sys
from tests.engine_races import STEPS_MAX
from tests.unit.native_engine import engine_on, open_pool
engine = engine_on(open_pool(sys.argv[1]), blocks=400, pd_tail_save=True)
print("ready", flush=True)
for line in sys.stdin:
    engine.add([int(line)] + list(range(501, 542)))
    engine.run(STEPS_MAX)
    print("done", flush=True)
"""

# Opens the namespace of the pool's tests, for itself or for a leader, and waits.
MEMBER = """
import sys
from tests.unit.pool_processes import open_namespace
pool, namespace = open_namespace(sys.argv[1], sys.argv[2])
if len(sys.argv) > 3:
    pool.join((int(sys.argv[3]), int(sys.argv[4])))
print("ready", flush=True)
sys.stdin.read()
"""


def started(program: str, *arguments: str) -> "subprocess.Popen[str]":
    process = python(program, *arguments)
    answer(process)
    return process


def answer(process: "subprocess.Popen[str]", request: str = "") -> None:
    """Ask, and wait for a line."""
    assert process.stdin is not None
    assert process.stdout is not None
    if request:
        process.stdin.write(request + "\n")
        process.stdin.flush()
    assert process.stdout.readline() in ("ready\n", "done\n")


@pytest.fixture
def prefill(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """An engine in a process of its own."""
    process = started(PREFILL, str(tmp_path))
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def decode(tmp_path: Path, prefill: Any) -> Iterator[MiniEngine]:
    """An engine that waits for whole prompts."""
    pool = open_pool(str(tmp_path))
    yield engine_on(pool, blocks=400, pd_tail_load=True, wait_for_full_prefix=True, wait_for_full_prefix_seconds=600.0)
    pool.close()


def test_prompt_arrives_whole_from_another_process(prefill: "subprocess.Popen[str]", decode: MiniEngine) -> None:
    request = decode.add(PROMPT)
    for _ in range(50):
        decode.step()
    assert request.state == "waiting"
    answer(prefill, "500")
    finish(decode)
    assert request.hit_tokens == len(PROMPT)
    assert "full_prefix_incomplete" not in decode.recorder.counters


def test_death_of_the_other_process_ends_the_wait(prefill: "subprocess.Popen[str]", decode: MiniEngine) -> None:
    answer(prefill, "500")
    request = decode.add([501, *PROMPT[1:]])
    for _ in range(50):
        decode.step()
    assert request.state == "waiting"
    prefill.kill()
    prefill.wait()
    decode.run(STEPS_MAX)
    assert request.hit_tokens == 0
    assert decode.recorder.counters["full_prefix_incomplete"] == 1
    other = decode.add(PROMPT)
    finish(decode)
    assert other.hit_tokens == len(PROMPT)


def test_others_in_a_namespace_are_those_that_live_and_use_it_for_themselves(tmp_path: Path) -> None:
    pool, namespace = open_namespace("members", str(tmp_path))
    other_namespace = pool.namespace(bytes(32), 0, [4096])
    assert namespace.others() == 0
    row, epoch = pool.member()
    leader = started(MEMBER, "members", str(tmp_path))
    follower = started(MEMBER, "members", str(tmp_path), str(row), str(epoch))
    assert (namespace.others(), other_namespace.others()) == (1, 0)
    second = _native.Pool.open("members", shm_dir=str(tmp_path))
    assert namespace.others() == 1
    second.close()
    leader.kill()
    leader.communicate()
    assert namespace.others() == 0
    follower.kill()
    follower.communicate()
    pool.close()
