"""A short storm in every run of the tests, and that storms can be replayed and shortened."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.storm import world
from tests.storm.command import WORLD_REQUESTS, tally
from tests.storm.plan import EventPlan, draw, over_hosts
from tests.storm.shrink import shrink, signature
from tests.storm.world import StormError

SEED = 1
WORLDS = 25
HOST_WORLDS = 4
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


def test_no_storm_over_several_hosts_brings_wrong_bytes_or_leaves_anything_behind() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + HOST_WORLDS):
        counts += tally(world.run(over_hosts(draw(seed, WORLD_REQUESTS))))
    assert [what for what in ("blocks_loaded", "blocks_saved", "updated", "preempted") if not counts[what]] == []


@pytest.mark.parametrize("seed", range(3))
def test_plan_of_a_storm_follows_from_its_seed(seed: int) -> None:
    # The pool's own thread is real and decides when a pool has grown: a replay has the same plan, not always each step.
    assert draw(seed, WORLD_REQUESTS) == draw(seed, WORLD_REQUESTS) != draw(seed + 1, WORLD_REQUESTS)


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
