"""One operation on a ``PegaEngine`` that is killed on its way, and what is left then."""

import json
import time
from pathlib import Path

from pegaflow import PegaEngine, _native

POOL_BYTES = 4 << 20
KEY = "key"
OLD = b"old " * 50_000
NEW = "new " * 30_000
SMALL = b"small"
REAP_WAIT_S = 10.0


def die_in_put(name: str, shm_dir: str, point: str, value: str, evict: bool) -> None:
    """Be killed at a crash point while replacing the value of ``KEY``."""
    with PegaEngine(name=name, shm_dir=shm_dir, evict=evict) as engine:
        _native.crash_point_arm(point)
        engine.put(KEY, {"new": NEW, "small": SMALL}[value])


def die_in_remove(name: str, shm_dir: str, point: str) -> None:
    """Be killed at a crash point while removing ``KEY``."""
    with PegaEngine(name=name, shm_dir=shm_dir) as engine:
        _native.crash_point_arm(point)
        engine.remove(KEY)


def stop_in_put(name: str, shm_dir: str, point: str) -> None:
    """Stop (until SIGCONT) at a crash point while putting ``KEY``."""
    with PegaEngine(name=name, shm_dir=shm_dir) as engine:
        _native.crash_point_arm(point, "stop")
        engine.put(KEY, OLD)


def check_sound(engine: PegaEngine) -> None:
    """Wait until the dead are cleaned up; then no invariant may be broken and nothing be held."""
    assert engine.path is not None
    deadline = time.monotonic() + REAP_WAIT_S
    while True:
        _native.reap(engine.path)
        facts = json.loads(_native.inspect(engine.path))
        if all(process["alive"] for process in facts["processes"]):
            break
        assert time.monotonic() < deadline, facts["processes"]
        time.sleep(0.05)
    assert facts["locks_held"] == 0
    report = json.loads(_native.verify(engine.path))
    assert report["problems"] == []
    assert sum(namespace["leases"] for namespace in facts["namespaces"]) == 0
    assert sum(namespace["blocks_reserved"] for namespace in facts["namespaces"]) == 0


def bytes_held(engine: PegaEngine) -> int:
    """Bytes of all slots that hold something."""
    assert engine.path is not None
    facts = json.loads(_native.inspect(engine.path))
    return sum(int(namespace["bytes_sealed"]) for namespace in facts["namespaces"])


def open_engine(shm_dir: Path, *, evict: bool = False) -> PegaEngine:
    """The engine of the test."""
    return PegaEngine(name="crash", shm_dir=shm_dir, pool_size=POOL_BYTES, evict=evict)
