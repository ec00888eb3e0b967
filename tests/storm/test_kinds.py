"""Storms over models whose groups have chunks and states, which only newer vLLM knows."""

from dataclasses import replace
from typing import Any

import pytest

from pegaflow.connector.geometry import Group, GroupKind
from pegaflow.connector.saves import Saves
from tests.storm.command import WORLD_REQUESTS
from tests.storm.plan import GroupPlan, Plan, draw
from tests.storm.test_mutations import noticed
from tests.storm.test_storm import storm

WORLDS = 8
SIZE = 8
KINDS = {
    "chunks": (GroupPlan(SIZE, chunk=3 * SIZE), GroupPlan(SIZE)),
    "states": (GroupPlan(SIZE), GroupPlan(SIZE, state=True)),
    "states, windows and chunks": (
        GroupPlan(SIZE, window=2 * SIZE + 1),
        GroupPlan(SIZE, state=True),
        GroupPlan(SIZE),
        GroupPlan(SIZE, chunk=2 * SIZE),
    ),
}


def of_kind(plan: Plan, groups: tuple[GroupPlan, ...]) -> Plan:
    """The same storm over models with other groups."""
    engines = [
        replace(
            engine,
            model=replace(engine.model, groups=groups),
            blocks=engine.blocks * len(groups) * 4,
            # States are kept where vLLM has a prefix cache of its own.
            local_caching=engine.local_caching or any(group.state for group in groups),
        )
        for engine in plan.engines
    ]
    return replace(plan, engines=tuple(engines), segments=plan.segments * len(groups))


@pytest.mark.parametrize("kind", KINDS)
def test_no_storm_brings_wrong_bytes_to_models_of_any_kind(kind: str) -> None:
    happens = ("blocks_loaded", "blocks_saved", "preempted")
    counts = storm(WORLDS, happens, lambda seed: of_kind(draw(99 + seed, WORLD_REQUESTS), KINDS[kind]))
    assert counts["requests"] == counts["worlds"] * WORLD_REQUESTS


def one_block_less(kind: GroupKind) -> Any:
    right = Group.first_needed

    def first_needed(self: Group, stop: int) -> int:
        return right(self, stop) + (self.kind is kind and right(self, stop) < stop)

    return first_needed


def states_of_the_block_before(self: Saves, snapshots: Any, *rest: Any) -> Any:
    return STATES(self, [(group, block, tokens - SIZE) for group, block, tokens in snapshots], *rest)


STATES = Saves._reserve_states


@pytest.mark.parametrize(
    ("kind", "target", "name", "broken"),
    [
        ("chunks", Group, "first_needed", one_block_less(GroupKind.CHUNK)),
        ("states", Group, "first_needed", one_block_less(GroupKind.STATE)),
        ("states", Saves, "_reserve_states", states_of_the_block_before),
    ],
    ids=["chunk without its first block", "no state", "state of the block before"],
)
def test_group_that_is_cached_wrongly_is_noticed(
    monkeypatch: pytest.MonkeyPatch, kind: str, target: Any, name: str, broken: Any
) -> None:
    monkeypatch.setattr(target, name, broken)
    assert "WrongBytes" in noticed(lambda plan: of_kind(plan, KINDS[kind]))
