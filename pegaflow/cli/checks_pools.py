"""What ``doctor`` asks about tables of pools that do not grow with them: namespaces, processes, slots."""

from collections.abc import Iterator, Sequence

from pegaflow.cli.finding import OK, WARNING, Finding
from pegaflow.cli.output import printable
from pegaflow.shm.report import PoolListing

NAME = "pool tables"
PERCENT_WARNED_FROM = 90


def pool_tables(pools: Sequence[PoolListing]) -> Finding:
    """How much of each table of the pools there is taken, and what happens when it is full."""
    sound = [pool for pool in pools if pool.state == "ok"]
    advice = [one for pool in sound for one in _advice(pool)]
    values = [
        f"{printable(pool.name)}: {_of(pool.namespaces, pool.namespaces_max)} namespaces, "
        f"{_of(pool.processes_alive, pool.processes_max)} processes, {_of(pool.slots, pool.slots_max)} slots"
        for pool in sound
    ]
    return Finding(NAME, WARNING if advice else OK, "; ".join(values) or "no pools yet", " ".join(advice))


def _advice(pool: PoolListing) -> Iterator[str]:
    name = printable(pool.name)
    if _nearly_full(pool.namespaces, pool.namespaces_max):
        yield (
            f"Namespaces of {name} are never given back: once all are taken, a model, layout or reset that needs a new "
            f"one runs without the cache. Stop its engines and 'pegaflow rm {name}', or set another pegaflow.pool_name."
        )
    if _nearly_full(pool.processes_alive, pool.processes_max):
        yield (
            f"Once {name} has all processes that it takes, further engines run without the cache: stop some, or set "
            "another pegaflow.pool_name for them."
        )
    # A pool that is full of blocks has used up its memory first, or with the slots.
    if _nearly_full(pool.slots, pool.slots_max) and not _nearly_full(pool.bytes_used, pool.pool_bytes):
        yield (
            f"Blocks of {name} are so small that its slots run out before its memory, so that it hardly grows any "
            "more: use larger blocks (vLLM's --block-size)."
        )


def _of(used: int | None, most: int | None) -> str:
    return f"{used or 0:,} of {most or 0:,}"


def _nearly_full(used: int | None, most: int | None) -> bool:
    return bool(most) and 100 * (used or 0) >= PERCENT_WARNED_FROM * (most or 0)
