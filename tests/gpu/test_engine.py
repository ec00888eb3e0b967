"""The connector's halves on a device: blocks are preempted, aborted and reused while their copies run behind delays."""

from collections.abc import Callable
from functools import partial

import pytest

from pegaflow import _native
from tests.engine_races import RACES, EngineOn, preempted_while_saving, random_events
from tests.gpu.engine import SLOW_BYTES_PER_SECOND, engine_on

BACKENDS = ("auto", "staged", "direct", "kernel")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("race", RACES, ids=lambda race: str(race.__name__))
def test_blocks_are_reused_only_after_their_copies(
    pool: _native.Pool, race: Callable[[EngineOn], None], backend: str
) -> None:
    race(partial(engine_on, pool, backend, SLOW_BYTES_PER_SECOND if race is preempted_while_saving else 0))


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_events_leaves_nothing_behind(pool: _native.Pool, seed: int) -> None:
    random_events(partial(engine_on, pool, BACKENDS[seed % len(BACKENDS)], SLOW_BYTES_PER_SECOND), seed, events=120)
