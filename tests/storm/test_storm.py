"""A short storm in every run of the tests, and that storms can be replayed and shortened."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.storm import world
from tests.storm.command import WORLD_REQUESTS, tally
from tests.storm.plan import EventPlan, Plan, draw, over_hosts
from tests.storm.shrink import shrink, signature
from tests.storm.world import StormError

SEED = 1
WORLDS = 25
HOST_WORLDS = 4
WORLDS_MAX = 200
"""Until everything has happened at least once: what does depends on how fast the pool grows."""
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


def storm(worlds: int, happens: Sequence[str], plan: Callable[[int], Plan]) -> "Counter[str]":
    """What happened in so many worlds, and in more if something has not happened yet: then it would show nothing."""
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + WORLDS_MAX):
        counts += tally(world.run(plan(seed)))
        counts["worlds"] += 1
        if counts["worlds"] >= worlds and all(counts[what] for what in happens):
            return counts
    raise AssertionError([what for what in happens if not counts[what]])


def test_no_storm_brings_wrong_bytes_or_leaves_anything_behind() -> None:
    counts = storm(WORLDS, HAPPENS, lambda seed: draw(seed, WORLD_REQUESTS))
    assert counts["requests"] == counts["worlds"] * WORLD_REQUESTS


def test_no_storm_over_several_hosts_brings_wrong_bytes_or_leaves_anything_behind() -> None:
    happens = ("blocks_loaded", "blocks_saved", "updated", "preempted")
    storm(HOST_WORLDS, happens, lambda seed: over_hosts(draw(seed, WORLD_REQUESTS)))


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
