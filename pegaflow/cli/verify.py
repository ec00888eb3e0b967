"""``pegaflow verify``: is every byte of a pool as it should be."""

import sys
from contextlib import nullcontext

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pegaflow.cli.options import json_option, pool_argument, shm_dir_option
from pegaflow.cli.output import echo_json, format_bytes, format_count, printable
from pegaflow.shm.pool import find_pool, verify_pool
from pegaflow.shm.report import PoolListing, VerifyReport


@click.command(short_help="Check every invariant and checksum of a pool.")
@pool_argument
@shm_dir_option
@click.option("--no-checksums", is_flag=True, help="Check the structure only, and do not read the blocks.")
@json_option
@click.pass_context
def verify(ctx: click.Context, pool: str, shm_dir: str, no_checksums: bool, as_json: bool) -> None:
    """Check every invariant and every checksum of a pool. Changes nothing.

    Exits with 1 and lists the problems if there are any. The result is exact when no process changes the pool
    meanwhile; with living processes, run it again before you believe in a problem.

    \b
    Examples:
      pegaflow verify default
      pegaflow verify default --no-checksums        fast: does not read the data
      pegaflow verify default --json | jq .problems
    """
    listing = find_pool(pool, shm_dir)
    with _progress(listing, hidden=as_json or not sys.stderr.isatty()):
        report = verify_pool(listing.path, checksums=not no_checksums)
    if as_json:
        echo_json(
            {
                "name": listing.name,
                "path": listing.path,
                "ok": report.ok,
                "blocks_checked": report.blocks_checked,
                "checksums_checked": report.checksums_checked,
                "problems": report.problems,
            }
        )
    else:
        _show(listing, report)
    ctx.exit(0 if report.ok else 1)


def _show(listing: PoolListing, report: VerifyReport) -> None:
    checked = (
        f"{format_count(report.blocks_checked, 'block')} and "
        f"{format_count(report.checksums_checked, 'checksum')} checked"
    )
    if report.ok:
        click.echo(f"{printable(listing.name)} is sound: {checked}.")
        return
    found = format_count(len(report.problems), "problem")
    click.echo(f"{printable(listing.name)} has {found} ({checked}):")
    for problem in report.problems:
        click.echo(f"  {printable(problem)}")
    if listing.processes_alive:
        count = format_count(listing.processes_alive, "process")
        click.echo(f"{count} may have changed it meanwhile; run this again before you believe it.")


def _progress(listing: PoolListing, hidden: bool) -> "Progress | nullcontext[None]":
    if hidden:
        return nullcontext()
    # The engine checks in one call, which releases the GIL: the bar shows that it works, not how far it is.
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task(f"checking {printable(listing.name)}, {format_bytes(listing.bytes_used)}", total=None)
    return bar
