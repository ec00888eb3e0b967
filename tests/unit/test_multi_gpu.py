"""The benchmark with several instances, without vLLM: what it starts, how it deals requests out, what it reports."""

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _gpu_instances, _gpu_scenarios
from benchmarks._gpu_instances import Instance, Kind, transfer
from benchmarks._gpu_scenarios import Scenarios, gaps_ms, hit_rate, kv_bytes_per_token, ttft_ms
from benchmarks._model_shapes import SHAPES
from benchmarks.multi_gpu import KINDS, parse, table

CHILD = """
import json, os, sys, time
settings = json.load(open(sys.argv[1]))
name = (settings["transfer"] or {}).get("kv_connector", "none")
if name == "OffloadingConnector":
    print("ValueError: it does | not like it here", file=sys.stderr)
    sys.exit(1)
with open(sys.argv[1] + ".asked", "a") as asked:
    print(json.dumps({"import_s": 1.0, "start_s": 2.5}), flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        if "digests" in wanted:
            print(json.dumps([list(range(wanted["digests"]))] * 2), flush=True)
            continue
        if "ask" not in wanted:
            print(json.dumps({"vllm:pega_registered_bytes": 3e9}), flush=True)
            continue
        answers = []
        for prompt in wanted["ask"]:
            now = time.clock_gettime(time.CLOCK_MONOTONIC)
            came = [now + 0.01 * (number + 1) for number in range(wanted["output_tokens"])]
            found = len(prompt) // 2 if name != "none" else 0
            answers.append({"began": now, "came": came, "cached": found, "prompt_tokens": len(prompt), "tokens": "t"})
            print(prompt[-1], file=asked, flush=True)
        print(json.dumps(answers), flush=True)
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(_gpu_instances, "CHILD", child)
    monkeypatch.setattr(_gpu_scenarios, "SHM_DIR", tmp_path)
    for name in ("SETTLE_SECONDS", "KILL_AFTER_SECONDS", "REPORT_SECONDS"):
        monkeypatch.setattr(_gpu_scenarios, name, 0.01)
    arguments = ["--tiny", "--gpus", "0", "--seconds-max", "600", "--kinds", "ours", "ours-apart", "offloading", "none"]
    return parse([*arguments, "--out", str(tmp_path / "out.json")])


def run(options: argparse.Namespace, scratch: Path, name: str) -> dict[tuple[str, str], str]:
    scenarios = Scenarios(options, scratch)
    scenarios.run(name)
    assert all(row["scenario"] == name for row in scenarios.rows)
    return {(row["cache"], row["what"]): row["value"] for row in scenarios.rows}


def test_every_kind_of_cache_gets_the_same_requests_and_one_that_fails_is_a_row(options: Any, tmp_path: Path) -> None:
    rows = run(options, tmp_path, "sharing")
    hits = {cache: value for (cache, what), value in rows.items() if what == "tokens of prompts that were cached"}
    assert hits == {"ours, one pool": "50.0 %", "ours, a pool each": "50.0 %", "no host cache": "0.0 %"}
    assert "does | not like it" in rows["offloading, a pool each", "failed"]
    asked = {path.name: path.read_text().split() for path in tmp_path.glob("*.asked")}
    assert len(asked) == 6
    each = (options.warm_requests + options.requests) // options.instances
    assert {len(tails) for tails in asked.values()} == {each}
    assert asked["01-ours-one-pool.json.asked"] == asked["01-no-host-cache.json.asked"]
    assert asked["01-ours-one-pool.json.asked"] != asked["02-ours-one-pool.json.asked"]


def test_pools_apart_have_together_what_the_shared_one_has(tmp_path: Path) -> None:
    def extra(kind: Kind, number: int) -> dict[str, Any]:
        settings = transfer(kind, number, 4000, 4, tmp_path, {})
        assert settings is not None
        options: dict[str, Any] = settings["kv_connector_extra_config"]
        return options

    shared = [extra(KINDS["ours"], number) for number in range(4)]
    assert all(one == shared[0] for one in shared)
    assert shared[0]["pegaflow.pool_size"] == 4000
    apart = [extra(KINDS["ours-apart"], number) for number in range(4)]
    assert sum(one["pegaflow.pool_size"] for one in apart) == 4000
    assert len({one["pegaflow.pool_name"] for one in apart}) == 4
    assert extra(KINDS["offloading"], 0) == {"cpu_bytes_to_use": 1000}
    assert transfer(KINDS["none"], 0, 4000, 4, tmp_path, {}) is None


@pytest.mark.parametrize("name", ["kill", "start", "loads", "tp"])
def test_every_other_scenario_ends_with_rows(options: Any, tmp_path: Path, name: str) -> None:
    rows = run(options, tmp_path, name)
    assert rows
    assert not [what for _, what in rows if what == "failed"]
    expected = {
        "kill": "successor: first token of its first prompt / of later ones",
        "start": "nothing more to page-lock after",
        "loads": "all instances at the same time, in sum",
        "tp": "1 ranks: loaded, first token, median / worst",
    }
    assert ("ours, one pool", expected[name]) in rows


def test_no_engine_outlives_the_benchmark(options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Instance] = []
    real = _gpu_instances.Instances.start

    def note(*arguments: Any, **more: Any) -> Instance:
        started.append(real(*arguments, **more))
        return started[-1]

    monkeypatch.setattr(_gpu_instances.Instances, "start", note)
    run(options, tmp_path, "sharing")
    assert len(started) == 8
    codes = [one.process.poll() for one in started]
    assert all(code is not None for code in codes)
    assert codes.count(-signal.SIGKILL) >= 6


def test_an_engine_that_does_not_answer_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    log = tmp_path / "log"
    log.write_text("ValueError: so slow\n")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        with pytest.raises(_gpu_instances.RunFailed, match="so slow"):
            Instance("slow", log, process, 0.2).answer()
        assert process.wait(240) == -signal.SIGKILL


def test_figures_are_those_of_the_times() -> None:
    answers = [
        {"began": 1.0, "came": [1.5, 1.6, 2.0], "cached": 30, "prompt_tokens": 40},
        {"began": 2.0, "came": [2.1], "cached": 0, "prompt_tokens": 20},
    ]
    assert ttft_ms(answers) == pytest.approx([500, 100])
    assert gaps_ms(answers) == pytest.approx([100, 400])
    assert gaps_ms(answers, since=1.7) == pytest.approx([400])
    assert gaps_ms(answers, until=1.7) == pytest.approx([100])
    assert hit_rate(answers) == 50.0
    assert kv_bytes_per_token("llama-3.1-8b") == 131_072
    assert kv_bytes_per_token("mla") == 2 * SHAPES["mla"]["num_hidden_layers"] * 576


def test_a_table_has_a_line_for_each_row() -> None:
    row = {"scenario": "sharing", "cache": "a | b", "what": "x", "value": "1"}
    assert table([row, row]).splitlines()[2:] == ["| sharing | a / b | x | 1 |"] * 2
