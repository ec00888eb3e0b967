"""Each prompt is counted once, each of its blocks has one fate, and counting harms nothing."""

from typing import Any

import pytest

from pegaflow.connector.attribution import REASONS, counted_groups
from pegaflow.connector.geometry import GroupKind
from pegaflow.metrics import GAUGES, WINDOW_NAMES
from pegaflow.shm import traffic
from tests.fakes import FakeNamespace, FakePool
from tests.unit.mini_engine import EVERY_KIND, SINGLE, MiniEngine

PROMPT = list(range(40))


def prompts_of(pool: FakePool) -> list[tuple[int, ...]]:
    return [prompt for space in pool._namespaces.values() for prompt in space.prompts]


def loaded(pool: FakePool) -> int:
    return sum(space.blocks_loaded for space in pool._namespaces.values())


def test_a_prompt_is_counted_once_new_first_and_found_the_second_time() -> None:
    engine = MiniEngine(SINGLE, FakePool(), blocks=400)
    first = engine.add(PROMPT)
    engine.run()
    again = engine.add(PROMPT)
    engine.run()
    [new, found] = prompts_of(engine.pool)
    blocks = again.hit_tokens // SINGLE.groups[0].block_tokens
    assert first.hit_tokens == 0
    assert new == (0, 0, 0, 0, 0, blocks)
    assert found == (0, blocks, blocks, blocks, blocks, blocks)
    assert loaded(engine.pool) == blocks
    assert engine.recorder.counters["miss_blocks_never_stored"] == blocks


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_positions_are_in_order_for_every_kind_of_model(kind: str) -> None:
    geometry = EVERY_KIND[kind]
    engine = MiniEngine(geometry, FakePool(), blocks=400)
    for _ in range(2):
        engine.add(PROMPT)
        engine.run()
    assert len(prompts_of(engine.pool)) == 2 * len(counted_groups(geometry))
    full = [group for group in geometry.groups if group.kind is GroupKind.FULL]
    assert counted_groups(geometry) == (tuple(full) or geometry.groups[:1])
    engine.assert_nothing_held()


def test_statistics_that_fail_cost_a_log_line_and_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_more: Any) -> None:
        raise OSError("no statistics")

    monkeypatch.setattr(FakeNamespace, "note_prompt", fail)
    monkeypatch.setattr(FakeNamespace, "note_loaded", fail)
    engine = MiniEngine(SINGLE, FakePool(), blocks=400)
    engine.add(PROMPT)
    engine.run()
    again = engine.add(PROMPT)
    engine.run()
    assert again.hit_tokens > 0
    assert engine.recorder.counters["hook_errors"] == 3, "two prompts and a load"
    assert engine.pool.leased() == 0


def test_prompts_that_a_turned_off_pool_is_not_asked_for_are_counted_once() -> None:
    engine = MiniEngine(SINGLE, FakePool(), blocks=400)
    engine.scheduler._store.turn_off("a test")
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == 0
    most = SINGLE.hit_tokens_max(len(PROMPT))
    assert engine.recorder.counters["off_tokens"] == most
    assert "miss_tokens" not in engine.recorder.counters


def test_windows_become_gauges_and_an_empty_one_is_no_hit() -> None:
    engine = MiniEngine(SINGLE, FakePool(), blocks=400)
    engine.add(PROMPT)
    engine.run()
    gauges = engine.recorder.gauges
    assert [gauges[f"hll_estimated_hit_rate_{name}"] for name in WINDOW_NAMES] == [0.75, 0.75, 0.0]
    assert gauges["hll_cardinality_1h"] == 100
    assert {f"hll_total_requests_{name}" for name in WINDOW_NAMES} <= set(GAUGES)


def test_both_halves_of_the_package_name_the_reasons_alike() -> None:
    assert traffic.REASONS == REASONS
