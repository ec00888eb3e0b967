"""``pegaflow inspect``: what is in one pool."""

import time

import click
from rich.table import Table
from rich.text import Text

from pegaflow.cli.options import json_option, pool_argument, shm_dir_option
from pegaflow.cli.output import cell, echo_json, format_bytes, format_seconds, show, table
from pegaflow.shm.pool import find_pool, inspect_pool
from pegaflow.shm.report import InspectReport, TierReport

FINGERPRINT_DIGITS_SHOWN = 12


@click.command(short_help="Show what is in a pool.")
@pool_argument
@shm_dir_option
@json_option
def inspect(pool: str, shm_dir: str, as_json: bool) -> None:
    """Show the namespaces, blocks, bytes, leases and processes of a pool. Changes nothing.

    A namespace is one model with one memory layout, and one of its KV cache groups; its fingerprint tells models
    apart. 'quar.' counts quarantined blocks: given up while somebody might still write into them. A dead process is
    one that nobody has cleaned up after yet: 'pegaflow gc' does.

    \b
    Examples:
      pegaflow inspect default
      pegaflow inspect default --json | jq '.namespaces[].blocks_sealed'
    """
    report = inspect_pool(find_pool(pool, shm_dir).path)
    if as_json:
        echo_json(report)
        return
    show(_summary(report))
    if report.namespaces:
        show(_namespaces(report))
    if report.processes:
        show(_processes(report))
    if report.ssd is not None:
        show(_tier(report.ssd))


def _summary(report: InspectReport) -> Table:
    now = int(time.time())
    geometry, segments = report.geometry, report.segments
    rows = {
        "pool": report.name,
        "path": report.path,
        "size": f"{format_bytes(report.bytes_used)} used of {format_bytes(report.bytes_max)}",
        "segments": f"{segments.ready} ready, {segments.creating} being created, {segments.free} free, "
        f"{format_bytes(geometry.segment_bytes)} each",
        "slots": f"{geometry.slots_used:,} of {geometry.slots_max:,}",
        "layout": f"version {geometry.layout_version}",
        "created": f"{_timestamp(report.created_unix_s)}, {format_seconds(now - report.created_unix_s)} ago",
        "last used": f"{_timestamp(report.last_used_unix_s)}, {format_seconds(now - report.last_used_unix_s)} ago",
        "locks held": str(report.locks_held),
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(Text(name, style="bold"), cell(value))
    return grid


def _namespaces(report: InspectReport) -> Table:
    numbers = ("group", "parts", "sealed", "reserved", "quar.", "bytes", "leases")
    made = table("namespace", *numbers, right=numbers, caption="\nNamespaces")
    made.columns[0].min_width = FINGERPRINT_DIGITS_SHOWN
    for one in report.namespaces:
        made.add_row(
            cell(one.label or "(no label)").append("\n" + one.fingerprint[:FINGERPRINT_DIGITS_SHOWN], "dim"),
            cell(one.group),
            cell(one.parts),
            cell(f"{one.blocks_sealed:,}"),
            cell(f"{one.blocks_reserved:,}"),
            cell(f"{one.blocks_quarantined:,}"),
            cell(format_bytes(one.bytes_sealed)),
            cell(f"{one.leases:,}"),
        )
    return made


def _processes(report: InspectReport) -> Table:
    numbers = ("row", "pid", "share", "uses", "leases", "reserved")
    columns = ("row", "pid", "label", "state", "copies for", "share", "uses", "leases", "reserved", "up")
    made = table(*columns, right=numbers, caption="\nProcesses")
    now = int(time.time())
    for one in report.processes:
        made.add_row(
            cell(one.row),
            cell(one.pid),
            cell(one.label),
            cell("alive", "green") if one.alive else cell("dead", "red"),
            cell("" if one.leader_row is None else f"row {one.leader_row}"),
            cell(format_bytes(one.share_bytes) if one.weight_milli else ""),
            cell(format_bytes(one.used_bytes)),
            cell(f"{one.leases:,}"),
            cell(f"{one.reserved:,}"),
            cell(format_seconds(now - one.started_unix_s)),
        )
    return made


def _tier(tier: TierReport) -> Table:
    state = tier.state if tier.leader_row is None else f"{tier.state}, led by row {tier.leader_row}"
    if tier.state == "recovering":
        state += f": {tier.zones_done:,} of {tier.zones:,} zones"
    waiting = f", {format_bytes(tier.queued_bytes)} waited for" if tier.queued_bytes else ""
    speed = f" at {format_bytes(tier.read_bytes_per_second)}/s of late" if tier.read_bytes_per_second else ""
    rows = {
        "state": state,
        "blocks": f"{tier.records:,}",
        "written": f"{tier.spilled_blocks:,} blocks, {format_bytes(tier.spilled_bytes)}",
        "read": f"{tier.read_blocks:,} blocks, {format_bytes(tier.read_bytes)}{speed}{waiting}",
        "shared reads": f"{tier.read_joined:,}",
        "longest wait": f"{tier.read_wait_ms_max:,} ms",
        "bad": f"{tier.read_damaged:,} damaged, {tier.read_failed:,} unreadable",
        "lost unwritten": f"{tier.ssd_dropped:,} blocks evicted from memory",
        "failed disks": f"{tier.turned_off:,}",
    }
    grid = Table.grid(padding=(0, 2))
    grid.title, grid.title_justify, grid.title_style = "\nOn SSD", "left", "bold"
    grid.add_column()
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(Text(name, style="bold"), cell(value))
    return grid


def _timestamp(unix_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
