"""A short storm in every run of the tests, and that storms can be replayed and shortened."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.storm import world
from tests.storm.command import WORLD_REQUESTS, tally
from tests.storm.plan import EventPlan, Plan, draw
from tests.storm.shrink import shrink, signature
from tests.storm.world import StormError

SEED = 1
WORLDS = 25
HAPPENS = (
    "blocks_loaded",
    "blocks_saved",
    "damaged",
    "ended: aborted by its client",
    "ended: length",
    "ended: stop",
    "followed",
    "loads_failed",
    "preempted",
    "refused",
    "reset",
    "saves_failed",
    "sleep",
    "stop",
    "updated",
)


def test_no_storm_brings_wrong_bytes_or_leaves_anything_behind() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + WORLDS):
        counts += tally(world.run(draw(seed, WORLD_REQUESTS)))
    assert counts["requests"] == WORLDS * WORLD_REQUESTS
    # A storm in which this never happens shows nothing.
    assert [what for what in HAPPENS if not counts[what]] == []


def history(plan: Plan) -> list[list[str]]:
    return [list(engine.history) for engine in world.run(plan).engines]


def steps(lines: list[list[str]]) -> list[list[str]]:
    """What was computed, without what was saved of it."""
    return [[line.split(", save")[0] for line in one if not line.split(": ")[1].startswith("save")] for one in lines]


@pytest.mark.parametrize("seed", range(3))
def test_storm_can_be_replayed(seed: int) -> None:
    plan = draw(seed, WORLD_REQUESTS)
    assert plan == draw(seed, WORLD_REQUESTS)
    # The pool's own thread is real: it decides when a pool has grown. Nothing else depends on time.
    alone = [replace(engine, options=(("mode", "save_only"),)) for engine in plan.engines[:1]]
    plan = replace(
        plan, engines=tuple(alone), requests=tuple(replace(one, engine=0) for one in plan.requests), events=()
    )
    assert steps(history(plan)) == steps(history(plan))


def test_history_of_a_failure_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    live = world.World._live

    def stumble(self: world.World) -> None:
        live(self)
        names = {one.name for one in self.plan.requests}
        if {"r7", "r31"} <= names and self.plan.events:
            raise StormError("tick 9: stumbled")

    monkeypatch.setattr(world.World, "_live", stumble)
    plan = replace(draw(SEED, WORLD_REQUESTS), events=(EventPlan(3, 0, "reset"), EventPlan(4, 0, "sleep")))
    with pytest.raises(StormError) as failed:
        world.run(plan)
    shortest, error = shrink(plan, failed.value)
    assert [one.name for one in shortest.requests] == ["r7", "r31"]
    assert len(shortest.events) == 1
    assert signature(error) == signature(StormError("tick 123: stumbled"))
