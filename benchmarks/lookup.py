"""How long does it take to find the longest cached prefix in a pool of a million slots?"""

import multiprocessing
import random
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

from benchmarks._bigpool import CHAINS, PLACE_BYTES, chain_keys, fill, open_pool, store
from benchmarks._common import Result, finish, note, percentile, pool_place
from pegaflow import _native

PREFIXES = (10, 100, 1_000, 10_000)
WRITERS = 4
WRITER_BATCH = 64
WRITER_START_SECONDS_MAX = 60.0
# Chains that are looked up: leased, so that the writers evict others; and enough of them that no cache holds all.
CHAINS_READ = 30
SAMPLES = {10: 20_000, 100: 10_000, 1_000: 2_000, 10_000: 300}
AIM_US = {1_000: 50.0}


def write(place: str, writer: int, ready: Event, stop: Event) -> None:
    """Store new chains for ever; the pool is full, so every block evicts another."""
    pool, namespace = open_pool(Path(place))
    chain = 1_000_000 * (writer + 1)
    while not stop.is_set():
        stored = store(pool, namespace, chain_keys(chain, WRITER_BATCH), None)
        if stored:
            ready.set()
        chain += 1
    pool.close()


def main() -> None:
    """Run, print, write."""
    results: list[Result] = []
    with pool_place(PLACE_BYTES) as place:
        note("filling a pool of 1,000,000 slots ...")
        pool, namespace = open_pool(place, create=True)
        fill(pool, namespace)
        chains = [chain_keys(chain) for chain in range(min(CHAINS_READ, CHAINS))]
        leased = [namespace.lease(keys) for keys in chains]
        if any(len(refs) != len(keys) for refs, keys in zip(leased, chains, strict=True)):
            raise SystemExit("Blocks that were stored are not found; run 'make test'.")
        results += measure_all(namespace, chains, "alone")
        results += measure_counting(namespace, chains)
        results += with_writers(pool, namespace, place, chains)
        for refs in leased:
            pool.release(refs)
        pool.close()
    finish("lookup", results)


def with_writers(
    pool: _native.Pool, namespace: _native.Namespace, place: Path, chains: list[list[bytes]]
) -> list[Result]:
    """The same while other processes store and evict."""
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    ready = [spawn.Event() for _ in range(WRITERS)]
    writers = [spawn.Process(target=write, args=(str(place), index, ready[index], stop)) for index in range(WRITERS)]
    for writer in writers:
        writer.start()
    try:
        for event in ready:
            if not event.wait(WRITER_START_SECONDS_MAX):
                raise SystemExit("A writing process did not start to write.")
        return measure_all(namespace, chains, f"{WRITERS} writers")
    finally:
        stop.set()
        for writer in writers:
            writer.join()


def measure_all(namespace: _native.Namespace, chains: list[list[bytes]], beside: str) -> list[Result]:
    """Percentiles of hits and misses for every length of prefix."""
    index = {key: 0 for keys in chains for key in keys}
    results = []
    for blocks in PREFIXES:
        note(f"{blocks} blocks, {beside} ...")
        hits = [keys[:blocks] for keys in chains]
        misses = [chain_keys(10**12 + chain, blocks) for chain in range(len(chains))]
        for outcome, keysets, expected in (("hit", hits, blocks), ("miss", misses, 0)):
            ours = microseconds(namespace.lookup, keysets, SAMPLES[blocks], expected)
            theirs = microseconds(lambda keys: dict_lookup(index, keys), keysets, SAMPLES[blocks] // 10, expected)
            for percent in (50, 99):
                name = f"{outcome} {blocks:,} blocks, {beside}, p{percent}"
                reference = percentile(theirs, percent)
                results.append(Result(name, percentile(ours, percent), "us", "loop over a dict", reference))
            if outcome == "hit" and blocks in AIM_US:
                aim = AIM_US[blocks]
                results.append(Result(f"hit {blocks:,} blocks, {beside}, p50", percentile(ours, 50), "us", "aim", aim))
    return results


def measure_counting(namespace: _native.Namespace, chains: list[list[bytes]]) -> list[Result]:
    """What counting a prompt in the pool's statistics adds to looking it up, as vLLM's scheduler does both."""
    results = []
    for blocks in PREFIXES[1:]:
        note(f"{blocks} blocks, counted ...")
        hits = [keys[:blocks] for keys in chains]
        misses = [chain_keys(10**13 + chain, blocks) for chain in range(len(chains))]
        for outcome, keysets, expected in (("hit", hits, blocks), ("miss", misses, 0)):

            def counted(keys: list[bytes]) -> int:
                found = namespace.lookup(keys)
                namespace.note_prompt(keys, start=0, ram=found, ssd=found, peer=found, late=found)
                return found

            # In turns, so that what else runs on the host takes part in both.
            rounds = [
                [microseconds(way, keysets, SAMPLES[blocks] // 5, expected) for way in (namespace.lookup, counted)]
                for _ in range(5)
            ]
            alone, both = (
                percentile([time for times in way for time in times], 50) for way in zip(*rounds, strict=True)
            )
            name = f"{outcome} {blocks:,} blocks, looked up and counted, alone, p50"
            results.append(Result(name, both, "us", "lookup alone", alone))
    return results


def microseconds(
    lookup: Callable[[list[bytes]], int], keysets: list[list[bytes]], samples: int, expected: int
) -> list[float]:
    """Times of single calls on chains in random order, so that the processor's caches help no more than in service."""
    order = random.Random(1)
    times = []
    for _ in range(max(samples, 20)):
        # New objects, as the hashes of a request are: what may be cold is the pool, not the question.
        keys = [bytes(memoryview(key)) for key in order.choice(keysets)]
        start = time.perf_counter_ns()
        found = lookup(keys)
        times.append((time.perf_counter_ns() - start) / 1000)
        if found != expected:
            raise SystemExit(f"A lookup found {found} blocks instead of {expected}.")
    return times


def dict_lookup(index: dict[bytes, int], keys: list[bytes]) -> int:
    """What a scheduler would do with an index of its own in Python."""
    found = 0
    for key in keys:
        if key not in index:
            break
        found += 1
    return found


if __name__ == "__main__":
    main()
