"""``pegaflow ssd``: look after cache files on SSD, with no pool using them."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from pegaflow.cli.options import json_option
from pegaflow.cli.output import (
    cell,
    echo_json,
    format_bytes,
    format_count,
    format_seconds,
    printable,
    show,
    state_cell,
    table,
)
from pegaflow.ssd import CacheFile, CheckReport, list_caches, remove_cache, verify_cache

FINGERPRINT_DIGITS_SHOWN = 12
directories_argument = click.argument("directories", metavar="DIR...", nargs=-1, required=True, type=click.Path())
name_option = click.option(
    "--name", default="default", show_default=True, metavar="NAME", help="Name of the pool whose cache it is."
)


@click.group(short_help="Look after cache files on SSD.")
def ssd() -> None:
    """Look after the files in which pools keep blocks on SSD (vLLM's option pegaflow.ssd_cache_path).

    They can be looked at while no process has them open; 'pegaflow inspect POOL' shows a tier that is in use.

    \b
    Examples:
      pegaflow ssd inspect /mnt/nvme0          what is in a directory
      pegaflow ssd verify /mnt/nvme0           is every byte as it was written
      pegaflow ssd rm /mnt/nvme0               delete the cache of pool 'default'
    """


@ssd.command(short_help="Show the cache files of directories.")
@directories_argument
@json_option
def inspect(directories: tuple[str, ...], as_json: bool) -> None:
    """Show the cache files in directories: whose they are, how large, how many blocks. Changes nothing.

    States: 'ok'; 'in use' by a running pool, so that its blocks are not counted; 'refused' means that the file is not
    ours to use, and the reason is shown; 'damaged' means that nothing in it can be used.

    \b
    Examples:
      pegaflow ssd inspect /mnt/nvme0 /mnt/nvme1
      pegaflow ssd inspect /mnt/nvme0 --json | jq '.files[].records'
    """
    found: list[CacheFile] = []
    for directory in directories:
        with _progress(f"reading {directory}", as_json) as progress:
            found += list_caches(directory, progress)
    if as_json:
        echo_json({"files": found})
        return
    if not found:
        click.echo(f"No caches in {printable(', '.join(directories))}.")
        return
    show(_files(found), *_reasons(found))


@ssd.command(short_help="Check every byte of a cache.")
@directories_argument
@name_option
@json_option
@click.pass_context
def verify(ctx: click.Context, directories: tuple[str, ...], name: str, as_json: bool) -> None:
    """Read every block of a cache and compare its checksums. Changes nothing.

    Give all directories of the pool. Exits with 1 if there are damaged blocks. They do no harm: a pool counts them as
    misses. After a power cut the blocks that were being written last are often among them.

    \b
    Examples:
      pegaflow ssd verify /mnt/nvme0 /mnt/nvme1
      pegaflow ssd verify /mnt/nvme0 --name other --json | jq .problems
    """
    with _progress(f"checking {name}", as_json) as progress:
        report = verify_cache(directories, name, progress)
    if as_json:
        echo_json({"name": name, "directories": list(directories)} | _plain(report))
    else:
        _show_check(name, report)
    ctx.exit(0 if report.ok else 1)


@ssd.command(short_help="Delete a cache.")
@directories_argument
@name_option
@click.option("--force", is_flag=True, help="Delete it even while a pool uses it.")
@json_option
def rm(directories: tuple[str, ...], name: str, force: bool, as_json: bool) -> None:
    """Delete the file of a cache in each of the directories. What is cached there is lost.

    Refuses while a process has it open. With --force that process keeps the file, unseen, until it ends.

    \b
    Examples:
      pegaflow ssd rm /mnt/nvme0 /mnt/nvme1
      pegaflow ssd rm /mnt/nvme0 --name other
    """
    freed = {directory: remove_cache(directory, name, force=force) for directory in directories}
    if as_json:
        files = [{"directory": directory, "bytes_freed": count} for directory, count in freed.items()]
        echo_json({"name": name, "files": files})
        return
    for directory, count in freed.items():
        click.echo(f"Removed {printable(name)} from {printable(directory)}: {format_bytes(count)} given back.")


def _files(found: list[CacheFile]) -> Table:
    right = ("on disk", "zones", "blocks", "bytes")
    made = table("cache", "state", "on disk", "zones", "blocks", "bytes", "made", "directory", right=right)
    now = int(time.time())
    for one in found:
        made.add_row(
            cell(one.name),
            state_cell(one.state),
            cell(format_bytes(one.bytes)),
            cell(_zones(one)),
            cell("-" if one.records is None else f"{one.records:,}"),
            cell(format_bytes(one.record_bytes)),
            cell("-" if one.created_unix_s is None else f"{format_seconds(now - one.created_unix_s)} ago"),
            cell(os.path.dirname(one.path)),
        )
    return made


def _zones(one: CacheFile) -> str:
    if one.zones is None:
        return "-"
    return f"{one.zones:,}" if one.zones_used is None else f"{one.zones_used:,} of {one.zones:,}"


def _reasons(found: list[CacheFile]) -> list[object]:
    lines: list[object] = [cell(f"{one.path}: {one.error}") for one in found if one.error is not None]
    return ["", *lines] if lines else []


def _show_check(name: str, report: CheckReport) -> None:
    checked = f"{format_count(report.records, 'block')} with {format_bytes(report.bytes)} are whole"
    if report.forgotten:
        checked += f", {format_count(report.forgotten, 'block')} of namespaces that were reset"
    if report.ok:
        click.echo(f"{printable(name)} is sound: {checked}.")
    else:
        bad = f"{format_count(report.damaged, 'damaged block')}, {report.unreadable:,} unreadable"
        click.echo(f"{printable(name)} has {bad} ({checked}):")
        for problem in report.problems:
            click.echo(f"  {printable(problem)}")
    if report.namespaces:
        made = table("namespace", "group", "blocks", "bytes", right=("group", "blocks", "bytes"))
        for one in report.namespaces:
            fingerprint = one.fingerprint[:FINGERPRINT_DIGITS_SHOWN]
            made.add_row(cell(fingerprint), cell(one.group), cell(f"{one.records:,}"), cell(format_bytes(one.bytes)))
        show("", made)


def _plain(report: CheckReport) -> dict[str, Any]:
    fields = ("ok", "records", "bytes", "forgotten", "damaged", "unreadable", "problems", "namespaces")
    return {field: getattr(report, field) for field in fields}


@contextmanager
def _progress(what: str, as_json: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on standard error, where somebody may be looking at it."""
    if as_json or not sys.stderr.isatty():
        yield None
        return
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(printable(what), total=None)
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total)
