"""Tails: prompts that end inside a block are saved and loaded to their last token."""

from typing import Any

import pytest

from pegaflow.connector.geometry import Geometry
from tests.fakes import FakePool
from tests.unit.mini_engine import DRAFTED, HYBRID, RECURRENT, SINGLE, MiniEngine, MiniRequest, full_group

PROMPT = list(range(100, 142))
"""Ten blocks of four tokens, and two tokens."""


def prefill(pool: FakePool, **options: Any) -> MiniEngine:
    """An engine that saves tails."""
    return MiniEngine(options.pop("geometry", SINGLE), pool, pd_tail_save=True, **options)


def decode(pool: FakePool, **options: Any) -> MiniEngine:
    """An engine that loads tails."""
    return MiniEngine(options.pop("geometry", SINGLE), pool, pd_tail_load=True, **options)


def run(engine: MiniEngine, prompt: list[int] = PROMPT, more: int = 1) -> MiniRequest:
    """One request from beginning to end; what it loads is compared to the byte."""
    request = engine.add(prompt, more=more)
    engine.run()
    engine.assert_nothing_held()
    return request


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("tokens", "hit"),
    [
        (1, 0),  # vLLM computes the last token in any case
        (2, 2),
        (3, 3),
        (4, 4),
        (5, 4),
        (6, 6),
        (40, 40),
        (41, 40),
        (42, 42),
        (43, 43),
    ],
)
def test_prompt_of_any_length_comes_back_but_for_what_is_computed_anyway(tokens: int, hit: int, ranks: int) -> None:
    pool = FakePool()
    run(prefill(pool, ranks=ranks), PROMPT[:tokens] + [7] * (tokens - len(PROMPT)))
    request = run(decode(pool, ranks=ranks), PROMPT[:tokens] + [7] * (tokens - len(PROMPT)))
    assert request.hit_tokens == hit
    assert request.num_tokens == tokens + 1


@pytest.mark.parametrize(("saves", "loads"), [(False, True), (True, False)])
def test_tail_needs_one_side_that_saves_and_one_that_loads(saves: bool, loads: bool) -> None:
    pool = FakePool()
    run(MiniEngine(SINGLE, pool, pd_tail_save=saves))
    assert run(MiniEngine(SINGLE, pool, pd_tail_load=loads)).hit_tokens == 40


def test_other_tail_of_the_same_prefix_is_no_hit() -> None:
    pool = FakePool()
    run(prefill(pool))
    for other in ([*PROMPT[:-1], 7], [*PROMPT, 7], [*PROMPT[:40], 7, *PROMPT[41:]]):
        assert run(decode(pool), other).hit_tokens == 40
    assert run(decode(pool), [7, *PROMPT[1:]]).hit_tokens == 0


def test_tail_is_saved_once_and_found_by_whoever_comes_next() -> None:
    pool = FakePool()
    for _ in range(2):
        run(prefill(pool))
    tails = [slot for slot in pool.slots.values() if slot.parent is not None]
    assert len(pool.slots) == 11
    assert len(tails) == 10


@pytest.mark.parametrize("more", [2, 3, 9])
def test_rows_behind_a_tail_may_change_while_it_is_saved(more: int) -> None:
    pool = FakePool()
    engine = prefill(pool, blocks=400)
    request = engine.add(PROMPT, more=more)
    while not engine.copiers:
        engine.step()
    engine.copiers[0].held = True
    for _ in range(more + 3):
        engine.step()
    engine.copiers[0].held = False
    engine.run()
    engine.assert_nothing_held()
    assert run(decode(pool)).hit_tokens == 42
    # The same block was saved once more under its own key if it was filled.
    full = [*request.tokens, 7]
    assert run(decode(pool), full).hit_tokens == (len(PROMPT) + more - 1) // 4 * 4


def test_decoding_goes_on_in_a_block_that_began_as_a_tail() -> None:
    pool = FakePool()
    run(prefill(pool))
    answer = run(decode(pool), more=12)
    assert answer.hit_tokens == 42
    assert run(decode(pool), [*answer.tokens, 7]).hit_tokens == 52


def test_tail_that_found_no_room_at_first_goes_out_at_the_end_of_its_request() -> None:
    pool = FakePool()
    engine = prefill(pool, blocks=100)  # ten blocks may be pinned: the tail is the eleventh
    engine.chunk_tokens = len(PROMPT)
    run(engine)
    assert run(decode(pool)).hit_tokens == 42


def test_tail_is_tried_again_while_the_pool_has_no_slot_for_it() -> None:
    pool = FakePool(slots_max=10)
    engine = prefill(pool, blocks=400)
    engine.chunk_tokens = 40
    engine.add(PROMPT, more=20)
    while not any(slot.state == "sealed" for slot in pool.slots.values()):
        engine.step()
    held = engine.store.namespaces()[0].lease(engine.requests["request-0"].block_hashes)  # type: ignore[index]
    for _ in range(8):
        engine.step()
    assert engine.recorder.counters["save_blocks_deferred"] > 0
    pool.slots_max = 100
    engine.run()
    pool.release(held)
    engine.assert_nothing_held()
    assert run(decode(pool)).hit_tokens == 42


def test_tail_without_the_block_before_it_is_not_saved() -> None:
    pool = FakePool()
    engine = prefill(pool)
    engine.chunk_tokens = 4
    request = engine.add(PROMPT)
    while not any(slot.state == "sealed" for slot in pool.slots.values()):
        engine.step()
    for ref in [ref for ref, slot in pool.slots.items() if slot.state == "sealed"]:
        del pool.slots[ref]  # evicted
    engine.run()
    engine.assert_nothing_held()
    assert request.num_tokens == 43
    assert run(decode(pool)).hit_tokens == 0


@pytest.mark.parametrize("promised", [42, 41, 40, 36])
def test_vllm_may_take_less_of_a_tail_than_was_offered(promised: int) -> None:
    pool = FakePool()
    run(prefill(pool))
    engine = decode(pool)
    request = engine.add(PROMPT)
    assert engine.scheduler.match(request, 0, False) == (42, True)
    engine._allocate(request, promised, promised)
    engine.scheduler.allocated(request, request.tables, promised)
    request.state, request.num_computed_tokens, request.hit_tokens = "loading", promised, promised
    engine.run()
    engine.assert_nothing_held()


def test_tail_behind_blocks_that_vllm_still_has_is_offered_alone() -> None:
    pool = FakePool()
    run(prefill(pool))
    engine = decode(pool)
    request = engine.add(PROMPT)
    assert engine.scheduler.match(request, 40, False) == (2, True)
    assert engine.scheduler.match(request, 36, False) == (6, True)
    engine.abort(request)
    engine.assert_nothing_held()


def test_tail_that_cannot_be_loaded_is_recomputed_and_never_offered_again() -> None:
    pool = FakePool()
    run(prefill(pool))
    engine = decode(pool)
    run(engine, [1, 2, 3])  # so that there is a copier
    engine.copiers[0].failing_loads = {10}
    request = run(engine)
    assert request.hit_tokens == 40
    assert request.num_tokens == 43
    assert engine.recorder.counters["load_failure"] == 1
    assert run(engine).hit_tokens == 40
    assert engine.recorder.counters["load_failure"] == 1


@pytest.mark.parametrize(("answered", "hit"), [(1, 42), (2, 40), (3, 44)])
def test_resumed_request_uses_the_tail_until_its_block_is_full(answered: int, hit: int) -> None:
    pool = FakePool()
    run(prefill(pool))
    engine = decode(pool)
    request = engine.add(PROMPT, more=8)
    while request.num_tokens < len(PROMPT) + answered:
        engine.step()
    while engine.scheduler.has_pending_saves():
        engine.step()
    assert request.num_tokens == len(PROMPT) + answered
    engine.preempt(request)
    engine.step()
    assert request.hit_tokens == hit
    engine.run()
    engine.assert_nothing_held()


def test_tail_takes_the_hashes_that_vllm_has_of_pieces_of_a_block() -> None:
    geometry = Geometry((full_group(0, 8),), whole_prompt=True)
    for tokens in (9, 10, 12, 13, 15, 16):
        pool = FakePool()
        run(prefill(pool, geometry=geometry), PROMPT[:tokens])
        request = run(decode(pool, geometry=geometry), PROMPT[:tokens])
        assert request.hit_tokens == (8 if tokens == 9 else tokens)
        if tokens == 12:
            assert request.block_hashes[2] in [slot.key for slot in pool.slots.values()]


@pytest.mark.parametrize("geometry", [HYBRID, DRAFTED, RECURRENT], ids=["window", "drafter", "recurrent"])
def test_model_that_cannot_go_on_inside_a_block_has_no_tails_and_says_so(
    geometry: Geometry, caplog: pytest.LogCaptureFixture
) -> None:
    pool = FakePool()
    with caplog.at_level("WARNING", "vllm.pegaflow"):
        engine = prefill(pool, geometry=geometry)
    assert ["pd_tail_save" in record.getMessage() for record in caplog.records] == [True]
    run(engine)
    assert run(decode(pool, geometry=geometry)).hit_tokens < len(PROMPT) - 1


def test_reset_leaves_no_tail_of_a_running_request() -> None:
    pool = FakePool()
    engine = prefill(pool)
    request = engine.add(PROMPT, more=4)
    while request.num_tokens == len(PROMPT):
        engine.step()
    engine.scheduler.reset()
    engine.run()
    engine.assert_nothing_held()
    assert run(decode(pool)).hit_tokens == 0


def test_requests_that_bypass_the_cache_have_no_tails() -> None:
    pool = FakePool()
    engine = prefill(pool)
    engine.add(PROMPT, resumable=True)
    engine.run()
    assert pool.slots == {}
    run(engine)
    engine = decode(pool)
    request = engine.add(PROMPT, resumable=True)
    assert engine.scheduler.match(request, 0, False) == (0, False)
