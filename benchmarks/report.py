"""Run benchmarks and write one report of them: ``python -m benchmarks.report [--repeats N] [NAME...]``.

Each benchmark is a program of its own, and writes ``build/bench/NAME.json``. The report, ``report.json`` and
``report.md`` beside them, has what each measured last, on which commit and under which load: benchmarks that are not
named keep their part of it.
"""

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS_DIR, digits, note
from benchmarks._facts import BUSY_SHARE_MAX, busy_share, commit_of, load, machine_facts
from benchmarks._measures import REPEATS_FOR_INTERVAL, Measure, from_json, merged

HERE = Path(__file__).parent
NO_BENCHMARKS = ("report", "compare")
SECONDS_MAX = 3600.0
"""Of one run of one benchmark, which all end by themselves long before."""

FIELDS = {"name", "value", "unit", "reference", "reference_value"}
"""Of a measure."""

BRACKETS = "Brackets: 95 % of what a median may be; or as far as repetitions lie apart, on either side of theirs."


class Nothing(Exception):
    """A benchmark that measured nothing, and why: it lacks something, or it ``failed``."""

    def __init__(self, why: str, *, failed: bool) -> None:
        super().__init__(why)
        self.failed = failed


def names() -> list[str]:
    """Of all benchmarks."""
    return sorted(path.stem for path in HERE.glob("[a-z]*.py") if path.stem not in NO_BENCHMARKS)


def question_of(name: str) -> str:
    """What the benchmark says it answers: the first paragraph of its program."""
    text = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or name
    return " ".join(text.partition("\n\n")[0].split())


def run_once(name: str) -> list[dict[str, Any]]:
    """What one run of a benchmark writes. Its output goes through."""
    path = RESULTS_DIR / f"{name}.json"
    before = path.stat().st_mtime_ns if path.exists() else None
    began, last = time.monotonic(), ""
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None
        # One that hangs says nothing either; nor is its output at an end while processes that it started have it.
        watch = threading.Timer(SECONDS_MAX, os.killpg, (program.pid, signal.SIGKILL))
        watch.start()
        try:
            for line in program.stdout:
                print(line, end="", flush=True)
                last = line.strip() or last
        except BaseException:  # such as an interrupt, which does not reach another session
            os.killpg(program.pid, signal.SIGKILL)
            raise
        finally:
            watch.cancel()
    if time.monotonic() - began > SECONDS_MAX:
        raise Nothing(f"It was stopped after {SECONDS_MAX:.0f} s.", failed=True)
    if program.returncode != 0:
        raise Nothing(f"It ended with {program.returncode}: {last}", failed=True)
    if not path.exists() or path.stat().st_mtime_ns == before:
        raise Nothing(last, failed=False)
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    if any(not row.keys() >= FIELDS for row in rows):
        raise Nothing(f"It has a table of its own: {path}.", failed=False)
    return rows


def part_of(name: str, repeats: int, root: Path) -> dict[str, Any]:
    """The benchmark's part of the report."""
    part: dict[str, Any] = {
        "question": question_of(name),
        "commit": commit_of(root),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_at_start": round(load(), 2),
        "busy_at_start": round(busy_share(), 3),
        "repeats": repeats,
    }
    began = time.monotonic()
    try:
        part["measures"] = [one.as_json() for one in merged([run_once(name) for _ in range(repeats)])]
    except Nothing as nothing:
        part |= {"measures": [], "absent": str(nothing), "failed": nothing.failed}
    return part | {"seconds": round(time.monotonic() - began, 1)}


def markdown(report: dict[str, Any]) -> str:
    """The report to read. The winner of each comparison is bold."""
    lines = ["# Benchmarks", "", "| machine | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in report["machine"].items()]
    minutes = sum(part["seconds"] for part in report["benchmarks"].values()) / 60
    lines += ["", f"{len(report['benchmarks'])} benchmarks took {minutes:.0f} minutes in all.", "", BRACKETS]
    for name, part in report["benchmarks"].items():
        lines += ["", f"## {name}", "", part["question"], ""]
        lines.append(
            f"{part['started']}, commit {part['commit']}, {part['seconds']:.0f} s, repeats: {part['repeats']}, load: "
            f"{part['load_at_start']}, processors busy with others: {100 * part['busy_at_start']:.0f} %"
        )
        if part["busy_at_start"] > BUSY_SHARE_MAX:
            lines += ["", "**Others took so much of this machine that these figures say little.**"]
        if "absent" in part:
            lines += ["", f"Nothing was measured. {part['absent']}"]
            continue
        lines += ["", "| what | PegaFlow | limit or rival | ratio |", "|---|---:|---:|---:|"]
        lines += [row_of(from_json(row)) for row in part["measures"]]
    return "\n".join(lines) + "\n"


def row_of(measure: Measure) -> str:
    """One line of a table."""
    value = f"{digits(measure.value)} {measure.unit}"
    if measure.low is not None and measure.high is not None:
        value += f" [{digits(measure.low)}, {digits(measure.high)}]"
    other = ""
    if measure.reference is not None and measure.reference_value is not None:
        other = f"{measure.reference}: {digits(measure.reference_value)}"
    if measure.wins is not None:
        value, other = (f"**{value}**", other) if measure.wins else (value, f"**{other}**")
    return f"| {measure.name} | {value} | {other} | {digits(measure.ratio)} |"


def write(report: dict[str, Any], place: Path) -> None:
    """Both forms."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (place / "report.md").write_text(markdown(report))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument(
        "--repeats", type=int, default=1, help=f"of each benchmark; from {REPEATS_FOR_INTERVAL} on changes can be told"
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(names()))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}: there are {', '.join(names())}")
    return options


def main() -> int:
    """Run, print, write; 1 if a benchmark failed."""
    options = parse()
    path = RESULTS_DIR / "report.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"benchmarks": {}}
    RESULTS_DIR.mkdir(parents=True, exist_ok=True)
    report["machine"] = machine_facts(RESULTS_DIR)
    failed = []
    for name in options.names or names():
        print(f"== {name}", flush=True)
        part = part_of(name, options.repeats, HERE.parent)
        report["benchmarks"][name] = part
        if part.get("failed"):
            failed.append(name)
        write(report, RESULTS_DIR)
    note(f"written to {RESULTS_DIR / 'report.json'} and {RESULTS_DIR / 'report.md'}")
    if failed:
        note(f"These benchmarks failed: {', '.join(failed)}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
