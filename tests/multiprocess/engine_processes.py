"""Processes that use one ``PegaEngine``, and values that prove by themselves that they are whole."""

import hashlib
import importlib
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from pegaflow import PegaEngine, PoolBusy, PoolFull
from tests.patience import WAIT_SECONDS_MAX, patiently

KEYS = [f"key {number}" for number in range(24)]
SIZES = (0, 40, 700, 5000, 9000, 40_000, 200_000, 1_100_000)
DIGEST_BYTES = 32
CHECKED_MIN = 20


def make_value(picks: random.Random, key: str) -> str | bytes:
    """A value of random size and type that begins with the digest of its key and the rest of it."""
    body = picks.randbytes(picks.choice(SIZES))
    if picks.random() < 0.3:
        text = body[: len(body) // 2].hex()
        return hashlib.sha256((key + text).encode()).hexdigest() + text
    return hashlib.sha256(key.encode() + body).digest() + body


def is_whole(key: str, value: str | bytes) -> bool:
    """Whether ``make_value`` made this value for this key."""
    if isinstance(value, str):
        digest, text = value[: 2 * DIGEST_BYTES], value[2 * DIGEST_BYTES :]
        return digest == hashlib.sha256((key + text).encode()).hexdigest()
    return value[:DIGEST_BYTES] == hashlib.sha256(key.encode() + value[DIGEST_BYTES:]).digest()


def hammer(name: str, shm_dir: str, seed: int, seconds: float, evict: bool) -> None:
    """Put, get, remove and list at random, checking everything that comes back, for so long and until it has got
    values. Writes how many."""
    picks = random.Random(seed)
    checked = 0
    # A pool that evicts has no room while all that is left is in use.
    in_the_way: tuple[type[Exception], ...] = (PoolBusy, PoolFull) if evict else (PoolBusy,)
    with patiently(lambda: PegaEngine(name=name, shm_dir=shm_dir, evict=evict)) as engine:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or checked < CHECKED_MIN:
            key = picks.choice(KEYS)
            action = picks.random()
            if action < 0.4:
                made = make_value(picks, key)
                patiently(partial(engine.put, key, made), in_the_way)
                continue
            if action < 0.41:
                assert set(patiently(engine.__iter__)) <= set(KEYS)
                assert 0 <= patiently(engine.__len__) <= 2 * len(KEYS)
                continue
            value = patiently(partial(engine.remove if action < 0.5 else engine.get, key))
            if value is not None:
                assert is_whole(key, value), f"{key}: {len(value)} wrong {type(value).__name__}"
                checked += 1
    sys.stdout.write(str(checked))


def put_all(name: str, shm_dir: str, seed: int) -> None:
    """Put a value for every key."""
    picks = random.Random(seed)
    with PegaEngine(name=name, shm_dir=shm_dir, pool_size="64mib") as engine:
        for key in KEYS:
            patiently(partial(engine.put, key, make_value(picks, key)))


def call(module: str, function: str, *arguments: object) -> None:
    """Call a function of another module."""
    getattr(importlib.import_module(module), function)(*arguments)


def start(function: str, *arguments: object, **environment: str) -> "subprocess.Popen[str]":
    """Call ``function`` of this module in a process of its own."""
    code = f"from tests.multiprocess import engine_processes as e\ne.{function}(*{arguments!r})"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", **environment},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]", timeout_s: float = WAIT_SECONDS_MAX) -> str:
    """Output of a process that has to end well."""
    output, errors = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, errors
    return output
