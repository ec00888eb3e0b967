"""Loads: each one ends, no good block is held against it, and no lease is forgotten."""

from typing import Any

import pytest

from pegaflow.connector.copies import NativeTypes
from pegaflow.connector.loads import STILL_STEPS_MAX
from pegaflow.connector.request_state import RequestTable
from pegaflow.errors import PoolBusy
from tests.fakes import FakeCopier, FakeLayout, FakePool
from tests.unit.mini_engine import HYBRID, SINGLE, MiniEngine
from tests.unit.test_connector_requests import PROMPT, warm


def warmed_pool() -> FakePool:
    engine = MiniEngine()
    warm(engine)
    pool: FakePool = engine.pool
    return pool


def engine_that_attaches(pool: FakePool, errors: list[Exception]) -> MiniEngine:
    """An engine whose worker meets these errors, one by one, when it opens the pool."""

    def attach(name: str, shm_dir: str) -> Any:
        if errors:
            raise errors.pop(0)
        return pool

    native: Any = NativeTypes(attach, lambda opened, device: FakeCopier(pool), FakeLayout)  # type: ignore[arg-type]
    return MiniEngine(SINGLE, pool, native=native)


def test_any_error_while_attaching_ends_the_loads_and_turns_the_cache_off() -> None:
    engine = engine_that_attaches(warmed_pool(), [RuntimeError("bug")] * 9)
    request = engine.add(PROMPT)
    engine.run()
    assert request.num_tokens == len(PROMPT) + 1
    assert "bug" in (engine.store.off or "")
    engine.assert_nothing_held()


def test_busy_pool_costs_a_load_and_neither_its_blocks_nor_the_cache() -> None:
    engine = engine_that_attaches(warmed_pool(), [PoolBusy("busy")] * 2)
    first = engine.add(PROMPT)
    engine.run()
    assert engine.recorder.counters["load_failure"] == 1
    assert engine.store.off is None
    later = engine.add(PROMPT)
    engine.run()
    assert (first.hit_tokens, later.hit_tokens) == (0, len(PROMPT))
    assert engine.recorder.counters.pop("hook_errors") == 2
    engine.assert_nothing_held()


def test_copier_of_a_failed_attach_is_closed() -> None:
    pool = warmed_pool()
    copiers: list[FakeCopier] = []

    class Busy(FakeCopier):
        def register(self, namespace: Any, part: int) -> None:
            raise PoolBusy("busy")

    def copier(opened: Any, device: str) -> FakeCopier:
        copiers.append(FakeCopier(pool) if copiers else Busy(pool))
        return copiers[-1]

    native: Any = NativeTypes(lambda name, shm_dir: pool, copier, FakeLayout)  # type: ignore[arg-type]
    engine = MiniEngine(SINGLE, pool, native=native)
    request = engine.add(PROMPT)
    engine.run()
    assert [made.closed for made in copiers] == [True, False]
    assert request.num_tokens == len(PROMPT) + 1


def test_error_while_starting_one_load_leaves_the_others_waiting_their_turn() -> None:
    engine = MiniEngine()
    warm(engine)
    copier = engine.copiers[0]
    copier.jobs_max, copier.held = 1, True
    requests = [engine.add(PROMPT) for _ in range(4)]
    engine.step()
    copier.held = False
    original, errors = copier.load, [RuntimeError("bug")]

    def load(*arguments: Any) -> int:
        if errors and not copier.queued:
            raise errors.pop()
        return original(*arguments)

    copier.load = load  # type: ignore[method-assign]
    engine.step()
    engine.run()
    assert errors == []
    assert [request.hit_tokens for request in requests].count(len(PROMPT)) == 3
    assert engine.recorder.counters.pop("hook_errors") == 1
    engine.assert_nothing_held()


def test_error_while_leasing_a_later_group_gives_back_the_earlier_leases() -> None:
    engine = MiniEngine(HYBRID)
    warm(engine)
    namespaces: Any = engine.store.namespaces()

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("bug")

    namespaces[2].lease = broken
    request = engine.add(PROMPT)
    with pytest.raises(RuntimeError, match="bug"):
        engine.scheduler.match(request, 0, False)
    assert engine.pool.leased() == 0


def test_failed_load_whose_blocks_nobody_can_name_any_more_keeps_no_lease() -> None:
    engine = MiniEngine()
    warm(engine)
    copier = engine.copiers[0]
    copier.held = True
    request = engine.add(PROMPT)
    engine.step()
    assert engine.pool.leased() > 0
    engine.abort(request)
    request.block_hashes.clear()
    copier.held, copier.failing_loads = False, {3}
    engine.step()
    assert engine.recorder.counters["load_failure"] == 1
    assert engine.pool.leased() == 0


def test_shutdown_gives_back_offers_but_not_what_is_being_read() -> None:
    engine = MiniEngine()
    warm(engine)
    engine.copiers[0].held = True
    engine.add(PROMPT[:21])
    engine.step()
    offered = engine.add(PROMPT)
    assert engine.scheduler.match(offered, 0, False) == (40, True)
    assert engine.pool.leased() == 15
    engine.scheduler.shutdown()
    assert engine.pool.leased() == 5


def test_watching_loads_does_not_go_through_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MiniEngine()
    warm(engine)
    engine.copiers[0].held = True
    for _ in range(2):
        engine.add(PROMPT)
    engine.step()

    def refuse(table: RequestTable) -> Any:
        raise AssertionError("all requests were gone through")

    loads = engine.scheduler._loads
    monkeypatch.setattr(RequestTable, "__iter__", refuse)
    loads.watch()
    assert "load_overdue" not in engine.recorder.counters
    loads._overdue_seconds = -1.0
    loads.watch()
    loads.watch()
    assert engine.recorder.counters["load_overdue"] == 2


def test_nothing_is_loaded_before_a_first_pass_that_would_wipe_it() -> None:
    engine = MiniEngine(SINGLE, warmed_pool(), wiped_by_first_pass=True)
    early = [engine.add(PROMPT), engine.add(PROMPT)]
    engine.step()
    late = engine.add(PROMPT)
    engine.run()
    assert [request.hit_tokens for request in (*early, late)] == [0, 0, len(PROMPT)]
    assert [bool(plan.loads) for plan in engine.plans[:1]] == [False]
    engine.assert_nothing_held()


def test_offer_that_vllm_has_no_room_for_while_nothing_else_happens_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = MiniEngine(pool=warmed_pool())
    allocate = engine._allocate
    monkeypatch.setattr(
        engine, "_allocate", lambda request, tokens, external=0: not external and allocate(request, tokens)
    )
    request = engine.add(PROMPT)
    for _ in range(STILL_STEPS_MAX):
        engine.step()
    assert engine.pool.leased() > 0
    engine.run()
    assert (request.hit_tokens, request.num_tokens) == (0, len(PROMPT) + 1)
    engine.assert_nothing_held()


def test_offer_waits_for_as_long_as_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MiniEngine(pool=warmed_pool())
    allocate = engine._allocate
    other = engine.add(list(range(500, 510)), more=STILL_STEPS_MAX + 20)
    monkeypatch.setattr(
        engine,
        "_allocate",
        lambda request, tokens, external=0: (
            (not external or other.request_id not in engine.requests) and allocate(request, tokens, external)
        ),
    )
    request = engine.add(PROMPT)
    engine.run(2 * STILL_STEPS_MAX)
    assert request.hit_tokens == len(PROMPT)
    engine.assert_nothing_held()
