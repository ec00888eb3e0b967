"""Caches on a device: the copier is told where blocks will be, and a lost device turns the cache off."""

from typing import Any

from pegaflow.connector.copies import NativeTypes
from tests.fakes import FakeCopier, FakeLayout, FakePool
from tests.unit.mini_engine import MiniEngine

PROMPT = list(range(100, 140))


class DeviceLike(FakeCopier):
    """A copier that gets ready for its blocks, and whose device can be lost."""

    def __init__(self, pool: FakePool, device: str) -> None:
        super().__init__(pool)
        self.device = device
        self.registered: list[tuple[Any, int]] = []
        self.lost = False

    def register(self, namespace: Any, part: int) -> None:
        self.registered.append((namespace, part))

    def problem(self) -> str | None:
        return "the device is lost (error 700)" if self.lost else None

    def _copy(self, job: int, kind: str, part: int, layout: Any, refs: list[int], block_ids: list[int]) -> Any:
        done = super()._copy(job, kind, part, layout, refs, block_ids)
        return type(done)(job, False, list(range(len(refs)))) if self.lost else done


def engine_on_device(ranks: int = 1) -> tuple[MiniEngine, FakePool, list[DeviceLike]]:
    pool = FakePool()
    copiers: list[DeviceLike] = []

    def copier(opened: Any, device: str) -> DeviceLike:
        copiers.append(DeviceLike(opened, device))
        return copiers[-1]

    native: Any = NativeTypes(lambda name, shm_dir: pool, copier, FakeLayout)  # type: ignore[arg-type]
    return MiniEngine(pool=pool, native=native, ranks=ranks), pool, copiers


def test_each_rank_registers_its_own_part_before_the_first_copy() -> None:
    engine, _, copiers = engine_on_device(ranks=2)
    engine.add(PROMPT)
    engine.step()
    namespaces = engine.store.namespaces()
    assert namespaces is not None
    assert [copier.registered for copier in copiers] == [[(namespaces[0], 0)], [(namespaces[0], 1)]]
    assert {copier.device for copier in copiers} == {"cpu"}
    engine.run()


def test_workers_hear_of_the_pool_once_before_there_is_anything_to_copy() -> None:
    engine, _, copiers = engine_on_device()
    assert engine.store.namespaces() is not None
    plans = [engine.step() for _ in range(3)]
    assert [plan.pool is not None for plan in plans] == [True, False, False]
    assert len(copiers) == 1


def test_lost_device_turns_the_cache_off_and_its_slots_are_not_used_again() -> None:
    engine, pool, copiers = engine_on_device()
    request = engine.add(PROMPT)
    engine.step()
    copiers[0].lost = True
    engine.run()
    assert request.num_tokens == len(PROMPT) + 1
    assert engine.store.off is not None
    assert "700" in engine.store.off
    assert pool.quarantined
    later = engine.add(PROMPT)
    engine.run()
    assert later.hit_tokens == 0
