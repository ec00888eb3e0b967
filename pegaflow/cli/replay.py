"""``pegaflow replay``: what a cache of some size would find of a trace."""

import re
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

from pegaflow.cli.options import json_option
from pegaflow.cli.output import cell, echo_json, show, table
from pegaflow.replay.policies import OPTIMUM, POLICIES, hits_of
from pegaflow.replay.trace import distinct_blocks, read_trace

CAPACITIES = ("1%", "2%", "5%", "10%", "25%", "50%")


def _capacities(_ctx: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """``10%`` of the distinct blocks of a trace, or a number of blocks."""
    for value in values:
        match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)(%?)", value)
        if match is None or not float(match[1]) or ("." in match[1] and not match[2]):
            raise click.BadParameter(f"{value!r} is neither a share such as 10% nor a number of blocks such as 20000")
    return values


def blocks_of(capacity: str, distinct: int) -> int:
    """Blocks of a capacity; at least one."""
    if capacity.endswith("%"):
        return max(1, int(float(capacity[:-1]) * distinct / 100))
    return int(capacity)


@click.command(short_help="What a cache of some size would find of a trace.")
@click.argument("trace", metavar="TRACE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice([*POLICIES, OPTIMUM]),
    help="What goes when the cache is full; may be given several times. All of them if not given.",
)
@click.option(
    "--capacity",
    "capacities",
    multiple=True,
    callback=_capacities,
    metavar="BLOCKS|SHARE%",
    help=f"Size of the cache; may be given several times. {' '.join(CAPACITIES)} if not given.",
)
@json_option
def replay(trace: Path, policies: tuple[str, ...], capacities: tuple[str, ...], as_json: bool) -> None:
    """Replay the prompts of TRACE against a cache that is empty at first.

    TRACE has one JSON object a line with the hashes of a prompt's blocks, "hash_ids". A hit is a block that is found
    with all blocks before it. 'pool' and 'pool-lru' are PegaFlow's engine itself, in a pool of its own with tiny
    blocks; 'optimum' knows what is to come, so no cache finds more.

    \b
    Examples:
      pegaflow replay trace.jsonl
      pegaflow replay trace.jsonl --policy pool --policy optimum --capacity 5% --capacity 20000
      pegaflow replay trace.jsonl --json | jq '.results[] | select(.policy == "pool")'
    """
    prompts = read_trace(trace)
    asked, distinct = sum(map(len, prompts)), distinct_blocks(prompts)
    sizes = {capacity: blocks_of(capacity, distinct) for capacity in capacities or CAPACITIES}
    chosen = policies or (*POLICIES, OPTIMUM)
    pairs = [(policy, capacity) for policy in chosen for capacity in sizes]
    shares = {}
    bar = track(pairs, "Replaying", console=Console(stderr=True), disable=as_json, transient=True)
    for policy, capacity in bar:
        shares[policy, capacity] = hits_of(policy, prompts, sizes[capacity]) / asked if asked else 0.0
    if as_json:
        results = [
            {"policy": policy, "capacity": capacity, "blocks": sizes[capacity], "hit_ratio": share}
            for (policy, capacity), share in shares.items()
        ]
        echo_json({"requests": len(prompts), "blocks": asked, "distinct_blocks": distinct, "results": results})
        return
    show(_table(chosen, sizes, shares), f"{len(prompts):,} prompts, {asked:,} blocks, {distinct:,} distinct ones.")


def _table(chosen: tuple[str, ...], sizes: dict[str, int], shares: dict[tuple[str, str], float]) -> object:
    made = table("blocks found, %", *sizes, right=tuple(sizes))
    for policy in chosen:
        made.add_row(cell(policy), *(cell(f"{100 * shares[policy, capacity]:.1f}") for capacity in sizes))
    return made
