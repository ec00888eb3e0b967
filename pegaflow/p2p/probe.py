"""Peers looked at from outside of any engine: do they answer, how fast, and how fast do blocks come.

A connection belongs to a pool, so each look makes a small one of its own and removes it.
"""

import ctypes
import hashlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pegaflow import _native
from pegaflow.config import ConnectorConfig
from pegaflow.errors import PegaFlowError, PoolBusy
from pegaflow.p2p import devices
from pegaflow.p2p.addresses import parse_address, resolve

SCRATCH_BYTES = 16 << 20
"""Of a pool that blocks do not come to."""

SLACK_BYTES = 64 << 20
"""What such a pool needs besides its blocks."""

CONNECT_SECONDS_MAX = 5.0
ANSWER_SECONDS_MAX = 5.0
FILL_SECONDS_MAX = 60.0
FETCH_SECONDS_MAX = 120.0
PIECE_BLOCKS = 64
"""Blocks of one fetch."""

FETCHES_MAX = 4
"""Fetches on their way at a time."""

POLL_SECONDS = 0.0002
BENCH_FINGERPRINT = hashlib.sha256(b"pegaflow: blocks that are made up for measuring peers").digest()
BENCH_LABEL = "made up, for 'pegaflow peers bench'"
_ENDED = ("up", "backing off", "itself")


@dataclass(frozen=True)
class PeerReport:
    """One host behind an address."""

    address: str
    state: str
    """``"up"``, ``"backing off"`` (it failed, see ``problem``), ``"itself"`` or ``"unknown"`` (no answer yet)."""
    problem: str | None
    transport: str | None
    rtt_us: int | None


@dataclass(frozen=True)
class PingReport:
    """Round trips of a question for one block to one host."""

    address: str
    answers: int
    lost: int
    """Questions without an answer in time."""
    least_us: int | None
    median_us: int | None
    most_us: int | None
    problem: str | None


@dataclass(frozen=True)
class BenchReport:
    """Blocks read from one host."""

    address: str
    transport: str | None
    blocks: int
    block_bytes: int
    seconds: float
    bytes_per_second: int
    problem: str | None
    """Why less came than was asked for; ``None`` if all came."""


def hosts_of(addresses: Sequence[str]) -> list[str]:
    """Every host behind ``addresses``, each once. Raises ``PegaFlowError`` for a name that cannot be looked up."""
    hosts: dict[str, None] = {}
    for address in addresses:
        try:
            hosts |= dict.fromkeys(resolve(parse_address(address, "ADDRESS")))
        except OSError as error:
            raise PegaFlowError(f"The host of {address} cannot be looked up: {error.strerror or error}.") from None
    return list(hosts)


def look(config: ConnectorConfig, hosts: Sequence[str], shm_dir: str) -> list[PeerReport]:
    """How each of ``hosts`` answers."""
    with _scratch(shm_dir, SCRATCH_BYTES) as pool, _client(config, pool, hosts) as client:
        facts = _settled(client, _bench_space(pool, 4096))
    return [
        PeerReport(str(one["address"]), str(one["state"]), one["problem"], one["transport"], one["rtt_us"])
        for one in facts
    ]


def ask_directory(url: str, shm_dir: str, *, seconds_max: float = CONNECT_SECONDS_MAX) -> tuple[str, str | None]:
    """``url`` without its password, and why the store there does not answer; ``None`` if it does within
    ``seconds_max``. Writes nothing to it. Raises ``InvalidArgument`` for a URL that is none."""
    with _scratch(shm_dir, SCRATCH_BYTES) as pool:
        directory = _native.Directory(pool, url)
        deadline = time.monotonic() + seconds_max
        try:
            # What is too slow for an engine at first, and says so, may answer the next time.
            while not (facts := directory.facts())["answered"]:
                if time.monotonic() > deadline:
                    return directory.url, str(facts["problem"] or "it does not answer in time")
                time.sleep(0.01)
            return directory.url, None
        finally:
            directory.close()


def ping(config: ConnectorConfig, host: str, shm_dir: str, count: int) -> PingReport:
    """Ask ``host`` for one block ``count`` times, one after the other."""
    times: list[float] = []
    with _scratch(shm_dir, SCRATCH_BYTES) as pool, _client(config, pool, [host]) as client:
        space = _bench_space(pool, 4096)
        [fact] = _settled(client, space)
        for number in range(count if fact["state"] == "up" else 0):
            started = time.perf_counter()
            if _answers(client, space, [b"ping %d" % number]) is None:
                break
            times.append(time.perf_counter() - started)
        [fact] = client.facts()
    least, median, most = (int(1e6 * one) for one in _spread(times)) if times else (None, None, None)
    return PingReport(host, len(times), count - len(times), least, median, most, _problem(fact))


def fill(pool: "_native.Pool", size_bytes: int, block_bytes: int) -> int:
    """Put made-up blocks into a pool for ``bench`` on another host. Returns how many are there. Raises ``PoolBusy`` if
    the pool makes no room for them."""
    space = _bench_space(pool, block_bytes)
    keys = bench_keys(size_bytes // block_bytes)
    memory = ctypes.create_string_buffer(os.urandom(block_bytes), block_bytes)
    layout = _native.KVLayout([(ctypes.addressof(memory), block_bytes, block_bytes)], 1)
    copier = _native.HostCopier(pool)
    deadline = time.monotonic() + FILL_SECONDS_MAX
    try:
        while missing := [key for key, here in zip(keys, space.contains(keys), strict=True) if not here]:
            if time.monotonic() > deadline:
                raise PoolBusy(f"The pool has room for {len(keys) - len(missing)} of {len(keys)} blocks only.")
            taken = space.reserve(missing[:PIECE_BLOCKS], parents=[None] * len(missing[:PIECE_BLOCKS]))
            if not taken:
                pool.grow_ahead(space)
                time.sleep(0.01)
                continue
            refs = [ref for _, ref in taken]
            copier.save(0, layout, refs, [0] * len(refs))
            while copier.in_flight():
                copier.wait(1_000)
            pool.publish(refs)
    finally:
        copier.close()
    return len(keys)


def clear(pool: "_native.Pool", block_bytes: int) -> None:
    """Remove what ``fill`` made."""
    _bench_space(pool, block_bytes).reset(wait=False)


def bench(config: ConnectorConfig, host: str, shm_dir: str, size_bytes: int, block_bytes: int) -> BenchReport:
    """Read ``size_bytes`` of blocks that ``fill`` made on ``host``."""
    keys = bench_keys(size_bytes // block_bytes)
    with _scratch(shm_dir, size_bytes + SLACK_BYTES) as pool, _client(config, pool, [host]) as client:
        space = _bench_space(pool, block_bytes)
        pool.grow_ahead(space)
        _settled(client, space)
        query = client.find([(space, keys, False)])
        tiers = _wait(query) if query is not None else None
        present = sum(map(bool, tiers[0])) if tiers else 0
        started = time.perf_counter()
        blocks = _fetch_all(query, space, present) if query is not None and present else 0
        seconds = time.perf_counter() - started
        if query is not None:
            query.close()
        [fact] = client.facts()
    problem = _problem(fact)
    if problem is None and present < len(keys):
        problem = f"it has {present} of {len(keys)} made-up blocks: run 'pegaflow peers fill' there with the same sizes"
    elif problem is None and blocks < present:
        problem = f"{present - blocks} of {present} blocks did not come"
    rate = int(blocks * block_bytes / seconds) if blocks else 0
    return BenchReport(host, fact["transport"], blocks, block_bytes, round(seconds, 6), rate, problem)


def bench_keys(count: int) -> list[bytes]:
    """Keys of made-up blocks."""
    return [hashlib.sha256(b"made up %d" % number).digest()[:16] for number in range(count)]


def _fetch_all(query: Any, space: "_native.Namespace", count: int) -> int:
    """Fetch blocks in pieces, some at a time. Returns how many came."""
    pieces = [(start, min(start + PIECE_BLOCKS, count)) for start in range(0, count, PIECE_BLOCKS)]
    deadline = time.monotonic() + FETCH_SECONDS_MAX
    open_: list[tuple[Any, int]] = []
    came = 0
    try:
        while (pieces or open_) and time.monotonic() < deadline:
            while pieces and len(open_) < FETCHES_MAX:
                start, stop = pieces[0]
                fetch = query.fetch(0, start, stop)
                if fetch is None:
                    break
                pieces.pop(0)
                open_.append((fetch, start))
                if start + fetch.keys < stop:
                    pieces.insert(0, (start + fetch.keys, stop))
            if not open_:
                return came
            done = [one for one in open_ if one[0].poll() is not None]
            for one in done:
                came += one[0].found()
                one[0].close()
                open_.remove(one)
            if not done:
                time.sleep(POLL_SECONDS)
    finally:
        for fetch, _ in open_:
            fetch.close()
    return came


def _bench_space(pool: "_native.Pool", block_bytes: int) -> "_native.Namespace":
    # The size of blocks is a part of the name: a namespace has one.
    fingerprint = hashlib.sha256(BENCH_FINGERPRINT + b"%d" % block_bytes).digest()
    return pool.namespace(fingerprint, 0, [block_bytes], label=BENCH_LABEL)


@contextmanager
def _scratch(shm_dir: str, size_bytes: int) -> Iterator["_native.Pool"]:
    """A pool that nobody else has, removed in the end."""
    name = f"peers-{uuid.uuid4().hex[:12]}"
    pool = _native.Pool.open(name, shm_dir=shm_dir, pool_bytes=size_bytes, label="pegaflow peers")
    path = pool.path
    try:
        yield pool
    finally:
        pool.close()
        _native.remove(path, force=True)


@contextmanager
def _client(config: ConnectorConfig, pool: "_native.Pool", hosts: Sequence[str]) -> Iterator["_native.Peers"]:
    nics: list[_native.Nic] = []
    if config.nics != ():
        ports = devices.choose(devices.find_ports(), config.nics, devices.own_node())
        nics = [_native.Nic(one.device, one.port, one.gid_index, one.mtu_bytes, one.node) for one in ports]
    client = _native.Peers(
        pool, hosts, token=config.peer_token, tls=config.peer_tls, nics=nics, qps_per_peer=config.qps_per_peer
    )
    try:
        yield client
    finally:
        client.close()


def _settled(client: "_native.Peers", space: "_native.Namespace") -> list[dict[str, Any]]:
    """Facts of all peers, once each has answered or failed."""
    deadline = time.monotonic() + CONNECT_SECONDS_MAX
    while True:
        _answers(client, space, [b"hello"])
        facts = client.facts()
        if all(one["state"] in _ENDED for one in facts) or time.monotonic() > deadline:
            return facts
        time.sleep(0.01)


def _answers(client: "_native.Peers", space: "_native.Namespace", keys: Sequence[bytes]) -> list[bytes] | None:
    query = client.find([(space, keys, False)])
    if query is None:
        return None
    try:
        return _wait(query)
    finally:
        query.close()


def _wait(query: "_native.PeerQuery") -> list[bytes] | None:
    deadline = time.monotonic() + ANSWER_SECONDS_MAX
    while (answers := query.poll()) is None and time.monotonic() < deadline:
        time.sleep(0)  # as soon as it is there: somebody measures this
    return answers


def _problem(fact: dict[str, Any]) -> str | None:
    if fact["state"] == "up":
        return None
    if fact["state"] == "itself":
        return "it is the pool itself"
    return str(fact["problem"] or "it did not answer in time")


def _spread(times: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(times)
    return ordered[0], ordered[len(ordered) // 2], ordered[-1]
