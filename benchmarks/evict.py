"""What does room for a block cost in a small namespace, when the rest of the pool is large?"""

import time

from benchmarks._bigpool import CHAINS, PLACE_BYTES, chain_keys, fill, open_pool, store
from benchmarks._common import Result, finish, median, note, percentile, pool_place
from pegaflow import _native

SMALL_PART_BYTES = 128 << 10
SMALL_FINGERPRINT = b"a small namespace".ljust(32, b"\0")
WARM_BLOCKS = 3000
TIMED_BLOCKS = 3000
STORE_SECONDS_MAX = 60.0


def evicted_until_full(pool: _native.Pool, namespace: _native.Namespace, first: int) -> None:
    """Store until each new block costs an old one."""
    deadline = time.monotonic() + STORE_SECONDS_MAX
    before = pool.stats()["blocks_evicted"]
    number = first
    while pool.stats()["blocks_evicted"] - before < WARM_BLOCKS:
        number += store(pool, namespace, chain_keys(number, 1), None)
        if time.monotonic() > deadline:
            raise SystemExit("The namespace never had to evict a block.")


def microseconds(pool: _native.Pool, namespace: _native.Namespace, first: int) -> list[float]:
    """Of reserving a slot, for each of many blocks."""
    evicted_until_full(pool, namespace, first)
    times = []
    for number in range(first + (1 << 20), first + (1 << 20) + TIMED_BLOCKS):
        wanted = chain_keys(number, 1)
        start = time.perf_counter()
        reserved = namespace.reserve(wanted, parents=[None])
        times.append((time.perf_counter() - start) * 1e6)
        refs = [ref for _, ref in reserved]
        pool.mark_written(0, refs)
        if pool.publish(refs) != 1:
            raise SystemExit("A block found no room.")
    return times


def main() -> None:
    """Run, print, write."""
    with pool_place(PLACE_BYTES) as place:
        pool, large = open_pool(place, create=True)
        small = pool.namespace(SMALL_FINGERPRINT, 0, [SMALL_PART_BYTES], label="small")
        note("filling 900,000 slots of another namespace ...")
        fill(pool, large, CHAINS)
        beside = microseconds(pool, small, 1 << 24)
        slots = small.stats()["slots"]
        pool.close()
    note(f"the small namespace has {slots:,} slots")
    finish(
        "evict",
        [
            Result("reserve one block, mean", sum(beside) / len(beside), "us"),
            Result("reserve one block, p50", median(beside), "us"),
            Result("reserve one block, p99", percentile(beside, 99), "us"),
            Result("reserve one block, worst", percentile(beside, 100), "us"),
        ],
    )


if __name__ == "__main__":
    main()
