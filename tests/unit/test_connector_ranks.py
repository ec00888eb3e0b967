"""Several ranks: who saves what, and that a hit is what all of them have."""

import pytest

from pegaflow.connector.geometry import Geometry
from tests.fakes import FakePool
from tests.unit.mini_engine import EVERY_KIND, HYBRID, RECURRENT, SINGLE, MiniEngine

PROMPT = list(range(40))


def warm(engine: MiniEngine, tokens: list[int] = PROMPT) -> None:
    engine.add(tokens)
    engine.run()


def hit(engine: MiniEngine) -> int:
    request = engine.add(PROMPT)
    engine.run()
    engine.assert_nothing_held()
    return request.hit_tokens


@pytest.mark.parametrize("geometry", EVERY_KIND.values(), ids=EVERY_KIND)
def test_replicas_store_one_copy_and_load_it_all(geometry: Geometry) -> None:
    engine = MiniEngine(geometry, ranks=4, replicas=2)
    warm(engine)
    assert {len(slot.parts) for slot in engine.pool.slots.values()} == {2}
    assert hit(MiniEngine(geometry, engine.pool, ranks=4, replicas=2)) == geometry.hit_tokens_max(len(PROMPT))


@pytest.mark.parametrize("geometry", [HYBRID, RECURRENT, SINGLE], ids=["hybrid", "recurrent", "single"])
def test_stages_of_a_pipeline_hold_what_their_layers_need(geometry: Geometry) -> None:
    engine = MiniEngine(geometry, ranks=4, stages=2)
    warm(engine)
    # With several groups each belongs to the two ranks of one stage.
    parts = {4} if geometry is SINGLE else {2}
    assert {len(slot.parts) for slot in engine.pool.slots.values()} == parts
    assert hit(MiniEngine(geometry, engine.pool, ranks=4, stages=2)) == geometry.hit_tokens_max(len(PROMPT))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_block_that_one_rank_did_not_save_is_nobodys(rank: int, replicas: int) -> None:
    engine = MiniEngine(ranks=2, replicas=replicas, blocks=400)
    warm(engine, [99] * 8)  # copiers are made with the first job
    engine.add(PROMPT)
    engine.chunk_tokens = len(PROMPT)
    for copier in engine.copiers:
        copier.held = True
    engine.step()
    saving = engine.copiers[rank]
    for kind, _, _, refs, _ in saving.queued.values():
        assert kind == "save"
        refs[4] = 0  # the fifth block's copy goes nowhere
    for copier in engine.copiers:
        copier.held = False
    engine.run()
    # The rank that keeps a second copy of the same bytes saves nothing, so nothing of it can be missing.
    expected = len(PROMPT) if replicas == 2 and rank == 1 else 16
    assert hit(MiniEngine(SINGLE, engine.pool, ranks=2, replicas=replicas)) == expected


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("geometry", "left"), [(SINGLE, 12), (HYBRID, 0), (RECURRENT, 0)])
def test_rank_that_loads_least_decides_what_is_taken(geometry: Geometry, left: int, rank: int) -> None:
    engine = MiniEngine(geometry, ranks=2)
    warm(engine)
    engine.copiers[rank].failing_loads = {3}
    if geometry is RECURRENT:
        engine.copiers[rank].failing_loads = {0}
    assert hit(engine) == left
    assert engine.recorder.counters["load_failure"] == 1


def test_engines_of_one_model_share_blocks_whatever_else_runs_beside_them() -> None:
    pool = FakePool()
    engines = [MiniEngine(RECURRENT, pool, ranks=2) for _ in range(3)]
    warm(engines[0])
    assert [hit(engine) for engine in engines[1:]] == [32, 32]
    engines[0].scheduler.shutdown()
    assert hit(engines[2]) == 32
