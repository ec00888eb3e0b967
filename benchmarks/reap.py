"""How long until what a killed process held is free again, in a pool of a million slots?"""

import contextlib
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks._bigpool import CHAIN_BLOCKS, CHAINS_FULL, PLACE_BYTES, chain_keys, fill, key, open_pool
from benchmarks._common import Result, finish, median, note, percentile, pool_place
from pegaflow import _native

BLOCKS_RESERVED = 50_000
# With what is reserved half of the pool, its share: what its sibling has makes room for no more than that.
CHAINS_LEASED = CHAINS_FULL // 2 - BLOCKS_RESERVED // CHAIN_BLOCKS
ROUNDS = 9
REAP_MS_AIM = 1000.0
ANSWER_SECONDS_MAX = 120.0

SPAWN = multiprocessing.get_context("spawn")


def hold(place: str, answers: Connection) -> None:
    """Lease half of the pool, reserve some more, and wait to be killed."""
    pool, namespace = open_pool(Path(place))
    leased = sum(len(namespace.lease(chain_keys(chain))) for chain in range(CHAINS_LEASED))
    wanted = [key(CHAINS_FULL + os.getpid(), number) for number in range(BLOCKS_RESERVED)]
    reserved = len(namespace.reserve(wanted))
    answers.send((leased, reserved))
    with contextlib.suppress(EOFError):  # whoever waits for nothing any more is gone
        answers.recv()
    pool.close()


def start_holder(place: Path) -> tuple[multiprocessing.process.BaseProcess, int, int]:
    """A process that holds much, and how many blocks it leases and has reserved."""
    here, there = SPAWN.Pipe()
    child = SPAWN.Process(target=hold, args=(str(place), there), daemon=True)
    child.start()
    if not here.poll(ANSWER_SECONDS_MAX):
        child.kill()
        raise SystemExit("The process that is to be killed does not get ready.")
    leased, reserved = here.recv()
    return child, leased, reserved


def reaped(pool: _native.Pool) -> int:
    """Rows that this process has cleaned up."""
    return pool.stats()["processes_reaped"]


def milliseconds_until_reaped(pool: _native.Pool, place: Path, *, asked: bool) -> float:
    """From kill -9 until all that the process held is free; ``asked``: at once, else when a sibling notices."""
    child, leased, reserved = start_holder(place)
    if leased < CHAINS_LEASED * len(chain_keys(0)) or reserved < BLOCKS_RESERVED:
        raise SystemExit(f"Only {leased} blocks were leased and {reserved} reserved.")
    before = reaped(pool)
    start = time.perf_counter()
    child.kill()
    while reaped(pool) == before:
        if asked:
            pool.reap()
        if time.perf_counter() - start > ANSWER_SECONDS_MAX:
            raise SystemExit("The killed process is never reaped.")
        time.sleep(0.0005)
    took = time.perf_counter() - start
    child.join()
    return took * 1000


def main() -> None:
    """Run, print, write."""
    with pool_place(PLACE_BYTES) as place:
        note("filling all of 1,000,000 slots ...")
        pool, namespace = open_pool(place, create=True)
        fill(pool, namespace, CHAINS_FULL)
        note(f"killing {2 * ROUNDS} processes ...")
        asked = [milliseconds_until_reaped(pool, place, asked=True) for _ in range(ROUNDS)]
        noticed = [milliseconds_until_reaped(pool, place, asked=False) for _ in range(ROUNDS)]
        stats = namespace.stats()
        if stats["blocks_reserved"] != 0 or stats["slots_free"] + stats["blocks_sealed"] != stats["slots"]:
            raise SystemExit(f"Slots were lost: {stats}")
        pool.close()
    note(f"each held {CHAINS_LEASED * len(chain_keys(0)):,} leases and {BLOCKS_RESERVED:,} reservations")
    finish(
        "reap",
        [
            Result("asked at once, p50", median(asked), "ms", "aim", REAP_MS_AIM),
            Result("asked at once, worst", percentile(asked, 100), "ms", "aim", REAP_MS_AIM),
            Result("noticed by the one sibling, p50", median(noticed), "ms", "aim", REAP_MS_AIM),
            Result("noticed by the one sibling, worst", percentile(noticed, 100), "ms", "aim", REAP_MS_AIM),
        ],
    )


if __name__ == "__main__":
    main()
