"""Saves: which blocks go out, in which order they are published, and what the bookkeeping costs."""

import time
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest

from pegaflow.connector.geometry import Geometry, GroupKind
from pegaflow.connector.metadata import SaveOutcome
from pegaflow.connector.saves import _Job
from tests.unit.mini_engine import EVERY_KIND, HYBRID, SINGLE, MiniEngine, MiniRequest, full_group
from tests.unit.test_connector_requests import PROMPT, saved_blocks, warm


def visible(engine: MiniEngine, request: MiniRequest) -> int:
    namespaces = engine.store.namespaces()
    assert namespaces is not None
    return sum(namespaces[0].contains(request.block_hashes))


def promised_elsewhere(engine: MiniEngine) -> MiniRequest:
    """A request whose blocks another connector has promised to load: vLLM counts them as computed at once."""
    request = engine.add(PROMPT)
    engine.scheduler.match(request, 0, False)
    engine._allocate(request, 40, 40)
    engine.scheduler.allocated(request, (), 0)
    request.state, request.num_computed_tokens = "elsewhere", 40
    engine.step()
    return request


def plan_one(engine: MiniEngine, request: MiniRequest, tokens_after: int) -> Any:
    state = engine.scheduler.table.get(request.request_id)
    assert state is not None
    return engine.scheduler.plan(lambda: [(state, lambda _: list(request.tables), tokens_after)], True)


def test_blocks_that_another_connector_has_not_filled_are_not_saved_at_an_abort() -> None:
    engine = MiniEngine()
    warm(engine, [99] * 8)
    request = promised_elsewhere(engine)
    engine.abort(request)
    engine.run()
    assert visible(engine, request) == 0
    engine.assert_nothing_held()


def test_blocks_that_another_connector_filled_are_saved_once_the_request_runs() -> None:
    engine = MiniEngine()
    warm(engine, [99] * 8)
    request = promised_elsewhere(engine)
    plan = plan_one(engine, request, 41)
    assert [len(refs) for job in plan.saves for _, refs, _ in job.blocks] == [8]  # as many as may be pinned


def test_preempted_request_forgets_how_far_it_was() -> None:
    engine = MiniEngine()
    warm(engine, [99] * 8)
    request = engine.add(PROMPT)
    engine.step()
    state = engine.scheduler.table.get(request.request_id)
    assert state is not None
    assert state.computed_seen == 12
    engine.preempt(request)
    engine.scheduler.allocated(request, (), 0)
    assert state.computed_seen == 0


@pytest.mark.parametrize(("lag", "blocks"), [(0, 10), (1, 9), (4, 9), (5, 8)])
def test_drafts_do_not_make_a_block_final_that_the_drafter_may_compute_anew(lag: int, blocks: int) -> None:
    engine = MiniEngine(Geometry((replace(full_group(), drafts=True, lag_tokens=lag),)), blocks=400)
    request = engine.add(PROMPT)
    engine._allocate(request, 40)
    plan = plan_one(engine, request, 46)
    assert [len(refs) for job in plan.saves for _, refs, _ in job.blocks] == [blocks]


def test_tokens_that_the_last_step_confirmed_are_saved_at_the_end() -> None:
    engine = MiniEngine(blocks=400)
    warm(engine, [99] * 8)
    request = engine.add(PROMPT[:39])
    engine._allocate(request, 39)
    request.tables[0].append(engine.block_pool.allocate() or 0)
    plan_one(engine, request, 40)  # the last of these tokens was only a placeholder
    request.append(7, 8)
    request.num_computed_tokens = 40
    engine.abort(request)
    assert sum(len(refs) for job in plan_late(engine) for _, refs, _ in job.blocks) == 1


def plan_late(engine: MiniEngine) -> Any:
    return engine.scheduler.plan(list, False).saves


def test_error_in_a_later_group_gives_back_what_earlier_groups_reserved() -> None:
    engine = MiniEngine(HYBRID)
    namespaces: Any = engine.store.namespaces()

    def broken(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError("bug")

    namespaces[1].reserve = broken
    request = engine.add(PROMPT)
    engine.step()
    state = engine.scheduler.table.get(request.request_id)
    assert engine.recorder.counters["hook_errors"]
    assert engine.pool.reserved() == []
    assert state is not None
    assert state.saved_blocks == {}
    assert not engine.scheduler.has_pending_saves()


class BrokenAt:
    """A function that fails at one of its calls."""

    def __init__(self, original: Any, call: int = 1) -> None:
        self.original, self.call, self.calls = original, call, 0

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        self.calls += 1
        if self.calls == self.call:
            raise RuntimeError("bug")
        return self.original(*arguments, **more)


@pytest.mark.parametrize("place", ["_events.describe", "_landing", "_pins.pin"])
def test_error_behind_a_reservation_gives_it_back_and_the_blocks_are_saved_later(place: str) -> None:
    engine = MiniEngine(blocks=400)
    owner, _, name = f"_saves.{place}".rpartition(".")
    part = attrgetter(owner)(engine.scheduler)
    broken = BrokenAt(getattr(part, name))
    setattr(part, name, broken)
    request = engine.add(PROMPT)
    engine.step()
    assert broken.calls == 1
    assert engine.recorder.counters.pop("hook_errors") == 1
    assert engine.pool.reserved() == []
    assert not engine.scheduler.has_pending_saves()
    engine.run()
    assert visible(engine, request) == 10
    engine.assert_nothing_held()


def jobs_behind_a_load(engine: MiniEngine, count: int) -> BrokenAt:
    """Jobs that have only to wait for a load, and what unpins their blocks, which fails at the first."""
    saves = engine.scheduler._saves
    saves._jobs = {n: _Job([], [], [], 0, set(), time.monotonic(), loads={"load"}) for n in range(1, count + 1)}
    broken = BrokenAt(saves._pins.unpin)
    saves._pins.unpin = broken  # type: ignore[method-assign]
    return broken


def test_error_with_one_job_behind_a_load_does_not_leave_the_others_waiting() -> None:
    engine = MiniEngine()
    broken = jobs_behind_a_load(engine, 3)
    with pytest.raises(RuntimeError, match="bug"):
        engine.scheduler._saves.load_over("load")
    assert broken.calls == 3
    assert engine.scheduler._saves.pending == 0


def test_error_with_one_job_at_the_end_does_not_keep_the_blocks_of_others() -> None:
    engine = MiniEngine()
    broken = jobs_behind_a_load(engine, 3)
    engine.scheduler.shutdown()
    assert broken.calls == 3


class Watched(dict[int, _Job]):
    """Jobs that count how often somebody goes through all of them."""

    walks = 0

    def __iter__(self) -> Any:
        self.walks += 1
        return super().__iter__()

    def items(self) -> Any:
        self.walks += 1
        return super().items()


def test_report_touches_no_job_but_its_own_and_those_that_waited() -> None:
    engine = MiniEngine()
    saves = engine.scheduler._saves
    count = 3_000
    now = time.monotonic()
    jobs = Watched(
        {index: _Job([], [], [], 1, {index - 1} - {0}, now, followers=[index + 1]) for index in range(1, count + 1)}
    )
    saves._jobs = jobs
    for index in range(count, 1, -1):
        saves.reported(index, SaveOutcome(1, frozenset(), 0.0))
    assert saves.pending == count
    saves.reported(1, SaveOutcome(1, frozenset(), 0.0))
    assert saves.pending == 0
    assert jobs.walks == 0


def test_error_while_publishing_does_not_leave_the_jobs_behind_waiting() -> None:
    engine = MiniEngine(blocks=400)
    warm(engine, [99] * 8)
    engine.copiers[0].held = True
    engine.add(PROMPT)
    for _ in range(4):
        engine.step()
    assert engine.scheduler._saves.pending > 1
    engine.copiers[0].held = False
    engine.pool.fail_publish = RuntimeError("bug")
    engine.run()
    assert not engine.scheduler.has_pending_saves()
    assert engine.block_pool.used() == 0


def test_chain_whose_beginning_is_gone_is_not_copied() -> None:
    engine = MiniEngine()
    warm(engine, [99] * 8)
    request = engine.add(PROMPT)
    engine.step()
    assert visible(engine, request) == 3
    engine.pool.slots.clear()
    before = saved_blocks(engine)
    engine.run()
    assert saved_blocks(engine) == before
    engine.assert_nothing_held()


def test_nobody_waits_for_pinned_blocks_that_a_running_request_uses_too() -> None:
    engine = MiniEngine()
    warm(engine, [99] * 8)
    engine.copiers[0].held = True
    request = engine.add(PROMPT)
    engine.step()
    assert engine.scheduler.has_pending_saves()
    assert not engine.scheduler.frees_soon()
    engine.abort(request)
    assert engine.scheduler.frees_soon()
    engine.copiers[0].held = False
    engine.run()
    assert not engine.scheduler.frees_soon()


def test_index_is_not_asked_while_nothing_may_be_pinned() -> None:
    engine = MiniEngine()
    namespaces: Any = engine.store.namespaces()
    request = engine.add(PROMPT)
    engine._allocate(request, 40)
    asked: list[int] = []
    original = namespaces[0].contains
    namespaces[0].contains = lambda keys: asked.append(len(keys)) or original(keys)
    pins = engine.scheduler._pins
    pins.count = pins.count_max
    assert not plan_one(engine, request, 40).saves
    state = engine.scheduler.table.get(request.request_id)
    assert state is not None
    assert engine.scheduler._saves.plan(state, request.tables, 40) is None
    assert asked == []
    pins.count = 0
    assert plan_one(engine, request, 40).saves
    assert asked


def test_save_that_another_process_was_faster_with_is_a_success_of_no_blocks() -> None:
    slow = MiniEngine()
    warm(slow, [99] * 8)
    slow.recorder.take()
    slow.copiers[0].held = True
    slow.add(PROMPT[:12])
    slow.step()
    fast = MiniEngine(SINGLE, slow.pool)
    fast.add(PROMPT[:12])
    fast.run()
    slow.copiers[0].held = False
    slow.run()
    assert slow.recorder.counters["save_success"] == 1
    assert slow.recorder.samples["save_blocks"] == [0]
    assert fast.recorder.samples["save_blocks"] == [3]


def test_save_of_which_nothing_became_visible_is_a_failure() -> None:
    engine = MiniEngine()
    warm(engine, [99] * 8)
    engine.recorder.take()
    engine.copiers[0].held = True
    engine.add(PROMPT[:12])
    engine.step()
    for slot in engine.pool.slots.values():
        slot.epoch -= 1  # as if another process had reset the cache
    engine.copiers[0].held = False
    engine.run()
    assert engine.recorder.counters["save_failure"] == 1
    assert "save_success" not in engine.recorder.counters


def test_save_that_ended_while_nobody_stepped_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegaflow.connector.worker.SETTLE_SECONDS_MAX", 0.0)
    engine = MiniEngine()
    warm(engine, [99] * 8)
    engine.scheduler._settle = True
    engine.copiers[0].held = True
    request = engine.add(PROMPT)
    engine.step()
    engine.copiers[0].held = False
    engine.scheduler._saves._overdue_seconds = 0.0
    engine.scheduler._last_plan -= 10_000.0
    engine.abort(request)
    engine.step()
    assert engine.pool.quarantined == []
    assert visible(engine, request) == 3
    engine.assert_nothing_held()


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("tails", [False, True])
def test_a_request_is_looked_at_in_each_step_in_which_a_block_may_be_full_and_in_no_other(
    kind: str, tails: bool
) -> None:
    engine = MiniEngine(EVERY_KIND[kind], blocks=256, pd_tail_save=tails)
    saves, request = engine.scheduler._saves, engine.add(list(range(30)))
    state = engine.scheduler.table.get(request.request_id)
    assert state is not None
    groups = [group for group in engine.geometry.groups if group.kind is not GroupKind.STATE]
    looked_at = []
    for computed in [*range(1, 45), *range(20, 60), *range(30), 59]:
        if computed == 59:
            state.look_again()
        full = {group.index: (computed - group.lag_tokens) // group.block_tokens for group in groups}
        tail = tails and saves._tails.to_save(state, computed) is not None
        due = tail or any(count > state.saved_blocks.get(index, 0) for index, count in full.items())
        found = computed >= state.nothing_before and saves.has_more(state, computed)
        assert found == due, computed
        if due:
            looked_at.append(computed)
            state.saved_blocks.update(full)
            state.tail_looked_at = state.tail_looked_at or tail
    assert len(looked_at) > 5
    assert looked_at[-1] == 59
