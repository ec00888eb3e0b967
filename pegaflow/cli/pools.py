"""``pegaflow pools``: which pools exist."""

import click

from pegaflow.cli.options import json_option, shm_dir_option
from pegaflow.cli.output import cell, echo_json, format_bytes, format_seconds, printable, show, state_cell, table
from pegaflow.shm.pool import list_pools
from pegaflow.shm.report import PoolListing


@click.command(short_help="List the pools of this host.")
@shm_dir_option
@json_option
def pools(shm_dir: str, as_json: bool) -> None:
    """List all pools, attaching to none of them.

    States: 'ok'; 'refused' means that the files are not ours to use, and the reason is shown; 'creating' means that
    the pool is not complete yet (if its creator died, 'pegaflow gc' clears it away).

    \b
    Examples:
      pegaflow pools
      pegaflow pools --shm-dir /mnt/shm
      pegaflow pools --json | jq '.pools[] | select(.processes_alive == 0)'
    """
    found = list_pools(shm_dir)
    if as_json:
        echo_json({"shm_dir": shm_dir, "pools": found})
        return
    if not found:
        click.echo(f"No pools in {printable(shm_dir)}; vLLM creates one when it starts with PegaKVConnector.")
        return
    show(_table(found), *_reasons(found))


def _table(found: list[PoolListing]) -> object:
    made = table(
        "pool", "state", "used", "of", "full", "alive", "dead", "idle", right=("used", "of", "full", "alive", "dead")
    )
    for one in found:
        made.add_row(
            cell(one.name),
            state_cell(one.state),
            cell(format_bytes(one.bytes_used)),
            cell(format_bytes(one.pool_bytes)),
            cell(_percent(one)),
            cell("-" if one.processes_alive is None else one.processes_alive),
            cell("-" if one.processes_dead is None else one.processes_dead),
            cell(format_seconds(one.idle_seconds)),
        )
    return made


def _percent(one: PoolListing) -> str:
    if one.bytes_used is None or not one.pool_bytes:
        return "-"
    return f"{100 * one.bytes_used / one.pool_bytes:.0f} %"


def _reasons(found: list[PoolListing]) -> list[object]:
    lines: list[object] = [cell(f"{one.name}: {one.error}") for one in found if one.error is not None]
    return ["", *lines] if lines else []
