"""How soon does a peer say how much of a prefix it has? Part of ``peers``: over the loopback, while processes write."""

import multiprocessing
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

from benchmarks._bigpool import PLACE_BYTES, chain_keys, fill, open_pool, store
from benchmarks._common import Result, note, percentile, pool_place
from pegaflow import _native

BLOCKS = 1_000
AIM_MS = 1.0
WRITERS = 4
WRITER_BATCH = 64
SAMPLES = 2_000
CHAINS_READ = 30
"""Prefixes that are asked for, leased so that the writers evict others."""
TOKEN = "of-the-benchmark"
LOOK_SECONDS = 20e-6
"""Pause between two looks at whether the answer is there."""
START_SECONDS_MAX = 120.0


def serve(place: str, address: str, ready: Event, stop: Event) -> None:
    """One process of the other host: it answers, and does nothing else."""
    pool, namespace = open_pool(Path(place))
    leased = [ref for chain in range(CHAINS_READ) for ref in namespace.lease(chain_keys(chain, BLOCKS))]
    server = _native.PeerServer(pool, address, token=TOKEN)
    while not server.facts()["serving"]:
        time.sleep(0.01)
    ready.set()
    stop.wait()
    server.close()
    pool.release(leased)
    pool.close()


def write(place: str, writer: int, ready: Event, stop: Event) -> None:
    """Store new chains for ever in the pool that is asked; it is full, so every block evicts another."""
    pool, namespace = open_pool(Path(place))
    chain = 1_000_000 * (writer + 1)
    while not stop.is_set():
        if store(pool, namespace, chain_keys(chain, WRITER_BATCH), None):
            ready.set()
        chain += 1
    pool.close()


def measure() -> list[Result]:
    """The answer of one peer to a question of 1,000 keys, alone and while four processes write into its pool."""
    load = os.getloadavg()[0]
    results = [Result("queries: load average before", load, "processes")]
    with pool_place(2 * PLACE_BYTES) as place, ExitStack() as stack:
        here, there = place / "here", place / "there"
        here.mkdir()
        there.mkdir()
        note("queries: filling a pool of 1,000,000 slots ...")
        filled, namespace = open_pool(there, create=True)
        stack.callback(filled.close)
        fill(filled, namespace)
        address = f"127.0.0.1:{free_port()}"
        stack.enter_context(started(serve, str(there), address))
        pool, asked = open_pool(here, create=True)
        stack.callback(pool.close)
        peers = _native.Peers(pool, [address], token=TOKEN)
        stack.callback(peers.close)
        wait_until_up(peers)
        results += sample(peers, asked, "alone")
        for writer in range(WRITERS):
            stack.enter_context(started(write, str(there), writer))
        results += sample(peers, asked, f"{WRITERS} writers")
    return results


def sample(peers: _native.Peers, namespace: _native.Namespace, beside: str) -> list[Result]:
    """Times of single questions, in random order."""
    note(f"queries: {SAMPLES:,} of {BLOCKS:,} blocks, {beside} ...")
    chains = [chain_keys(chain, BLOCKS) for chain in range(CHAINS_READ)]
    order = random.Random(1)
    times_ms = []
    for _ in range(SAMPLES):
        keys = order.choice(chains)
        start = time.perf_counter_ns()
        query = peers.find([(namespace, keys, True)])
        answer = query.poll() if query is not None else [b""]
        while answer is None and query is not None:
            time.sleep(LOOK_SECONDS)
            answer = query.poll()
        times_ms.append((time.perf_counter_ns() - start) / 1e6)
        if answer is None or answer[0].count(1) != BLOCKS:
            raise SystemExit("A peer did not find the blocks that it has, or was given up; run 'make test'.")
    name = f"query of {BLOCKS:,} blocks over loopback, {beside}"
    return [
        Result(f"{name}, p50", percentile(times_ms, 50), "ms", "aim", AIM_MS),
        Result(f"{name}, p99", percentile(times_ms, 99), "ms"),
    ]


def wait_until_up(peers: _native.Peers) -> None:
    """Until the peer has greeted."""
    deadline = time.monotonic() + START_SECONDS_MAX
    while peers.facts()[0]["state"] != "up":
        if time.monotonic() > deadline:
            raise SystemExit(f"The peer is not there: {peers.facts()[0]['problem']}")
        time.sleep(0.01)


def free_port() -> int:
    """A port that nobody has now, with the one behind it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


@contextmanager
def started(target: object, *arguments: object) -> Iterator[None]:
    """A process of its own, at work until the end."""
    spawn = multiprocessing.get_context("spawn")
    ready, stop = spawn.Event(), spawn.Event()
    process = spawn.Process(target=target, args=(*arguments, ready, stop))  # type: ignore[arg-type]
    process.start()
    try:
        if not ready.wait(START_SECONDS_MAX):
            raise SystemExit("A process of the benchmark did not start.")
        yield
    finally:
        stop.set()
        process.join()
