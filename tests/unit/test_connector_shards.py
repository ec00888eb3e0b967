"""One replica whose ranks are on several hosts, each with a real pool of its own. Every byte loaded is compared."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine_races import PROMPT, RACES, finish, random_events
from tests.unit.mini_engine import EVERY_KIND, HYBRID, SINGLE
from tests.unit.shard_hosts import RealHosts, hit


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[RealHosts]:
    made = RealHosts(tmp_path)
    yield made
    made.close()


def engine_on(hosts: RealHosts, geometry: Any = SINGLE, *, ranks: int = 1, **options: Any) -> Any:
    return hosts.engine(geometry, ranks=2 * ranks, **options)


@pytest.mark.parametrize("geometry", EVERY_KIND.values(), ids=EVERY_KIND)
def test_what_the_ranks_of_two_hosts_saved_is_loaded_to_the_byte(hosts: RealHosts, geometry: Any) -> None:
    first = hosts.engine(geometry)
    assert hit(first) == 0
    finish(first)
    second = hosts.engine(geometry)
    assert hit(second) == geometry.hit_tokens_max(len(PROMPT)) >= 24
    finish(second)


def test_four_hosts_have_one_rank_each(tmp_path: Path) -> None:
    hosts = RealHosts(tmp_path, 4)
    assert hit(hosts.engine()) == 0
    assert hit(hosts.engine()) == len(PROMPT)
    for number in range(4):
        [space] = hosts.spaces(number)
        assert space["parts"] == 1
        assert space["label"] == f"mini rank {number}, shard {number + 1} of 4"
    hosts.close()


def test_pools_outlive_the_engine_and_hold_nothing_for_it(hosts: RealHosts) -> None:
    engine = hosts.engine(HYBRID)
    for more in (3, 5, 9):
        engine.add(PROMPT[: 4 * more], more)
    for _ in range(4):
        engine.step()
    for worker in engine.workers:  # with all that is under way
        worker.shutdown()
    assert hit(hosts.engine(HYBRID)) >= 0
    for number in range(2):
        assert sum(space["leases"] for space in hosts.spaces(number)) == 0


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
def test_blocks_are_reused_only_after_their_copies(hosts: RealHosts, race: Any) -> None:
    race(partial(engine_on, hosts))


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_events_leaves_nothing_behind(hosts: RealHosts, seed: int) -> None:
    random_events(partial(engine_on, hosts), seed)
