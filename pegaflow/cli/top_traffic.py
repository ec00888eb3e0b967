"""What ``pegaflow top`` shows of prompts: where blocks were found, why others were not, and what other sizes would
find."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from pegaflow.cli.output import cell, table
from pegaflow.shm.report import InspectReport
from pegaflow.shm.traffic import (
    PRESSURE,
    REASONS,
    TIERS,
    CurveReport,
    TrafficReport,
    counts_of,
    size_name,
    window_name,
)

SPARKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""From none to all."""

REASON_TITLES = {"never_stored": "new", "evicted": "gone", "reset": "reset", "late": "late", "tier_off": "ssd off"}

Counts = Mapping[str, int]


def prompts_table(shown: Sequence[tuple[str, Counts, Counts | None]]) -> Table:
    """Shares of the blocks that were asked for. ``shown``: names of pools, counters since they were made, and what came
    to them between the last two looks."""
    numbers = ("blocks", *TIERS, *REASON_TITLES.values())
    made = table("pool", "since", *numbers, right=numbers, caption="\nBlocks of prompts: found, and missed by reason")
    for name, ever, lately in shown:
        rows = (("start", ever), ("last", lately))
        for since, counts in rows:
            if counts is None or not counts["blocks_asked"]:
                continue
            asked = counts["blocks_asked"]
            fates = [counts[f"hit_{tier}"] for tier in TIERS] + [counts[f"miss_{reason}"] for reason in REASONS]
            made.add_row(cell(name), cell(since), cell(f"{asked:,}"), *(cell(_percent(fate, asked)) for fate in fates))
    return made


def pressure_table(shown: Sequence[tuple[str, TrafficReport, Counts | None]]) -> Table:
    """What pools, or their host, were too small for. ``shown``: names of pools, their statistics, and what came to
    their counters between the last two looks."""
    numbers = ("evicted", "refused", "grow fail", "rebuilds", "lock t/o", "lock wait")
    made = table("pool", "since", *numbers, right=numbers, caption="\nPressure")
    for name, traffic, lately in shown:
        ever = counts_of(traffic)
        wait = f"{traffic.pressure.lock_wait_us_max / 1000:,.1f} ms"
        made.add_row(cell(name), cell("start"), *(cell(f"{ever[counter]:,}") for counter in PRESSURE), cell(wait))
        if lately is not None and any(lately[counter] for counter in PRESSURE):
            made.add_row(cell(name), cell("last"), *(cell(f"{lately[counter]:,}") for counter in PRESSURE), cell(""))
    return made


def curve_table(reports: Sequence[tuple[InspectReport, TrafficReport]]) -> Table:
    """What pools of other sizes would have found, and caches without bounds of late."""
    _, first = reports[0]
    whole = reports[0][0].bytes_max
    sizes = [size_name(point, whole) for point in first.curve.points]
    chosen = [size for size in sizes if size in CHOSEN_SIZES]
    windows = [window_name(window) for window in first.windows]
    numbers = (*chosen, *(f"all {name}" for name in windows))
    made = table("pool", "", *numbers, right=numbers, caption="\nWhat other sizes would find, %; all: without bounds")
    for report, traffic in reports:
        found = {size_name(point, report.bytes_max): point.hit_ppm for point in traffic.curve.points}
        made.add_row(
            cell(report.name),
            cell(spark(traffic.curve)),
            *(cell(_ppm(found.get(size))) for size in chosen),
            *(cell(_ppm(window.hit_ppm)) for window in traffic.windows),
        )
    return made


CHOSEN_SIZES = ("0.25x", "0.5x", "1x", "2x", "4x")
"""Sizes in figures; the line of bars has them all."""


def spark(curve: CurveReport) -> str:
    """One bar for each size that is known."""
    shares = [point.hit_ppm or 0 for point in curve.points]
    return "".join(SPARKS[min(len(SPARKS) - 1, share * len(SPARKS) // 1_000_000)] for share in shares)


def change(old: TrafficReport | None, new: TrafficReport | None) -> Counts | None:
    """What came to the counters of a pool between two looks; ``None`` if they were begun anew."""
    if old is None or new is None:
        return None
    before, after = counts_of(old), counts_of(new)
    counts = {name: after[name] - before[name] for name in after}
    return counts if min(counts.values()) >= 0 else None


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if part else "0"


def _ppm(ppm: int | None) -> str:
    return "-" if ppm is None else f"{ppm / 10_000:.1f}"
