"""``pegaflow top``: all pools of this host, looked at again and again."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from pegaflow.cli.options import json_option, shm_dir_option
from pegaflow.cli.output import cell, echo_json, format_bytes, format_count, printable, show, state_cell, table
from pegaflow.cli.top_traffic import change, curve_table, pressure_table, prompts_table
from pegaflow.shm.pool import inspect_if_ok, list_pools
from pegaflow.shm.report import InspectReport, PoolListing
from pegaflow.shm.traffic import sum_of

INTERVAL_SECONDS_MIN = 0.1
INTERVAL_SECONDS_MAX = 3_600.0
ROWS_MAX = 8
"""Rows of each table; the largest are shown, so that a terminal holds them."""

BAR_CELLS = 10


@dataclass(frozen=True)
class Rates:
    """What changed in a pool between two looks, per second."""

    memory_bytes_per_second: int
    """Blocks stored less blocks evicted; negative while more is evicted."""
    ssd_write_bytes_per_second: int
    ssd_read_bytes_per_second: int
    ssd_dropped_blocks_per_second: int
    """Blocks that were evicted from memory and are not on SSD."""


@dataclass(frozen=True)
class PoolView:
    """One pool as it was at the last look."""

    listing: PoolListing
    report: InspectReport | None
    """``None``: it cannot be looked at, see ``listing``."""
    rates: Rates | None
    """``None``: it was not there at the look before."""
    lately: Mapping[str, int] | None = None
    """What came to the counters of its statistics since; ``None``: as for rates, or there are none."""


@dataclass(frozen=True)
class Look:
    """All pools at one time."""

    at: float
    """Of the monotonic clock, in seconds."""
    pools: tuple[tuple[PoolListing, InspectReport | None], ...]


@click.command(short_help="Watch all pools of this host.")
@click.option(
    "--interval",
    "interval_seconds",
    default=2.0,
    show_default=True,
    type=click.FloatRange(INTERVAL_SECONDS_MIN, INTERVAL_SECONDS_MAX),
    metavar="SECONDS",
    help="Time between two looks; rates are those of this time.",
)
@click.option("--once", is_flag=True, help="Look twice, print what was seen, and end.")
@shm_dir_option
@json_option
def top(interval_seconds: float, once: bool, shm_dir: str, as_json: bool) -> None:
    """Watch how full the pools are, who uses them, and what moves. Attaches to none; Ctrl-C ends it.

    'memory/s' is what was stored less what was evicted. Two tables count over all processes, since the pool was made
    ('start') and since the last look ('last'): what there was no room or time for, and where blocks of prompts were
    found, or why not. What one vLLM instance finds, loads and saves is counted in its own /metrics (vllm:pega_*).

    \b
    Examples:
      pegaflow top
      pegaflow top --interval 0.5
      pegaflow top --once --json | jq '.pools[].rates'
    """
    if as_json and not once:
        raise click.UsageError("--json prints one document, so it needs --once")
    pause = threading.Event()
    before = look(shm_dir)
    if once:
        pause.wait(interval_seconds)
        views = compare(before, look(shm_dir))
        if as_json:
            echo_json({"shm_dir": shm_dir, "interval_ms": round(interval_seconds * 1000), "pools": views})
        else:
            show(render(views, shm_dir))
        return
    console = Console(highlight=False)
    # A terminal gets its former contents back at the end; whatever else gets one picture after the other.
    first = render(compare(None, before), shm_dir)
    # Drawn when there is something new, so without a thread that draws.
    with Live(first, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while not pause.wait(interval_seconds):
            now = look(shm_dir)
            live.update(render(compare(before, now), shm_dir), refresh=True)
            before = now


def look(shm_dir: str) -> Look:
    """All pools below a directory; those that vanish meanwhile have no report."""
    pools = tuple((listing, inspect_if_ok(listing)) for listing in list_pools(shm_dir))
    return Look(time.monotonic(), pools)


def compare(before: Look | None, now: Look) -> list[PoolView]:
    """The pools of ``now``, with what changed since ``before``. A pool that was made anew has no rates."""
    known = {}
    if before is not None:
        known = {(report.path, report.created_unix_s): report for _, report in before.pools if report is not None}
    views = []
    for listing, report in now.pools:
        old = known.get((report.path, report.created_unix_s)) if report is not None else None
        rates = lately = None
        if report is not None and old is not None and before is not None:
            rates = _rates(old, report, now.at - before.at)
            lately = change(old.traffic, report.traffic)
        views.append(PoolView(listing, report, rates, lately))
    return views


def _rates(old: InspectReport, new: InspectReport, seconds: float) -> Rates:
    sums = []
    for report in (old, new):
        tier = report.ssd
        moved = (tier.spilled_bytes, tier.read_bytes, tier.ssd_dropped) if tier is not None else (0, 0, 0)
        sums.append((sum(space.bytes_sealed for space in report.namespaces), *moved))
    memory, *counters = (round((after - before) / max(seconds, 1e-3)) for before, after in zip(*sums, strict=True))
    # Counters of a tier that was given up and made again begin anew.
    return Rates(memory, *(max(0, count) for count in counters))


def render(views: list[PoolView], shm_dir: str) -> RenderableType:
    """What a terminal shows; made for 80 columns."""
    if not views:
        return cell(f"No pools in {shm_dir}; vLLM creates one when it starts with PegaKVConnector.")
    parts: list[RenderableType] = [_pools(views)]
    reports = [view.report for view in views if view.report is not None]
    if any(report.namespaces for report in reports):
        parts.append(_namespaces(reports))
    if any(report.processes for report in reports):
        parts.append(_processes(reports))
    counted = [
        (report.name, report.traffic, view.lately)
        for view in views[:ROWS_MAX]
        if (report := view.report) is not None and report.traffic is not None
    ]
    if counted:
        parts.append(pressure_table(counted))
    asked = [
        (name, sum_of(traffic.namespaces), lately) for name, traffic, lately in counted if traffic.curve.references
    ]
    if asked:
        parts.append(prompts_table(asked))
        known = [(report, report.traffic) for report in reports if report.traffic is not None]
        parts.append(curve_table([(report, traffic) for report, traffic in known if traffic.curve.references]))
    tiers = [view for view in views if view.report is not None and view.report.ssd is not None]
    if tiers:
        parts.append(_tiers(tiers))
    return Group(*parts)


def _pools(views: list[PoolView]) -> Table:
    numbers = ("used", "of", "blocks", "leases", "memory/s")
    made = table("pool", "state", "full", *numbers, right=numbers, caption="Pools")
    for view in views[:ROWS_MAX]:
        report, listing = view.report, view.listing
        if report is None:
            state = "damaged" if listing.state == "ok" else listing.state
            made.add_row(cell(listing.name), state_cell(state), *(cell("-") for _ in range(6)))
            continue
        blocks = sum(space.blocks_sealed for space in report.namespaces)
        stored = sum(space.bytes_sealed for space in report.namespaces)
        made.add_row(
            cell(report.name),
            state_cell(listing.state),
            cell(_bar(stored, report.bytes_max)),
            cell(format_bytes(stored)),
            cell(format_bytes(report.bytes_max)),
            cell(f"{blocks:,}"),
            cell(f"{sum(space.leases for space in report.namespaces):,}"),
            cell(_signed(view.rates.memory_bytes_per_second) if view.rates is not None else "-"),
        )
    return _with_rest(made, len(views), "pool")


def _namespaces(reports: list[InspectReport]) -> Table:
    numbers = ("group", "blocks", "bytes", "writing", "quar.")
    made = table("pool", "namespace", *numbers, right=numbers, caption="\nNamespaces")
    found = [(report.name, space) for report in reports for space in report.namespaces]
    found.sort(key=lambda one: -one[1].bytes_sealed)
    for name, space in found[:ROWS_MAX]:
        made.add_row(
            cell(name),
            cell(space.label or space.fingerprint[:12]),
            cell(space.group),
            cell(f"{space.blocks_sealed:,}"),
            cell(format_bytes(space.bytes_sealed)),
            cell(f"{space.blocks_reserved:,}"),
            cell(f"{space.blocks_quarantined:,}"),
        )
    return _with_rest(made, len(found), "namespace")


def _processes(reports: list[InspectReport]) -> Table:
    numbers = ("pid", "uses", "share", "leases", "writing")
    made = table("pool", "process", "state", *numbers, right=numbers, caption="\nProcesses")
    found = [(report.name, process) for report in reports for process in report.processes]
    found.sort(key=lambda one: -one[1].used_bytes)
    for name, process in found[:ROWS_MAX]:
        made.add_row(
            cell(name),
            cell(process.label),
            cell("alive", "green") if process.alive else cell("dead", "red"),
            cell(process.pid),
            cell(format_bytes(process.used_bytes)),
            cell(format_bytes(process.share_bytes) if process.weight_milli else ""),
            cell(f"{process.leases:,}"),
            cell(f"{process.reserved:,}"),
        )
    return _with_rest(made, len(found), "process")


def _tiers(views: list[PoolView]) -> Table:
    numbers = ("blocks", "write/s", "read/s", "waited for", "wait max", "bad")
    made = table("pool", "state", *numbers, right=numbers, caption="\nOn SSD")
    for view in views[:ROWS_MAX]:
        assert view.report is not None
        assert view.report.ssd is not None
        tier, rates = view.report.ssd, view.rates
        made.add_row(
            cell(view.report.name),
            state_cell(tier.state),
            cell(f"{tier.records:,}"),
            cell(format_bytes(rates.ssd_write_bytes_per_second) if rates is not None else "-"),
            cell(format_bytes(rates.ssd_read_bytes_per_second) if rates is not None else "-"),
            cell(format_bytes(tier.queued_bytes)),
            cell(f"{tier.read_wait_ms_max:,} ms"),
            cell(f"{tier.read_damaged + tier.read_failed:,}"),
        )
    return _with_rest(made, len(views), "pool")


def _with_rest(made: Table, count: int, noun: str) -> Table:
    if count > ROWS_MAX:
        made.caption = printable(f"and {format_count(count - ROWS_MAX, noun)} more")
    return made


def _bar(part: int, whole: int) -> str:
    share = min(1.0, part / whole) if whole else 0.0
    filled = round(share * BAR_CELLS)
    return f"{'#' * filled}{'.' * (BAR_CELLS - filled)} {share:4.0%}"


def _signed(count: int) -> str:
    return f"-{format_bytes(-count)}" if count < 0 else format_bytes(count)
