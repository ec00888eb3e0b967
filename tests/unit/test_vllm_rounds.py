"""Engines that take turns answer each round, and the intervals of their ratios hold what they should."""

import itertools
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks import _timed_connector, _vllm_rounds, sharing, zero_hit
from benchmarks._vllm_rounds import Engine, Round, Start, compared, in_turn, interval, running

ROOT = Path(__file__).parents[2]
FAKE_VLLM = """
from types import SimpleNamespace as Some

class LLM:
    def __init__(self, broken=False, **settings):
        print("whatever vLLM prints")
        if broken:
            raise RuntimeError("no such model")

    def generate(self, prompts, sampling, use_tqdm):
        answer = Some(token_ids=[0] * sampling.max_tokens)
        return [Some(outputs=[answer], num_cached_tokens=prompt["prompt_token_ids"][0]) for prompt in prompts]

def SamplingParams(**settings):
    return Some(**settings)

def TokensPrompt(**settings):
    return settings
"""
"""Of a prompt, as many tokens were cached as its first token says."""


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setattr(_vllm_rounds, "LOGS", tmp_path)
    return {"PYTHONPATH": f"{tmp_path}:{ROOT}"}


def test_rounds_are_answered_at_once_or_one_by_one(fake_vllm: dict[str, str]) -> None:
    starts = {name: Start({}, fake_vllm) for name in ("one", "two")}
    with running("rounds", starts) as engines:
        together = engines["one"].round([[3, 1], [4, 1]])
        alone = engines["two"].round([[3, 1], [4, 1]], together=False)
        pids = [engine.process.pid for engine in engines.values()]
    assert (together.cached, together.requests_ms) == (7, ())
    assert (alone.cached, len(alone.requests_ms)) == (7, 2)
    assert 1e3 * alone.seconds >= sum(alone.requests_ms) * 0.99
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_an_engine_that_does_not_start_ends_the_benchmark_and_names_its_log(fake_vllm: dict[str, str]) -> None:
    starts = {"good": Start({}, fake_vllm), "bad": Start({"broken": True}, fake_vllm)}
    with pytest.raises(SystemExit, match=r"broken-1\.log"), running("broken", starts):
        pass


@pytest.mark.parametrize(
    ("how", "seconds_max", "code"), [("pass", 600.0, 0), ("time.sleep(3600)", 0.2, -signal.SIGKILL)]
)
def test_engines_end_by_themselves_and_those_that_do_not_are_killed(
    monkeypatch: pytest.MonkeyPatch, how: str, seconds_max: float, code: int
) -> None:
    monkeypatch.setattr(_vllm_rounds, "END_SECONDS_MAX", seconds_max)
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys, time; print(flush=True); sys.stdin.read(); {how}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    _vllm_rounds.end_all([process])
    assert process.returncode == code


def test_every_engine_is_first_and_behind_every_other_equally_often() -> None:
    orders = [in_turn(["a", "b", "c"], number) for number in range(600)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    first = Counter(order[0] for order in orders)
    behind = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert all(count == pytest.approx(200, rel=0.2) for count in first.values())
    assert len(behind) == 6
    assert all(count == pytest.approx(200, rel=0.2) for count in behind.values())


def test_intervals_hold_the_median_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_vllm_rounds, "DRAWS", 400)
    draw = random.Random(7)
    held = 0
    for _ in range(200):
        low, high = interval([1.1 * draw.lognormvariate(0, 0.1) for _ in range(30)])
        held += low <= 1.1 <= high
    assert 180 <= held <= 198


def test_rounds_are_compared_pair_by_pair() -> None:
    # One round in which the machine stood still for both changes no ratio.
    theirs = [Round(seconds, 0.5, 0, ()) for seconds in (1.0, 1.0, 9.0, 1.0, 1.0)]
    ours = [Round(1.1 * one.seconds, 0.6, 0, ()) for one in theirs]
    found = {one.name: one for one in compared("x", ours, theirs, "y")}
    assert found["a round, x"].ratio == pytest.approx(1.1)
    ratio = found["ratio of each round, x, to y"]
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.1, 1.1, 1.1))
    assert found["ratio of each round, x, CPU, to y"].value == pytest.approx(1.2)


class FakeEngine(Engine):
    """Takes a second for each prompt, and finds a tenth of its tokens."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def begin(self, prompts: list[list[int]], *, together: bool = True) -> None:  # type: ignore[override]
        self._count = len(prompts)
        self.asked += prompts

    def end(self) -> Round:
        cached = self._count * sharing.WORKLOAD.prompt_tokens // 10
        return Round(float(self._count), 0.0, cached, ())


def test_instances_of_a_fleet_divide_the_requests_and_are_timed_together() -> None:
    engines = [FakeEngine(), FakeEngine()]
    speed, found = sharing.Fleet(list(engines)).round(3)
    assert speed == 2.0
    assert found == pytest.approx(0.1, abs=0.01)
    numbers = range(3 * 2 * sharing.REQUESTS, 4 * 2 * sharing.REQUESTS)
    assert engines[0].asked == [sharing.WORKLOAD.prompt(number) for number in numbers if number % 2 == 0]
    assert engines[1].asked == [sharing.WORKLOAD.prompt(number) for number in numbers if number % 2 == 1]


def test_a_call_of_the_connector_within_another_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(1)
    monkeypatch.setattr(_timed_connector.time, "perf_counter_ns", lambda: next(seconds) * 10**9)
    clock = _timed_connector._Clock(tmp_path)
    inner = clock.timed(lambda: "in")
    outer = clock.timed(lambda: f"{inner()} and out")
    assert outer() == "in and out"
    assert _timed_connector.seconds_in_calls(tmp_path) == 1
    assert inner() == "in"
    assert _timed_connector.seconds_in_calls(tmp_path) == 2
    if (child := os.fork()) == 0:
        with suppress(BaseException):
            outer()
        os._exit(0)
    os.waitpid(child, 0)
    assert inner() == "in"
    assert _timed_connector.seconds_in_calls(tmp_path) == 4, "a process that was forked has a clock of its own"
    names = set(vars(_timed_connector.TimedConnector))
    assert names.isdisjoint({"build_connector_meta", "start_load_kv"}), "without a directory for clocks there are none"


def test_no_prompt_of_the_zero_hit_benchmark_has_a_block_of_another() -> None:
    prompts = [
        tuple(prompt[: zero_hit.BLOCK_TOKENS]) for number in range(50) for prompt in zero_hit.prompts_of(number, 10)
    ]
    assert len(set(prompts)) == 500
