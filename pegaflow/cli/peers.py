"""``pegaflow peers``: do other hosts answer, and how fast do their blocks come."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from pegaflow.cli.options import json_option, pool_argument, shm_dir_option
from pegaflow.cli.output import cell, echo_json, format_bytes, format_count, printable, show, state_cell, table
from pegaflow.config import PREFIX, ConnectorConfig, parse_config, parse_size
from pegaflow.p2p import probe
from pegaflow.shm.pool import find_pool, open_pool

F = TypeVar("F", bound=Callable[..., Any])

SIZE_DEFAULT = "256mib"
BLOCK_DEFAULT = "1mib"
BLOCKS_MAX = 4_096
PINGS_MAX = 10_000


def connection_options(function: F) -> F:
    """What it takes to talk to a peer; by default as the environment says it to vLLM."""
    for option, text in (
        ("--nics", "RDMA ports, or 'none' for TCP only (vLLM's option pegaflow.nics)."),
        ("--tls-ca", "Who has to have signed the peers' certificates (pegaflow.peer_tls_ca)."),
        ("--tls-key", "Its key (pegaflow.peer_tls_key)."),
        ("--tls-cert", "Certificate of this host (pegaflow.peer_tls_cert)."),
        ("--token-file", "File with the token of all hosts (pegaflow.peer_token_file, or PEGAFLOW_PEER_TOKEN)."),
    ):
        function = click.option(option, default=None, metavar="NAMES" if option == "--nics" else "FILE", help=text)(
            function
        )
    return shm_dir_option(json_option(function))


addresses_argument = click.argument("addresses", metavar="[ADDRESS]...", nargs=-1)
size_option = click.option(
    "--size", default=SIZE_DEFAULT, show_default=True, metavar="SIZE", help="How much in all, such as 512mib or 1gb."
)
block_option = click.option(
    "--block-size", default=BLOCK_DEFAULT, show_default=True, metavar="SIZE", help="Size of one block."
)


@click.group(short_help="Look at peers: the pools of other hosts.")
def peers() -> None:
    """Look at peers, the pools of other hosts (vLLM's option pegaflow.peers).

    ADDRESS is host:port, and a name may stand for several hosts. Without any, the environment variable PEGAFLOW_PEERS
    says where they are.

    \b
    Examples:
      pegaflow peers list 10.0.0.2:7441 --token-file /etc/pegaflow/token
      pegaflow peers ping kv.example:7441
      pegaflow peers fill default              on the other host: blocks to measure with
      pegaflow peers bench 10.0.0.2:7441       how fast they come here
    """


@peers.command("list", short_help="Show who answers.")
@addresses_argument
@connection_options
@click.pass_context
def list_(
    ctx: click.Context, /, addresses: tuple[str, ...], shm_dir: str, as_json: bool, **options: str | None
) -> None:
    """Show each host behind the addresses: does it answer, by which transport, how far away is it. Exits with 1 if one
    of them does not answer.

    \b
    Examples:
      pegaflow peers list 10.0.0.2:7441 10.0.0.3:7441
      pegaflow peers list kv.example:7441 --json | jq '.peers[].state'
    """
    config = _config(addresses, options)
    found = probe.look(config, probe.hosts_of(config.peers), shm_dir)
    if as_json:
        echo_json({"peers": found})
    else:
        made = table("peer", "state", "transport", "round trip", right=("round trip",))
        for one in found:
            round_trip = "-" if one.rtt_us is None else f"{one.rtt_us:,} us"
            made.add_row(cell(one.address), state_cell(one.state), cell(one.transport or "-"), cell(round_trip))
        show(made, *_problems([(one.address, one.problem) for one in found]))
    ctx.exit(0 if all(one.state == "up" for one in found) else 1)


@peers.command(short_help="Measure round trips.")
@addresses_argument
@click.option(
    "--count", default=20, show_default=True, type=click.IntRange(1, PINGS_MAX), help="Questions to each host."
)
@connection_options
@click.pass_context
def ping(
    ctx: click.Context, /, addresses: tuple[str, ...], count: int, shm_dir: str, as_json: bool, **options: str | None
) -> None:
    """Ask each host whether it has a block, one question after the other. Exits with 1 if answers are missing.

    \b
    Examples:
      pegaflow peers ping 10.0.0.2:7441
      pegaflow peers ping kv.example:7441 --count 1000 --json
    """
    config = _config(addresses, options)
    found = [probe.ping(config, host, shm_dir, count) for host in probe.hosts_of(config.peers)]
    if as_json:
        echo_json({"peers": found})
    else:
        right = ("answers", "lost", "least", "median", "most")
        made = table("peer", *right, right=right)
        for one in found:
            times = [f"{us:,} us" if us is not None else "-" for us in (one.least_us, one.median_us, one.most_us)]
            made.add_row(cell(one.address), cell(one.answers), cell(one.lost), *map(cell, times))
        show(made, *_problems([(one.address, one.problem) for one in found]))
    ctx.exit(0 if all(one.lost == 0 for one in found) else 1)


@peers.command(short_help="Measure how fast blocks come.")
@addresses_argument
@size_option
@block_option
@connection_options
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    addresses: tuple[str, ...],
    size: str,
    block_size: str,
    shm_dir: str,
    as_json: bool,
    **options: str | None,
) -> None:
    """Read made-up blocks from each host into a pool that is removed afterwards. Run 'pegaflow peers fill POOL' on the
    other host first, with the same sizes. Exits with 1 if less came than was asked for.

    \b
    Examples:
      pegaflow peers bench 10.0.0.2:7441 --size 1gib
      pegaflow peers bench 10.0.0.2:7441 --nics none --json
    """
    config = _config(addresses, options)
    size_bytes, block_bytes = _sizes(size, block_size)
    hosts = probe.hosts_of(config.peers)
    found = [probe.bench(config, host, shm_dir, size_bytes, block_bytes) for host in hosts]
    if as_json:
        echo_json({"peers": found})
    else:
        right = ("blocks", "bytes", "seconds", "per second")
        made = table("peer", "transport", *right, right=right)
        for one in found:
            moved, rate = format_bytes(one.blocks * one.block_bytes), format_bytes(one.bytes_per_second)
            cells = (one.address, one.transport or "-", f"{one.blocks:,}", moved, f"{one.seconds:.3f}", rate)
            made.add_row(*map(cell, cells))
        show(made, *_problems([(one.address, one.problem) for one in found]))
    ctx.exit(0 if all(one.problem is None for one in found) else 1)


@peers.command(short_help="Put blocks for 'bench' into a pool.")
@pool_argument
@size_option
@block_option
@click.option("--clear", is_flag=True, help="Remove them instead.")
@shm_dir_option
@json_option
def fill(pool: str, size: str, block_size: str, clear: bool, shm_dir: str, as_json: bool) -> None:
    """Put made-up blocks into a pool that some process serves, so that another host can measure how fast they come.
    They are evicted like all others; --clear removes them at once.

    \b
    Examples:
      pegaflow peers fill default --size 1gib
      pegaflow peers fill default --clear
    """
    size_bytes, block_bytes = _sizes(size, block_size)
    listing = find_pool(pool, shm_dir)
    with open_pool(listing.name, shm_dir=os.path.dirname(listing.path), label="pegaflow peers fill") as opened:
        if clear:
            probe.clear(opened, block_bytes)
        blocks = 0 if clear else probe.fill(opened, size_bytes, block_bytes)
    if as_json:
        echo_json({"name": listing.name, "path": listing.path, "blocks": blocks, "block_bytes": block_bytes})
    elif clear:
        click.echo(f"Removed the made-up blocks from {printable(listing.name)}.")
    else:
        made = f"{format_count(blocks, 'block')} of {format_bytes(block_bytes)}"
        click.echo(f"{made} are in {printable(listing.name)} for 'pegaflow peers bench'.")


def _config(addresses: tuple[str, ...], options: dict[str, str | None]) -> ConnectorConfig:
    names = {"token_file": "peer_token_file", "tls_cert": "peer_tls_cert", "tls_key": "peer_tls_key"}
    names |= {"tls_ca": "peer_tls_ca", "nics": "nics"}
    paths = {"token_file", "tls_cert", "tls_key", "tls_ca"}
    given: dict[str, Any] = {
        PREFIX + names[option]: os.path.abspath(value) if option in paths else value
        for option, value in options.items()
        if value is not None
    }
    if addresses:
        given[f"{PREFIX}peers"] = list(addresses)
    elif not os.environ.get("PEGAFLOW_PEERS"):
        raise click.UsageError("Name a peer such as 10.0.0.2:7441, or set PEGAFLOW_PEERS", click.get_current_context())
    return parse_config(given, os.environ)


def _sizes(size: str, block_size: str) -> tuple[int, int]:
    size_bytes, block_bytes = parse_size(size, "--size"), parse_size(block_size, "--block-size")
    if not block_bytes <= size_bytes <= block_bytes * BLOCKS_MAX:
        context = click.get_current_context()
        raise click.UsageError(f"--size has to be between one and {BLOCKS_MAX} times --block-size", context)
    return size_bytes // block_bytes * block_bytes, block_bytes


def _problems(found: list[tuple[str, str | None]]) -> list[object]:
    lines: list[object] = [cell(f"{address}: {problem}") for address, problem in found if problem is not None]
    return ["", *lines] if lines else []
