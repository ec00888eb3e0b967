"""The report of benchmarks says what was measured and where, and a comparison tells changes from noise."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _facts, compare, report
from benchmarks._common import Result
from benchmarks._facts import commit_of, machine_facts
from benchmarks._measures import Measure, change, from_json, merged

TRIALS = 2000


def row(value: float, **more: Any) -> dict[str, Any]:
    fields = {"name": "lookup", "unit": "us", "reference": None, "reference_value": None, "low": None, "high": None}
    return fields | {"value": value} | more


def measure(*values: float, **more: Any) -> Measure:
    return merged([[row(value, **more)] for value in values])[0]


def drawn(draw: random.Random, scale: float, noise: float, repeats: int) -> Measure:
    """Times under noise as of a shared machine: mostly near the least, now and then far above."""
    return measure(*(scale * (1 + noise * draw.lognormvariate(0, 1)) for _ in range(repeats)))


def test_repetitions_give_a_median_and_an_interval() -> None:
    one = measure(10.0, 12.0, 11.0, reference="dict", reference_value=22.0)
    assert (one.value, one.low, one.high, one.ratio) == (11.0, 9.0, 13.0, 0.5)
    assert one.values == (10.0, 12.0, 11.0)
    assert one.wins is True


def test_the_interval_of_the_benchmark_itself_counts_if_it_ran_once() -> None:
    assert (measure(10.0, low=9.0, high=11.0).low, measure(10.0, 12.0, low=9.0, high=11.0).low) == (9.0, None)


def test_measures_that_a_repetition_lacks_are_left_out() -> None:
    both = merged([[row(1.0), row(2.0, name="attach")], [row(1.0)]])
    assert [one.name for one in both] == ["lookup"]


@pytest.mark.parametrize(
    ("unit", "better", "wins"), [("us", None, True), ("GB/s", None, False), ("x", "higher", False), ("x", None, True)]
)
def test_units_say_what_is_better_unless_the_benchmark_does(unit: str, better: str | None, wins: bool) -> None:
    assert measure(1.0, unit=unit, better=better, reference="other", reference_value=2.0).wins is wins


def test_one_run_without_an_interval_cannot_be_judged() -> None:
    assert change(measure(1.0), measure(100.0)) == "unknown"


def test_changes_have_a_direction() -> None:
    slow, fast = measure(10.0, 10.1, 10.2), measure(5.0, 5.1, 5.2)
    assert change(slow, fast) == "better"
    assert change(fast, slow) == "worse"
    speeds = [measure(*values, unit="GB/s") for values in ((10.0, 10.1, 10.2), (5.0, 5.1, 5.2))]
    assert change(*speeds) == "worse"


def test_changes_of_less_than_two_percent_are_none() -> None:
    assert change(measure(10.0, 10.0, 10.0), measure(10.1, 10.1, 10.1)) == "same"


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.3])
def test_noise_alone_is_a_change_in_one_of_a_hundred_measures_at_most(noise: float) -> None:
    draw = random.Random(1)
    told = [change(drawn(draw, 1.0, noise, 3), drawn(draw, 1.0, noise, 3)) for _ in range(TRIALS)]
    assert sum(one != "same" for one in told) <= TRIALS / 100


def test_a_change_of_a_fifth_is_told_from_noise_of_a_few_percent() -> None:
    draw = random.Random(1)
    told = [change(drawn(draw, 1.0, 0.01, 3), drawn(draw, 1.2, 0.01, 3)) for _ in range(TRIALS)]
    assert told.count("worse") >= 0.9 * TRIALS


def test_json_of_a_measure_is_read_back() -> None:
    one = measure(10.0, 12.0, 11.0, reference="dict", reference_value=22.0)
    assert from_json(json.loads(json.dumps(one.as_json()))) == one


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of benchmarks of its own, from which they are started, with the results beside."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.setattr(report, "HERE", folder)
    monkeypatch.setattr(_facts, "BUSY_SECONDS", 0.0)
    monkeypatch.setattr(report, "RESULTS_DIR", tmp_path / "build" / "bench")
    monkeypatch.chdir(tmp_path)
    return folder


def benchmark(folder: Path, name: str, code: str | None = None, **fields: Any) -> None:
    """A benchmark that does ``code``, or writes one result."""
    results = json.dumps([row(2.0, **fields)])
    code = code or f"open('build/bench/{name}.json', 'w').write({results!r})"
    (folder / f"{name}.py").write_text(f'"""How fast is it?\n\nMore."""\n{code}\n')


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, dict[str, Any], str]:
    monkeypatch.setattr(sys, "argv", ["report", *arguments])
    code = report.main()
    place = report.RESULTS_DIR
    return code, json.loads((place / "report.json").read_text()), (place / "report.md").read_text()


def test_a_report_has_machine_commit_load_and_every_measure(monkeypatch: pytest.MonkeyPatch, programs: Path) -> None:
    benchmark(programs, "quick", reference="dict", reference_value=4.0)
    code, written, text = run(monkeypatch, "--repeats", "3")
    assert code == 0
    part = written["benchmarks"]["quick"]
    assert part["question"] == "How fast is it?"
    assert part["repeats"] == 3
    assert {"commit", "started", "seconds", "load_at_start", "busy_at_start"} <= part.keys()
    assert {"processor", "memory", "kernel", "huge pages", "disk", "GPU", "versions"} <= written["machine"].keys()
    assert "| lookup | **2 us [2, 2]** | dict: 4 | 0.5 |" in text
    assert f"commit {part['commit']}" in text


def test_a_benchmark_that_fails_is_in_the_report_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, programs: Path
) -> None:
    benchmark(programs, "broken", "raise SystemExit('The disk is full.')")
    benchmark(programs, "lacking", "print('It needs a GPU, and there is none.')")
    benchmark(programs, "working")
    code, written, text = run(monkeypatch)
    assert code == 1
    assert written["benchmarks"]["broken"]["failed"] is True
    assert "The disk is full." in text
    assert written["benchmarks"]["lacking"]["failed"] is False
    assert "needs a GPU" in text
    assert len(written["benchmarks"]["working"]["measures"]) == 1


def test_a_benchmark_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch, programs: Path) -> None:
    monkeypatch.setattr(report, "SECONDS_MAX", 0.5)
    child = "import time; time.sleep(600)"
    benchmark(programs, "hanging", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
    code, written, text = run(monkeypatch)
    assert (code, written["benchmarks"]["hanging"]["failed"]) == (1, True)
    assert "It was stopped after" in text


def test_a_benchmark_whose_table_has_no_measures_is_named(monkeypatch: pytest.MonkeyPatch, programs: Path) -> None:
    table = json.dumps([{"scenario": "sharing", "value": "failed"}])
    benchmark(programs, "other", f"open('build/bench/other.json', 'w').write({table!r})")
    code, written, text = run(monkeypatch)
    assert (code, written["benchmarks"]["other"]["failed"]) == (0, False)
    assert "It has a table of its own: " in text


def test_benchmarks_that_are_not_named_keep_their_part(monkeypatch: pytest.MonkeyPatch, programs: Path) -> None:
    for name in ("one", "two"):
        benchmark(programs, name)
    first = run(monkeypatch)[1]["benchmarks"]
    second = run(monkeypatch, "two")[1]["benchmarks"]
    assert second["one"] == first["one"]
    assert second.keys() == {"one", "two"}


def test_an_unknown_benchmark_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.parse(["no-such"])
    assert "lookup" in capsys.readouterr().err


def report_of(*values: float, processor: str = "one") -> dict[str, Any]:
    rows = [measure(*values).as_json()] if values else []
    return {"machine": {"processor": processor}, "benchmarks": {"lookup": {"measures": rows}}}


def test_a_comparison_names_what_changed_and_fails_if_it_is_worse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, values in (("old", (10.0, 10.1, 10.2)), ("new", (20.0, 20.1, 20.2))):
        (tmp_path / f"{name}.json").write_text(json.dumps(report_of(*values)))
    for arguments, code, verdict in (
        (("old", "new"), 1, "worse"),
        (("new", "old"), 0, "better"),
        (("old", "old"), 0, "1 within the noise"),
    ):
        monkeypatch.setattr(sys, "argv", ["compare", *(str(tmp_path / f"{name}.json") for name in arguments)])
        assert compare.main() == code
        assert verdict in capsys.readouterr().out


def test_reports_of_two_machines_are_said_to_be_of_two() -> None:
    lines = "\n".join(compare.lines_of(report_of(1.0), report_of(1.0, processor="another")))
    assert "Not the same machine" in lines
    assert "1 that cannot be told" in lines


def test_facts_of_this_machine_are_found(tmp_path: Path) -> None:
    facts = machine_facts(tmp_path)
    assert all(facts.values())
    assert commit_of(tmp_path) == "unknown"


def test_processors_that_others_keep_busy_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(100, 1000), (175, 1100)])
    monkeypatch.setattr(_facts, "_cpu_times", lambda: next(times))
    monkeypatch.setattr(_facts, "BUSY_SECONDS", 0.0)
    assert _facts.busy_share() == 0.75


def test_every_result_says_in_json_what_a_measure_needs() -> None:
    one = Result("a", 1.0, "us", "b", 2.0)
    assert {"name", "value", "unit", "reference", "reference_value", "low", "high", "better"} <= set(vars(one))
