"""The small engine on a real pool in host memory."""

from typing import Any

from pegaflow import _native
from pegaflow.connector.copies import NativeTypes
from tests.engine_races import STEPS_MAX, leases_in, problems_of
from tests.patience import await_
from tests.unit.mini_engine import SINGLE, MiniEngine


def open_pool(shm_dir: str) -> _native.Pool:
    """A small pool, made by whoever comes first."""
    return _native.Pool.open("real", shm_dir=shm_dir, pool_bytes=1 << 20, segment_bytes=1 << 16)


def engine_on(pool: Any, geometry: Any = SINGLE, **options: Any) -> MiniEngine:
    """An engine for which the pool has room."""

    def attach(name: str, shm_dir: str) -> Any:
        return _native.Pool.open(name, shm_dir=shm_dir, create=False)

    engine = MiniEngine(
        geometry,
        pool,
        native=NativeTypes(attach, lambda pool, device: _native.HostCopier(pool), _native.KVLayout),
        **options,
    )
    while not all(space.stats()["slots_free"] for space in (engine.store.namespaces() or {}).values()):
        pass  # the pool grows in the background; what is computed meanwhile may be saved or not
    return engine


def finish(engine: MiniEngine) -> None:
    """Run to the end; nothing is held and the pool is sound. Whoever leads an SSD tier may hold a lease for the moment
    of a write."""
    engine.run(STEPS_MAX)
    engine.assert_nothing_held()
    for worker in engine.workers:
        worker.shutdown()
    await_(lambda: leases(engine.pool) == 0)
    # Exact only while nobody changes the pool.
    await_(lambda: not problems_of(engine.pool.path), lambda: problems_of(engine.pool.path))


def leases(pool: Any) -> int:
    """All leases on blocks of a pool, those of peers included."""
    return leases_in(pool.path)
