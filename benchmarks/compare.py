"""Which measures changed between two reports by more than noise: ``python -m benchmarks.compare OLD.json NEW.json``.

Prints Markdown. Exits with 1 if a measure got worse. The rule is in ``_measures``.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._common import digits
from benchmarks._measures import Measure, change, from_json

SAME_MACHINE = ("processor", "CPUs of the machine", "GPU")


def measures_of(report: dict[str, Any]) -> dict[tuple[str, str, str | None], Measure]:
    """By benchmark, name and reference."""
    found = {}
    for name, part in report["benchmarks"].items():
        for one in map(from_json, part["measures"]):
            found[name, one.name, one.reference] = one
    return found


def lines_of(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """The comparison, line by line."""
    for name in SAME_MACHINE:
        here, there = (report["machine"].get(name) for report in (old, new))
        if here != there:
            yield f"Not the same machine, {name}: {here} and {there}. What follows says little.\n"
    olds, news = measures_of(old), measures_of(new)
    both = [key for key in olds if key in news]
    verdicts = {key: change(olds[key], news[key]) for key in both}
    changed = [key for key in both if verdicts[key] in ("better", "worse")]
    if changed:
        yield "| benchmark | what | old | new | new / old | |\n|---|---|---:|---:|---:|---|"
    for key in changed:
        before, after = olds[key], news[key]
        ratio = digits(after.value / before.value) if before.value else ""
        yield f"| {key[0]} | {key[1]} | {shown(before)} | {shown(after)} | {ratio} | {verdicts[key]} |"
    counted = {kind: list(verdicts.values()).count(kind) for kind in ("better", "worse", "same", "unknown")}
    yield (
        f"\n{counted['better']} better, {counted['worse']} worse, {counted['same']} within the noise, "
        f"{counted['unknown']} that cannot be told (run both with three repeats or more)."
    )
    for what, keys in (("only in the old report", olds.keys() - news.keys()), ("new", news.keys() - olds.keys())):
        if keys:
            yield f"{what}: {', '.join(sorted({f'{name}: {measure}' for name, measure, _ in keys}))}"


def shown(measure: Measure) -> str:
    """A value with its interval."""
    return f"{digits(measure.value)} {measure.unit} [{digits(measure.low)}, {digits(measure.high)}]"


def main() -> int:
    """1 if anything got worse."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args()
    old, new = (json.loads(path.read_text()) for path in (options.old, options.new))
    for line in lines_of(old, new):
        print(line)
    olds, news = measures_of(old), measures_of(new)
    return int(any(change(olds[key], news[key]) == "worse" for key in olds if key in news))


if __name__ == "__main__":
    sys.exit(main())
