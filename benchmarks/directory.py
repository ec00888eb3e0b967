"""What does a million registered blocks cost a Redis, how fast do they get there, and how long does a question take?"""

import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import redis

from benchmarks._bigpool import FINGERPRINT, PART_BYTES, chain_keys, store
from benchmarks._common import Result, finish, note, percentile, pool_place
from pegaflow import _native

BLOCKS = 1_000_000
CHAIN = 10_000
BATCH = 1000
POOL_BYTES = 400 << 20
PLACE_BYTES = 1 << 30
KEYS = (100, 1_000)
SAMPLES = 1_000
ADDRESS = "10.0.0.1:7400"
PATIENCE_SECONDS = 300.0


@contextmanager
def redis_server() -> Iterator[redis.Redis]:
    """A private server without persistence."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("redis-server is not installed (Debian: apt install redis-server).")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    directory = tempfile.mkdtemp(prefix="pegaflow-bench-directory-")
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", directory]
    server = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
    client = redis.Redis(host="127.0.0.1", port=port)
    try:
        wait_for("the server", lambda: bool(ping(client)))
        yield client
    finally:
        client.close()
        server.kill()
        server.wait()
        shutil.rmtree(directory, ignore_errors=True)


def ping(client: redis.Redis) -> bool:
    """Whether it answers."""
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def wait_for(what: str, holds: Callable[[], bool]) -> float:
    """Seconds until it holds."""
    start = time.perf_counter()
    while not holds():
        if time.perf_counter() - start > PATIENCE_SECONDS:
            raise SystemExit(f"Waited {PATIENCE_SECONDS:.0f} s in vain for {what}.")
        time.sleep(0.001)
    return time.perf_counter() - start


def fill(pool: _native.Pool, namespace: _native.Namespace) -> None:
    """A hundred chains of ten thousand blocks."""
    for chain in range(BLOCKS // CHAIN):
        keys, done = chain_keys(chain, CHAIN), 0
        while done < CHAIN:
            done += store(pool, namespace, keys[done : done + BATCH], keys[done - 1] if done else None)


def ask(directory: _native.Directory, namespace: _native.Namespace, keys: list[bytes]) -> list[list[str]]:
    """Per key, who is said to have it."""
    query = directory.find([(namespace, keys)])
    while query is not None:
        answer = query.poll()
        if answer is not None:
            return answer[0]
        time.sleep(0.00002)
    return [[] for _ in keys]


def latencies(directory: _native.Directory, namespace: _native.Namespace, beside: str) -> list[Result]:
    """Of questions for prefixes of chains in random order."""
    order, results, unanswered = random.Random(1), [], 0
    for count in KEYS:
        times: list[float] = []
        while len(times) < SAMPLES:
            keys = chain_keys(order.randrange(BLOCKS // CHAIN), count)
            start = time.perf_counter_ns()
            owners = ask(directory, namespace, keys)
            took_ms = (time.perf_counter_ns() - start) / 1e6
            if all(owner == [ADDRESS] for owner in owners):
                times.append(took_ms)
                continue
            if any(owners):
                raise SystemExit("The directory does not name the owner of a block.")
            # The server was not given a processor for longer than a question may take; then it is left alone a while.
            unanswered += 1
            wait_for("an answer of the server", partial(owner_of, directory, namespace, keys[:1]))
        for percent in (50, 99):
            results.append(
                Result(f"question of {count:,} keys, {beside}, p{percent}", percentile(times, percent), "ms")
            )
    results.append(Result(f"questions without an answer in time, {beside}", unanswered, "questions"))
    return results


def used_bytes(client: redis.Redis) -> int:
    """Memory of the server."""
    return int(cast("dict[str, int]", client.info("memory"))["used_memory"])


def main() -> None:
    """Run, print, write."""
    results: list[Result] = []
    with pool_place(PLACE_BYTES) as place, redis_server() as client:
        note("filling a pool of 1,000,000 blocks ...")
        pools = [open_pool(place, name, slots) for name, slots in (("owner", BLOCKS + 50_000), ("asker", 1000))]
        namespaces = [pool.namespace(FINGERPRINT, 0, [PART_BYTES]) for pool in pools]
        fill(pools[0], namespaces[0])
        url = f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}/0"
        before, start = used_bytes(client), time.perf_counter()
        owner = _native.Directory(pools[0], url, address=ADDRESS)
        wait_for("registrations", lambda: is_complete(owner))
        seconds = time.perf_counter() - start
        results.append(Result("registrations", BLOCKS / seconds / 1000, "1,000 blocks/s"))
        bytes_per_block = (used_bytes(client) - before) / BLOCKS
        results.append(Result("memory of the server", bytes_per_block, "bytes/block"))
        results.append(Result("memory of the owner", 12.0, "bytes/slot"))
        asker = _native.Directory(pools[1], url)
        results += latencies(asker, namespaces[1], "at rest")
        client.flushall()
        last = chain_keys(BLOCKS // CHAIN - 1, CHAIN)[-1:]
        seconds = wait_for("repair", lambda: owner_of(asker, namespaces[1], last) and is_complete(owner))
        results.append(Result("everything registered after a flush", seconds, "s", "aim of 100,000 blocks", 10.0))
        for directory in (asker, owner):
            directory.close()
        for pool in pools:
            pool.close()
    finish("directory", results)


def open_pool(place: Path, name: str, slots: int) -> _native.Pool:
    """A new pool."""
    return _native.Pool.open(name, shm_dir=str(place), pool_bytes=POOL_BYTES, slots_max=slots)


def is_complete(directory: _native.Directory) -> bool:
    """Whether all is registered."""
    owner = directory.facts()["owner"]
    return bool(owner["complete"]) and int(owner["blocks"]) == BLOCKS


def owner_of(directory: _native.Directory, namespace: _native.Namespace, keys: list[bytes]) -> bool:
    """Whether the owner is named for these keys."""
    return ask(directory, namespace, keys) == [[ADDRESS]]


if __name__ == "__main__":
    main()
