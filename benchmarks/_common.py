"""What all benchmarks share: timing, results as JSON and as a table, and places for pools."""

import json
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

RESULTS_DIR = Path("build/bench")
SHM_DIR = Path("/dev/shm")
TABLE_COLUMNS_MIN = 110


@dataclass(frozen=True)
class Result:
    """One number, and what it is compared with."""

    name: str
    value: float
    unit: str
    reference: str | None = None
    """What ``reference_value`` belongs to; ``None`` if there is nothing to compare with."""
    reference_value: float | None = None
    low: float | None = None
    """With ``high``: between these lies what was looked for, in 95 of 100 cases; ``None`` if it was not looked at."""
    high: float | None = None
    better: str | None = None
    """``lower`` or ``higher``, where the unit does not say it: a ratio of speeds, say."""

    @property
    def ratio(self) -> float | None:
        """``value / reference_value``."""
        if self.reference_value is None or self.reference_value == 0:
            return None
        return self.value / self.reference_value


def finish(name: str, results: Sequence[Result]) -> None:
    """Write ``build/bench/NAME.json`` and print the same as a table."""
    RESULTS_DIR.mkdir(parents=True, exist_ok=True)
    rows = [asdict(one) | {"ratio": one.ratio} for one in results]
    path = RESULTS_DIR / f"{name}.json"
    path.write_text(json.dumps(rows, indent=1) + "\n")
    table = Table(box=box.SIMPLE_HEAD, title=f"{name} on {machine()}", title_justify="left")
    for column in ("name", "value", "unit", "reference", "reference value", "ratio"):
        table.add_column(column, justify="left" if column in ("name", "unit", "reference") else "right")
    for one in results:
        table.add_row(
            one.name, shown(one), one.unit, one.reference or "", digits(one.reference_value), digits(one.ratio)
        )
    # Into a file or a narrow terminal too: rows that wrap cannot be compared.
    console = Console(width=max(Console().width, TABLE_COLUMNS_MIN))
    console.print(table)
    console.print(f"written to {path}", highlight=False)


def shown(result: Result) -> str:
    """A value, with its interval if it has one."""
    if result.low is None:
        return digits(result.value)
    return f"{digits(result.value)} [{digits(result.low)}, {digits(result.high)}]"


def digits(value: float | None) -> str:
    """Three significant digits, never in scientific notation."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def machine() -> str:
    """Processor and the number of CPUs that this process may use."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {cpus()} CPUs"


def cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def note(text: str) -> None:
    """A line between tables: progress, or why something is absent."""
    Console(stderr=True).print(text, highlight=False, markup=False)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def median(values: Sequence[float]) -> float:
    """Median."""
    return statistics.median(values)


def seconds_of(function: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@contextmanager
def pool_place(bytes_needed: int) -> Iterator[Path]:
    """An empty directory in shared memory that is removed afterwards, whatever happens.

    Exits with a sentence if there is not enough room.
    """
    free = shutil.disk_usage(SHM_DIR).free
    if free < bytes_needed:
        raise SystemExit(f"{SHM_DIR} has {free >> 20} MiB left, this benchmark needs {bytes_needed >> 20} MiB.")
    place = Path(tempfile.mkdtemp(prefix="pegaflow-bench-", dir=SHM_DIR))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
