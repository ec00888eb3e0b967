"""Started by ``test_native_cuda``: the small engine copies through the CUDA library named on the command line.

``python -m tests.unit.cuda_engine LIBRARY SHM_DIR BACKEND WHAT``: a race, ``random``, or ``one`` or ``all`` of the
driver's calls fail, as ``FAKE_CUDA_FAILURE`` in the environment says.
"""

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pegaflow import _native
from pegaflow.connector.copies import NativeTypes
from tests.engine_races import PROMPT, RACES, STEPS_MAX, EngineOn, finish, preempted_while_saving, random_events
from tests.unit.mini_engine import SINGLE, HostMemory, MiniEngine

STEP_S = 0.001
SLOW_BYTES_PER_SECOND = 20_000_000
"""A save then takes as long as two steps or more, so blocks are wanted again long before they are saved."""


class Memory(HostMemory):
    """Caches that are said to be on a device."""

    device = "cuda:0"
    part_bytes = 4096


class OnDefaultStream:
    """What ``DeviceCopier`` does, without PyTorch's streams."""

    def __init__(self, copier: _native.CudaCopier) -> None:
        self._copier = copier

    def save(self, part: int, layout: _native.KVLayout, refs: Sequence[int], block_ids: Sequence[int]) -> int:
        """Behind the default stream."""
        return self._copier.save(part, layout, refs, block_ids, 0)

    def load(self, part: int, layout: _native.KVLayout, refs: Sequence[int], block_ids: Sequence[int]) -> int:
        """Behind the default stream."""
        return self._copier.load(part, layout, refs, block_ids, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copier, name)


class Unhurried(MiniEngine):
    """An engine that leaves the transfer thread time for its copies, as any model does."""

    def _run_workers(self, plan: Any, scheduled: Any) -> None:
        time.sleep(STEP_S)
        super()._run_workers(plan, scheduled)


def engine_on(pool: _native.Pool, backend: str, save_rate: int, geometry: Any = SINGLE, **options: Any) -> MiniEngine:
    """An engine on a pool that has room for its first blocks. ``save_rate``: bytes per second at most, 0: no limit."""

    def attach(name: str, shm_dir: str) -> _native.Pool:
        return _native.Pool.open(name, shm_dir=shm_dir, create=False)

    def copier(opened: _native.Pool, device: str) -> Any:
        made = _native.CudaCopier(
            opened,
            backend=backend,
            ring_buffer_bytes=65536,
            copy_streams=2,
            save_bytes_per_second_max=save_rate,
        )
        return OnDefaultStream(made)

    native = NativeTypes(attach, copier, _native.KVLayout)
    engine = Unhurried(geometry, pool, native=native, memory=Memory, **options)
    while not all(space.stats()["slots_free"] for space in (engine.store.namespaces() or {}).values()):
        pass
    return engine


def one_call_fails(make: EngineOn) -> None:
    """What was being copied is lost, and computed and saved again by whoever comes next."""
    for _ in range(3):
        engine = make(blocks=400)
        request = engine.add(PROMPT)
        finish(engine)
        assert engine.store.off is None
    assert request.hit_tokens == len(PROMPT), request.hit_tokens


def all_calls_fail(make: EngineOn) -> None:
    """The cache goes off, each request ends, and nothing is held."""
    engine = make(blocks=400)
    requests = [engine.add(PROMPT, more=more) for more in (1, 5)]
    engine.run(STEPS_MAX)
    engine.assert_nothing_held()
    assert "700" in (engine.store.off or ""), engine.store.off
    assert [request.num_tokens - len(PROMPT) for request in requests] == [1, 5]
    later = engine.add(PROMPT)
    engine.run(STEPS_MAX)
    assert later.num_tokens == len(PROMPT) + 1
    assert later.hit_tokens == 0


def main(library: str, shm_dir: str, backend: str, what: str) -> None:
    """Run one of the cases."""
    ctypes.CDLL(library)  # found by its name from now on
    pool = _native.Pool.open("cuda", shm_dir=shm_dir, pool_bytes=64 << 20, segment_bytes=4 << 20)
    cases: dict[str, Callable[[EngineOn], None]] = {race.__name__: race for race in RACES}
    cases |= {"random": partial(random_events, seed=5), "one": one_call_fails, "all": all_calls_fail}
    slow = what in ("random", preempted_while_saving.__name__)
    cases[what](partial(engine_on, pool, backend, SLOW_BYTES_PER_SECOND if slow else 0))
    pool.close()
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
