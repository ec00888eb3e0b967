"""The connector's two halves where something is full, late, broken or gone."""

from typing import Any

import pytest

from pegaflow.errors import PoolClosed
from tests.unit.mini_engine import SINGLE, MiniEngine
from tests.unit.test_connector_requests import PROMPT, warm


def test_full_pool_saves_what_fits_and_goes_on() -> None:
    engine = MiniEngine()
    engine.pool.slots_max = 4
    request = engine.add(PROMPT)
    engine.step()
    refs = engine.store.namespaces()[0].lease(request.block_hashes)  # type: ignore[index]
    engine.run()
    assert engine.recorder.counters["save_blocks_deferred"]
    engine.pool.release(refs)
    engine.assert_nothing_held()


def test_pinned_blocks_are_bounded() -> None:
    engine = MiniEngine(blocks=120)
    warm(engine, [99] * 8)
    engine.copiers[0].held = True
    engine.chunk_tokens = 400
    engine.add(list(range(400)), more=2)
    engine.step()
    assert sum(len(refs) for _, refs, _ in engine.plans[-1].saves[0].blocks) == 12
    engine.copiers[0].held = False
    engine.run()
    engine.assert_nothing_held()


def test_save_that_never_ends_is_given_up_and_quarantined() -> None:
    engine = MiniEngine()
    warm(engine, [99] * 8)
    engine.copiers[0].held = True
    request = engine.add(PROMPT)
    engine.step()
    engine.abort(request)
    engine.scheduler._saves._overdue_seconds = 0.0
    engine.step()
    assert not engine.scheduler.has_pending_saves()
    assert engine.block_pool.used() == 0
    assert len(engine.pool.quarantined) == 3
    engine.copiers[0].held = False
    engine.step()
    engine.assert_nothing_held()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("slow", [False, True])
def test_each_load_is_one_success_or_failure_however_long_it_takes(slow: bool, fails: bool) -> None:
    engine = MiniEngine()
    warm(engine)
    copier = engine.copiers[0]
    copier.held, copier.failing_loads = slow, {3} if fails else set()
    engine.scheduler._loads._overdue_seconds = 0.0 if slow else 3600.0
    request = engine.add(PROMPT)
    for _ in range(5):
        engine.step()
    copier.held = False
    engine.run()
    assert request.num_computed_tokens >= len(PROMPT)
    counts = [engine.recorder.counters.get(f"load_{what}", 0) for what in ("overdue", "success", "failure")]
    assert counts == [slow, not fails, fails]
    engine.assert_nothing_held()


def test_load_that_takes_too_long_is_counted_but_never_abandoned() -> None:
    engine = MiniEngine()
    warm(engine)
    engine.copiers[0].held = True
    engine.scheduler._loads._overdue_seconds = 0.0
    request = engine.add(PROMPT)
    for _ in range(5):
        engine.step()
    assert request.state == "loading"
    assert engine.recorder.counters["load_overdue"] == 1
    engine.copiers[0].held = False
    engine.run()
    assert request.hit_tokens == len(PROMPT)
    engine.assert_nothing_held()


def test_copier_without_room_delays_loads_and_drops_saves() -> None:
    engine = MiniEngine()
    warm(engine)
    engine.copiers[0].jobs_max = 1
    engine.copiers[0].held = True
    requests = [engine.add(PROMPT) for _ in range(4)]
    engine.step()
    engine.add([5] * 12)
    engine.step()
    engine.copiers[0].held = False
    engine.run()
    assert all(request.hit_tokens == len(PROMPT) for request in requests)
    assert engine.recorder.counters["save_failure"] >= 1
    engine.assert_nothing_held()


def test_worker_without_the_pool_fails_loads_and_turns_the_cache_off() -> None:
    warmed = MiniEngine()
    warm(warmed)
    engine = MiniEngine(SINGLE, warmed.pool)

    def refuse(leader: Any) -> None:
        raise PoolClosed("gone")

    engine.pool.member = lambda: (1, 1)  # type: ignore[method-assign]
    engine.pool.join = refuse  # type: ignore[method-assign]
    address = engine.store.namespaces() and engine.store.address()
    assert address is not None
    engine.pool.member = lambda: (2, 2)  # type: ignore[method-assign]
    request = engine.add(PROMPT)
    engine.run()
    assert request.num_tokens == len(PROMPT) + 1
    assert engine.store.off
    engine.assert_nothing_held()


def test_error_of_the_pool_becomes_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MiniEngine()
    warm(engine)
    engine.pool.fail_publish = RuntimeError("bug")
    engine.add([5] * 20)
    engine.run()
    assert engine.recorder.counters.pop("hook_errors")
    assert engine.block_pool.used() == 0


def test_closed_pool_turns_the_cache_off() -> None:
    engine = MiniEngine()
    warm(engine)
    engine.pool.fail_publish = PoolClosed("closed")
    engine.add([5] * 20)
    engine.run()
    assert engine.store.off == "closed"
    engine.add(PROMPT)
    engine.run()


def test_shutdown_quarantines_what_workers_may_still_copy() -> None:
    engine = MiniEngine()
    warm(engine, [99] * 8)
    engine.copiers[0].held = True
    engine.add(PROMPT)
    engine.step()
    engine.scheduler.shutdown()
    engine.scheduler.shutdown()
    assert len(engine.pool.quarantined) == 3
    assert engine.pool.closed
    for worker in engine.workers:
        worker.shutdown()
        worker.shutdown()
