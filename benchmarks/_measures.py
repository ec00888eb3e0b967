"""Measures of a benchmark over its repetitions, and when two of them differ by more than noise.

A measure is known to lie in an interval if the benchmark itself says so (95 % of a median of many rounds), or if it was
repeated three times or more: then its interval is the median, and as much on either side as the repetitions lie apart.
Two measures differ if both have an interval, these do not meet, and the medians are ``CHANGE_MIN`` apart.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks._common import median

REPEATS_FOR_INTERVAL = 3
CHANGE_MIN = 0.02
"""Less than this is no change that anybody has to know about."""

HIGHER_IS_BETTER = ("GB/s", "1/s", "blocks/s", "%")


@dataclass(frozen=True)
class Measure:
    """One number over all repetitions."""

    name: str
    unit: str
    better: str
    """``lower`` or ``higher``."""
    values: tuple[float, ...]
    """Of each repetition."""
    value: float
    """Their median."""
    low: float | None
    high: float | None
    """Bounds of its interval; ``None`` if it has none."""
    reference: str | None
    reference_value: float | None

    @property
    def ratio(self) -> float | None:
        """``value / reference_value``."""
        return self.value / self.reference_value if self.reference_value else None

    @property
    def wins(self) -> bool | None:
        """Against the reference; ``None`` without one, or where both are the same."""
        if self.ratio is None or self.ratio == 1:
            return None
        return (self.ratio > 1) == (self.better == "higher")

    def as_json(self) -> dict[str, Any]:
        """For a report."""
        return asdict(self) | {"ratio": self.ratio}


def from_json(row: dict[str, Any]) -> Measure:
    """The inverse of ``as_json``."""
    fields = {key: value for key, value in row.items() if key != "ratio"}
    return Measure(**fields | {"values": tuple(row["values"])})


def merged(repetitions: Sequence[Sequence[dict[str, Any]]]) -> list[Measure]:
    """Measures of a benchmark from what its repetitions wrote, in the order of the first; what is not in all of them is
    left out."""
    found: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for rows in repetitions:
        for row in rows:
            found.setdefault((row["name"], row["reference"]), []).append(row)
    return [_merged(rows) for rows in found.values() if len(rows) == len(repetitions)]


def _merged(rows: Sequence[dict[str, Any]]) -> Measure:
    values = [row["value"] for row in rows]
    middle, apart = median(values), max(values) - min(values)
    low, high = rows[0].get("low"), rows[0].get("high")
    if len(rows) >= REPEATS_FOR_INTERVAL:
        low, high = middle - apart, middle + apart
    elif len(rows) > 1:
        low = high = None
    references = [row["reference_value"] for row in rows if row["reference_value"] is not None]
    unit = rows[0]["unit"]
    return Measure(
        name=rows[0]["name"],
        unit=unit,
        better=rows[0].get("better") or ("higher" if unit in HIGHER_IS_BETTER else "lower"),
        values=tuple(values),
        value=middle,
        low=low,
        high=high,
        reference=rows[0]["reference"],
        reference_value=median(references) if references else None,
    )


def change(old: Measure, new: Measure) -> str:
    """``better``, ``worse``, ``same`` (within the noise) or ``unknown`` (one of them has no interval)."""
    if old.low is None or old.high is None or new.low is None or new.high is None:
        return "unknown"
    apart = new.low > old.high or new.high < old.low
    if not apart or abs(new.value - old.value) < CHANGE_MIN * abs(old.value):
        return "same"
    return "better" if (new.value > old.value) == (old.better == "higher") else "worse"
