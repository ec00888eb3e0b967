"""One operation on a ``PegaEngine`` that is killed on its way, and what is left then."""

import json
from pathlib import Path
from typing import Any

from pegaflow import PegaEngine, _native
from tests.patience import await_, patiently

POOL_BYTES = 4 << 20
KEY = "key"
OLD = b"old " * 50_000
NEW = "new " * 30_000
SMALL = b"small"


def die_in_put(name: str, shm_dir: str, point: str, value: str, evict: bool) -> None:
    """Be killed at a crash point while replacing the value of ``KEY``."""
    with PegaEngine(name=name, shm_dir=shm_dir, evict=evict) as engine:
        _native.crash_point_arm(point)
        patiently(lambda: engine.put(KEY, {"new": NEW, "small": SMALL}[value]))


def die_in_remove(name: str, shm_dir: str, point: str) -> None:
    """Be killed at a crash point while removing ``KEY``."""
    with PegaEngine(name=name, shm_dir=shm_dir) as engine:
        _native.crash_point_arm(point)
        patiently(lambda: engine.remove(KEY))


def stop_in_put(name: str, shm_dir: str, point: str) -> None:
    """Stop (until SIGCONT) at a crash point while putting ``KEY``."""
    with PegaEngine(name=name, shm_dir=shm_dir) as engine:
        _native.crash_point_arm(point, "stop")
        patiently(lambda: engine.put(KEY, OLD))


def check_sound(engine: PegaEngine) -> None:
    """Wait until the dead are cleaned up; then no invariant may be broken and nothing be held."""
    path = engine.path
    assert path is not None
    # The engine's own threads reap the dead too, make the pool grow and move blocks: what counts is what stays.
    await_(lambda: unsound(path) == [], lambda: unsound(path))


def unsound(path: str) -> list[Any]:
    """What is broken or held in a pool that nobody is doing anything with."""
    _native.reap(path)
    facts = json.loads(_native.inspect(path))
    found: list[Any] = [process for process in facts["processes"] if not process["alive"]]
    found += [("locks", facts["locks_held"])] * bool(facts["locks_held"])
    for namespace in facts["namespaces"]:
        found += [(what, namespace[what]) for what in ("leases", "blocks_reserved") if namespace[what]]
    return found + json.loads(_native.verify(path))["problems"]


def bytes_held(engine: PegaEngine) -> int:
    """Bytes of all slots that hold something."""
    assert engine.path is not None
    facts = json.loads(_native.inspect(engine.path))
    return sum(int(namespace["bytes_sealed"]) for namespace in facts["namespaces"])


def open_engine(shm_dir: Path, *, evict: bool = False) -> PegaEngine:
    """The engine of the test."""
    return PegaEngine(name="crash", shm_dir=shm_dir, pool_size=POOL_BYTES, evict=evict)
