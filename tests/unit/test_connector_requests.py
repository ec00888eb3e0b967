"""The connector's two halves together: what happens to a request, and what it must not leave behind."""

import random

import pytest

from pegaflow.connector.geometry import Geometry
from pegaflow.connector.metadata import LoadOutcome, RankReport, SaveOutcome
from tests.unit.mini_engine import (
    EVERY_KIND,
    HASH_TOKENS,
    HYBRID,
    SINGLE,
    MiniEngine,
    MiniRequest,
    full_group,
    window_group,
)

PROMPT = list(range(40))
GEOMETRIES = {
    **EVERY_KIND,
    "window only": Geometry((window_group(0, 3),)),
    "larger blocks": Geometry((full_group(0, 8),), whole_prompt=True),
}


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=GEOMETRIES, ids=str)
def geometry(request: pytest.FixtureRequest) -> Geometry:
    return GEOMETRIES[request.param]


def warm(engine: MiniEngine, tokens: list[int] = PROMPT) -> None:
    engine.add(tokens)
    engine.run()
    engine.assert_nothing_held()


def loads(engine: MiniEngine) -> int:
    return sum(len(plan.loads) for plan in engine.plans)


def saved_blocks(engine: MiniEngine) -> int:
    return sum(len(refs) for plan in engine.plans for job in plan.saves for _, refs, _ in job.blocks)


def test_second_request_loads_what_the_first_saved(geometry: Geometry, ranks: int) -> None:
    engine = MiniEngine(geometry, ranks=ranks)
    warm(engine)
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens >= len(PROMPT) - 2 * geometry.align_tokens
    assert loads(engine) == 1
    engine.assert_nothing_held()


def test_another_engine_on_the_same_pool_loads(geometry: Geometry) -> None:
    first = MiniEngine(geometry)
    warm(first)
    second = MiniEngine(geometry, first.pool)
    request = second.add(PROMPT)
    second.run()
    assert request.hit_tokens
    second.assert_nothing_held()


def test_whole_prompt_hit_of_full_attention() -> None:
    engine = MiniEngine()
    warm(engine, [*PROMPT, 7, 8, 9])
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == len(PROMPT)


def test_window_groups_leave_the_last_token_to_vllm() -> None:
    engine = MiniEngine(HYBRID)
    warm(engine, [*PROMPT, 7, 8, 9])
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == len(PROMPT) - HYBRID.align_tokens


def test_blocks_filled_by_decoding_are_saved() -> None:
    engine = MiniEngine()
    request = engine.add(PROMPT, more=21)
    engine.run()
    again = engine.add(request.tokens[:-1])
    engine.run()
    assert again.hit_tokens == len(PROMPT) + 20


def test_block_is_saved_once() -> None:
    engine = MiniEngine()
    for _ in range(3):
        warm(engine)
    assert saved_blocks(engine) == len(PROMPT) // HASH_TOKENS


def test_same_prompt_twice_at_once_is_saved_once() -> None:
    engine = MiniEngine()
    engine.add(PROMPT)
    engine.add(PROMPT)
    engine.run()
    assert saved_blocks(engine) == len(PROMPT) // HASH_TOKENS
    engine.assert_nothing_held()


def test_repeated_question_gets_the_same_answer_and_one_lease() -> None:
    engine = MiniEngine()
    warm(engine)
    request = engine.add(PROMPT)
    answers = {engine.scheduler.match(request, 0, False) for _ in range(30)}
    assert answers == {(len(PROMPT), True)}
    assert engine.pool.leased() == len(PROMPT) // HASH_TOKENS
    engine.abort(request)
    engine.assert_nothing_held()


def test_question_with_more_computed_tokens_leases_anew() -> None:
    engine = MiniEngine()
    warm(engine)
    request = engine.add(PROMPT)
    assert engine.scheduler.match(request, 0, False) == (40, True)
    assert engine.scheduler.match(request, 16, False) == (24, True)
    assert engine.pool.leased() == 6


def test_refused_allocation_releases_the_leases() -> None:
    engine = MiniEngine()
    warm(engine)
    request = engine.add(PROMPT)
    engine.scheduler.match(request, 0, False)
    engine.scheduler.allocated(request, [[]], 0)
    assert engine.pool.leased() == 0


def test_fewer_tokens_than_offered_are_loaded_and_all_leases_released() -> None:
    engine = MiniEngine()
    warm(engine)
    request = engine.add(PROMPT)
    engine.scheduler.match(request, 0, False)
    engine._allocate(request, 16, 16)
    engine.scheduler.allocated(request, request.tables, 16)
    request.state, request.num_computed_tokens, request.hit_tokens = "loading", 16, 16
    plan = engine.step()
    assert [len(refs) for _, refs, _ in plan.loads[0].blocks] == [4]
    engine.run()
    engine.assert_nothing_held()


def test_window_that_was_not_leased_makes_the_load_fail() -> None:
    geometry = Geometry((full_group(0), window_group(1, 1)))
    engine = MiniEngine(geometry)
    warm(engine)
    request = engine.add(PROMPT)
    engine.scheduler.match(request, 0, False)
    engine._allocate(request, 16, 16)
    engine.scheduler.allocated(request, request.tables, 16)
    request.state, request.num_computed_tokens, request.hit_tokens = "loading", 16, 16
    assert engine.step().loads[0].doomed
    engine.run()
    assert loads(engine) == 1  # nobody knows what was wrong, so this request does not ask again
    engine.assert_nothing_held()


def test_failed_load_is_recomputed_and_not_tried_again(geometry: Geometry, ranks: int) -> None:
    engine = MiniEngine(geometry, ranks=ranks)
    warm(engine)
    for copier in engine.copiers:
        copier.failing_loads = {1} if len(geometry.groups[0:]) == 1 else {0}
    request = engine.add(PROMPT)
    engine.run()
    assert loads(engine) == 1
    assert request.num_tokens == len(PROMPT) + 1
    assert engine.recorder.counters["load_failure"] == 1
    engine.assert_nothing_held()


def test_block_that_failed_is_not_offered_to_others() -> None:
    engine = MiniEngine()
    warm(engine)
    engine.copiers[0].failing_loads = {5}
    engine.add(PROMPT)
    engine.run()
    engine.copiers[0].failing_loads = set()
    later = engine.add(PROMPT)
    engine.run()
    assert later.hit_tokens == 5 * HASH_TOKENS


@pytest.mark.parametrize("when", ["queued", "offered", "loading", "running"])
def test_abort_leaves_nothing_behind(when: str, geometry: Geometry, ranks: int) -> None:
    engine = MiniEngine(geometry, ranks=ranks)
    warm(engine)
    request = engine.add(PROMPT, more=8)
    if when == "offered":
        engine.scheduler.match(request, 0, False)
    elif when != "queued":
        for copier in engine.copiers:
            copier.held = when == "loading"
        engine.step()
        engine.step()
    engine.abort(request)
    for copier in engine.copiers:
        copier.held = False
    engine.run()
    engine.assert_nothing_held()


def test_abort_while_saving_keeps_the_blocks_until_they_are_copied(ranks: int) -> None:
    engine = MiniEngine(ranks=ranks)
    warm(engine, [99] * 8)
    for copier in engine.copiers:
        copier.held = True
    request = engine.add(PROMPT)
    engine.step()
    engine.abort(request)
    assert engine.block_pool.used() == 3
    assert engine.scheduler.has_pending_saves()
    for copier in engine.copiers:
        copier.held = False
    engine.run()
    engine.assert_nothing_held()
    later = MiniEngine(SINGLE, engine.pool, ranks=ranks).add(PROMPT)
    assert later.block_hashes[0] in {slot.key for slot in engine.pool.slots.values()}


def test_preempted_request_loads_its_own_blocks(geometry: Geometry) -> None:
    engine = MiniEngine(geometry)
    request = engine.add(PROMPT, more=6)
    for _ in range(5):
        engine.step()
    engine.preempt(request)
    engine.run()
    assert request.hit_tokens
    engine.assert_nothing_held()


def test_slow_rank_holds_back_publishing() -> None:
    engine = MiniEngine(ranks=2)
    warm(engine, [99] * 8)
    engine.copiers[1].held = True
    engine.add(PROMPT[:4])
    engine.step()
    assert engine.store.namespaces()[0].contains(engine.add(PROMPT[:4]).block_hashes) == b"\0"  # type: ignore[index]
    engine.copiers[1].held = False
    engine.run()
    engine.assert_nothing_held()


def test_jobs_that_end_out_of_order_are_published_in_order() -> None:
    engine = MiniEngine(blocks=400, ranks=2)
    warm(engine, [99] * 8)
    for copier in engine.copiers:
        copier.held = copier.newest_first = True
    engine.add(PROMPT, more=3)
    engine.add([*PROMPT[:20], *range(100, 130)], more=3)
    for _ in range(3):
        engine.step()
    for copier in engine.copiers:
        copier.held = False
    engine.run()
    engine.assert_nothing_held()
    for copier in engine.copiers:
        copier.newest_first = False
    again = [engine.add(PROMPT), engine.add([*PROMPT[:20], *range(100, 130)])]
    engine.run()
    assert [request.hit_tokens for request in again] == [40, 48]


def test_window_blocks_are_saved_without_those_that_left_the_window() -> None:
    engine = MiniEngine(Geometry((window_group(0, 2),)))
    warm(engine)
    longer = MiniRequest("keys", [*PROMPT, *range(200, 220), 1], 0)
    for ref, slot in list(engine.pool.slots.items()):
        if slot.key in longer.block_hashes[:8]:
            del engine.pool.slots[ref]  # only the last two blocks of the first prompt are left
    request = engine.add(longer.tokens)
    engine.run()
    assert request.hit_tokens == 40
    again = engine.add(longer.tokens)
    engine.run()
    assert again.hit_tokens == 60
    engine.assert_nothing_held()


def test_reset_makes_everything_miss() -> None:
    engine = MiniEngine()
    warm(engine)
    assert engine.scheduler.reset()
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == 0


def test_saves_in_flight_at_a_reset_never_become_visible() -> None:
    engine = MiniEngine()
    warm(engine, [99] * 8)
    engine.copiers[0].held = True
    request = engine.add(PROMPT)
    engine.step()
    assert engine.scheduler.reset()
    engine.copiers[0].held = False
    engine.run()
    namespaces = engine.store.namespaces()
    assert namespaces is not None
    assert not any(namespaces[0].contains(request.block_hashes))
    engine.assert_nothing_held()


def test_reset_with_a_load_in_flight_says_so() -> None:
    engine = MiniEngine()
    warm(engine)
    engine.copiers[0].held = True
    engine.add(PROMPT)
    engine.step()
    assert not engine.scheduler.reset()
    engine.copiers[0].held = False
    engine.run()
    assert engine.scheduler.reset()


def test_offer_of_before_a_reset_is_not_loaded() -> None:
    engine = MiniEngine()
    warm(engine)
    request = engine.add(PROMPT)
    external, _ = engine.scheduler.match(request, 0, False)
    engine.scheduler.reset()
    # A newer vLLM may allocate steps after it asked; it then waits for the load, so one has to fail.
    engine._allocate(request, external or 0, external or 0)
    engine.scheduler.allocated(request, request.tables, external or 0)
    request.state, request.num_computed_tokens, request.hit_tokens = "loading", 40, 40
    assert engine.step().loads[0].doomed
    engine.run()
    engine.assert_nothing_held()


def test_save_only_saves_and_never_loads() -> None:
    engine = MiniEngine(mode="save_only")
    warm(engine)
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == 0
    assert saved_blocks(engine) == 10
    reader = MiniEngine(SINGLE, engine.pool)
    assert reader.scheduler.match(reader.add(PROMPT), 0, False) == (40, True)


def test_streaming_session_is_left_alone() -> None:
    engine = MiniEngine()
    warm(engine)
    request = engine.add(PROMPT, resumable=True)
    engine.run()
    assert request.hit_tokens == 0
    engine.add([5] * 20, resumable=True)
    engine.run()
    assert saved_blocks(engine) == 10


def test_prompt_logprobs_need_every_token() -> None:
    engine = MiniEngine()
    warm(engine)
    assert engine.scheduler.match(engine.add(PROMPT), 0, True) == (0, False)


def test_requests_of_other_connectors_are_ignored() -> None:
    engine = MiniEngine()
    report = RankReport({77: SaveOutcome(1, frozenset(), 0.1)}, {"other": LoadOutcome(False, frozenset({3}), 0.1)})
    engine.scheduler.update(report, {"other"})
    engine.scheduler.update(None, {"another"})
    engine.assert_nothing_held()


def test_requests_wait_a_bounded_time_for_the_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MiniEngine()
    engine.identity.ready = False
    request = engine.add(PROMPT)
    assert engine.scheduler.match(request, 0, False) == (None, False)
    monkeypatch.setattr("pegaflow.connector.namespaces.READY_WAIT_SECONDS_MAX", 0.0)
    assert engine.scheduler.match(request, 0, False) == (0, False)
    engine.run()
    engine.identity.ready = True
    warm(engine)
    assert saved_blocks(engine) == 10


def test_without_layouts_nothing_hits_and_nothing_waits() -> None:
    engine = MiniEngine()
    engine.store.set_shapes({})
    assert engine.store.off
    engine.add(PROMPT)
    engine.run()
    engine.assert_nothing_held()


def test_end_of_a_request_is_saved_with_the_next_step() -> None:
    engine = MiniEngine()
    engine.identity.ready = False
    request = engine.add(PROMPT, more=3)
    engine.scheduler.match = lambda *args: (0, False)  # type: ignore[method-assign]
    while request.num_tokens < request.target_tokens - 1:
        engine.step()
    engine.identity.ready = True
    engine.step()
    assert not engine.requests
    engine.run()
    assert saved_blocks(engine) == 10
    engine.assert_nothing_held()


@pytest.mark.parametrize("seed", range(60))
def test_any_sequence_of_events_leaves_nothing_behind(seed: int) -> None:
    """Random requests, aborts, preemptions, resets, stalls and failures; every load is compared to the byte."""
    rng = random.Random(seed)
    geometry = rng.choice(list(GEOMETRIES.values()))
    engine = MiniEngine(geometry, ranks=rng.choice([1, 2]), blocks=rng.choice([64, 160]))
    engine.pool.slots_max = rng.choice([8, 40, 1000])
    prompts = [[family] * rng.randrange(1, 30) + list(range(rng.randrange(1, 40))) for family in range(3)]
    for _ in range(150):
        event = rng.random()
        running = [request for request in engine.requests.values() if request.state == "running"]
        if event < 0.25 and len(engine.requests) < 4:
            prompt = rng.choice(prompts)
            engine.add(prompt[: rng.randrange(1, len(prompt) + 1)], more=rng.randrange(1, 12))
        elif event < 0.32 and engine.requests:
            victim = rng.choice(list(engine.requests.values()))
            if victim.state != "aborted":
                engine.abort(victim)
        elif event < 0.40 and running:
            engine.preempt(rng.choice(running))
        elif event < 0.42:
            engine.scheduler.reset()
        elif event < 0.55:
            for copier in engine.copiers:
                copier.held = rng.random() < 0.4
                copier.failing_loads = {rng.randrange(4)} if rng.random() < 0.1 else set()
        engine.step()
    for copier in engine.copiers:
        copier.held, copier.failing_loads = False, set()
    engine.run()
    engine.assert_nothing_held()
