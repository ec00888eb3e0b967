"""The benchmark on real vLLM, without vLLM: what it starts, what becomes of runs that fail, and its table."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import vllm_gpu
from benchmarks._vllm_child import Answer, Session, Sizes, digest, milliseconds
from benchmarks._vllm_report import COLUMNS, Run, table
from benchmarks.vllm_gpu import Bench, Setting, parse

CHILD = """
import json, os, sys, time
settings = json.load(open(sys.argv[1]))
connector = (settings["transfer"] or {}).get("kv_connector", "none")
if connector == "OffloadingConnector":
    print("ValueError: it does | not like it here")
    sys.exit(1)
row = {"what": "first token, cold", "unit": "ms", "mean": 1.5, "n": 3, "tokens": connector, "prefix": ""}
answer = {"start_s": 2.0, "import_s": 1.0, **{name: [row] for name in settings["scenarios"]}}
with open(settings["result"] + ".part", "w") as file:
    json.dump({**answer, "settings": settings, "path": os.environ["PYTHONPATH"]}, file)
os.rename(settings["result"] + ".part", settings["result"])
while settings["hold"]:
    time.sleep(1)
"""


PAIR = """
import json, os, sys
settings = json.load(open(sys.argv[1]))
row = {"what": "in all", "unit": "ms", "mean": 1.5, "n": 3, "settings": settings}
with open(settings["result"] + ".part", "w") as file:
    json.dump({"pd": [row]}, file)
os.rename(settings["result"] + ".part", settings["result"])
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    pair = tmp_path / "pair.py"
    pair.write_text(PAIR)
    monkeypatch.setattr(vllm_gpu, "CHILD", child)
    monkeypatch.setattr(vllm_gpu, "PD_CHILD", pair)
    monkeypatch.setattr(vllm_gpu, "SHM_DIR", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 512}))
    return parse(["--tiny", "--model", str(tmp_path), "--out", str(tmp_path / "out.json"), "--block-sizes", "16"])


def lines_of(runs: list[Run]) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(runs).splitlines()]


def test_each_connector_is_measured_and_one_that_fails_is_a_line(options: Any, tmp_path: Path) -> None:
    bench = Bench(options, tmp_path)
    bench.run()
    started = {(run.scenario, run.connector): run.error for run in bench.runs}
    assert {name for name, _ in started} == set(vllm_gpu.SCENARIOS)
    assert started[("ttft", "none")] is None
    assert started[("successor", "ours")] is None
    assert "does | not like it" in (started[("ttft", "offloading")] or "")
    assert all(len(cells) == len(COLUMNS) for cells in lines_of(bench.runs))
    assert len(json.loads(options.out.read_text())) == len(bench.runs)
    assert list(tmp_path.glob("pegaflow-bench-*")) == []


def test_scenarios_with_the_same_compilation_share_an_engine(options: Any, tmp_path: Path) -> None:
    options.connectors, options.scenarios = ["none"], ["ttft", "itl", "unique"]
    for chosen, engines in ((None, 2), (True, 1), (False, 1)):
        options.compile = chosen
        bench = Bench(options, tmp_path)
        bench.run()
        assert bench._started == engines
        assert [run.scenario for run in bench.runs] == ["ttft", "itl", "unique"]


def test_two_sides_get_the_means_to_exchange_a_prompt(options: Any, tmp_path: Path) -> None:
    options.connectors, options.scenarios = list(vllm_gpu.CONNECTORS), ["pd"]
    bench = Bench(options, tmp_path)
    bench.run()
    given = {run.connector: run.rows[0]["settings"] for run in bench.runs}
    assert set(given) == set(vllm_gpu.PD_CONNECTORS)
    assert given["none"]["prefill"] is None
    assert given["none"]["decode"] is None
    assert given["nixl"]["prefill"]["kv_connector"] == "NixlConnector"
    assert given["nixl"]["nixl"]
    ours = given["ours"]
    assert ours["prefill"]["kv_role"] == "kv_producer"
    assert ours["decode"]["kv_role"] == "kv_consumer"
    for key in ("pegaflow.shm_dir", "pegaflow.pool_size"):
        assert ours["prefill"]["kv_connector_extra_config"][key] == ours["decode"]["kv_connector_extra_config"][key]
    memory = [one["engine"]["gpu_memory_utilization"] for one in given.values()]
    assert all(2 * share < 1 for share in memory)


def test_engine_that_takes_too_long_is_killed(options: Any, tmp_path: Path) -> None:
    vllm_gpu.CHILD.write_text("import time\ntime.sleep(600)")
    options.seconds_max, options.scenarios, options.connectors = 0.2, ["ttft"], ["none"]
    bench = Bench(options, tmp_path)
    bench.run()
    assert "took more than 0.2 s" in (bench.runs[0].error or "")


def test_nothing_is_started_when_the_time_is_over(options: Any, tmp_path: Path) -> None:
    options.minutes_max = -1.0
    bench = Bench(options, tmp_path)
    bench.run()
    assert bench._started == 0
    assert {run.error for run in bench.runs} == {"not started: --minutes-max is over"}


def test_ours_and_the_original_are_found_before_anything_else(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "site")
    options.ours, options.original = Path("ours"), Path("original")
    bench = Bench(options, tmp_path)
    paths = {}
    for connector in vllm_gpu.CONNECTORS:
        setting = Setting("ttft", connector, 16, False, tmp_path)
        paths[connector] = bench._environment(setting)["PYTHONPATH"].split(os.pathsep)
    assert paths["ours"] == ["ours", "site"]
    assert paths["original"] == ["original", "site"]
    assert paths["none"] == paths["offloading"] == ["site"]


def test_original_that_is_not_installed_is_a_line(options: Any, tmp_path: Path) -> None:
    options.connectors, options.scenarios = ["original"], ["ttft"]
    bench = Bench(options, tmp_path)
    bench.run()
    assert "not installed" in (bench.runs[0].error or "")


def test_our_pool_lies_in_a_place_of_its_own_with_the_options_given(options: Any, tmp_path: Path) -> None:
    options.extra = {"pegaflow.transfer_backend": "staged"}
    bench = Bench(options, tmp_path)
    transfer = bench._transfer(Setting("ttft", "ours", 16, False, tmp_path / "place")) or {}
    assert transfer["kv_connector_extra_config"] == {
        "pegaflow.shm_dir": str(tmp_path / "place"),
        "pegaflow.pool_size": 250_000_000,
        "pegaflow.transfer_backend": "staged",
    }


def test_tokens_are_compared_with_the_first_of_the_same_prompts() -> None:
    row = {"what": "first token, cold", "unit": "ms", "mean": 1234.5, "n": 8, "tokens": "a", "cached": 0}
    warm, other = {**row, "what": "first token, warm 1"}, {**row, "tokens": "b"}
    lines = lines_of([Run("ttft", "none", 16, [row, warm]), Run("ttft", "ours", 16, [row, other])])
    place = COLUMNS.index("tokens")
    assert [cells[place] for cells in lines[2:]] == ["equal", "equal", "equal", "DIFFER"]
    assert lines[2][COLUMNS.index("mean")] == "1,234.5"
    assert lines[2][COLUMNS.index("more")] == "cached 0"


def test_percentiles_are_values_that_were_measured() -> None:
    assert milliseconds([3.0, 1.0, 2.0]) == {"mean": 2.0, "p50": 2.0, "p99": 3.0, "max": 3.0, "n": 3}
    assert milliseconds([float(value) for value in range(1000)])["p99"] == 990.0
    assert digest([Answer(tokens=[1, 2])]) != digest([Answer(tokens=[1]), Answer(tokens=[2])])


def test_prompts_are_the_same_in_every_process() -> None:
    sizes = Sizes(*[1] * 11, 1.0, 0.0, 7, 512)
    first, second = (Session(None, sizes) for _ in range(2))
    assert first.prompts(2, 50, "ttft") == second.prompts(2, 50, "ttft")
    assert first.prompts(1, 50, "ttft") != first.prompts(1, 50, "fill")


def test_unknown_scenario_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["ttfd"])
    assert "no scenario ttfd" in capsys.readouterr().err


def test_without_a_model_it_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm_gpu"])
    vllm_gpu.main()
    assert "needs --model" in capsys.readouterr().out


def test_what_was_measured_is_printed_when_it_is_told_to_end(options: Any, tmp_path: Path) -> None:
    program = """
import sys
from benchmarks import vllm_gpu
from pathlib import Path
vllm_gpu.CHILD, vllm_gpu.SHM_DIR = Path(sys.argv.pop(1)), Path(sys.argv.pop(1))
vllm_gpu.main()
"""
    slow = CHILD.replace("row =", "if settings['scenarios'] == ['itl']: time.sleep(600)\nrow =", 1)
    vllm_gpu.CHILD.write_text(slow)
    arguments = ["--tiny", "--model", str(tmp_path), "--out", str(tmp_path / "out.json"), "--block-sizes", "16"]
    wanted = ["ttft", "itl", "--connectors", "ours"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(vllm_gpu.CHILD), str(tmp_path), *wanted, *arguments],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    process.terminate()
    rest = process.communicate()[0]
    assert json.loads(first)["scenario"] == "ttft"
    assert "| ttft | ours | 16 | first token, cold |" in rest
    assert list(tmp_path.glob("pegaflow-bench-*")) == []


def test_killed_engines_leave_no_buffers_in_shared_memory(options: Any, tmp_path: Path) -> None:
    buffer = tmp_path / "psm_of_this_test"
    buffer.write_bytes(bytes(4096))
    other = tmp_path / "psm_of_others"
    other.write_bytes(bytes(4096))
    mapped = f"import mmap\nbuffer = open({str(buffer)!r}, 'r+b')\nheld = mmap.mmap(buffer.fileno(), 0)\n"
    vllm_gpu.CHILD.write_text(mapped + CHILD)
    options.connectors, options.scenarios = ["ours"], ["successor"]
    bench = Bench(options, tmp_path)
    bench.run()
    assert not buffer.exists()
    assert other.exists()
