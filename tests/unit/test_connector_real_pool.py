"""The connector's halves on a real pool, with real copies: the same events, without the fake engine's say."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine_races import PROMPT, RACES, finish, random_events
from tests.unit.mini_engine import EVERY_KIND
from tests.unit.native_engine import engine_on, open_pool


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Any]:
    made = open_pool(str(tmp_path))
    yield made
    made.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("geometry", EVERY_KIND.values(), ids=EVERY_KIND)
def test_what_was_saved_is_loaded_to_the_byte(pool: Any, geometry: Any, ranks: int) -> None:
    # So many blocks that copies may take their time without a limit on pinned blocks being reached.
    first = engine_on(pool, geometry, ranks=ranks, blocks=400)
    first.add(PROMPT)
    finish(first)
    second = engine_on(pool, geometry, ranks=ranks, blocks=400)
    request = second.add(PROMPT)
    finish(second)
    assert request.hit_tokens == geometry.hit_tokens_max(len(PROMPT)) >= 24


def test_damaged_block_is_recomputed(pool: Any) -> None:
    first = engine_on(pool)
    request = first.add(PROMPT)
    finish(first)
    [ref] = first.store.namespaces()[0].lease(request.block_hashes[4:5])  # type: ignore[index]
    file, offset, _ = pool.locate(ref, 0)
    pool.release([ref])
    with open(file, "r+b") as segment:
        segment.seek(offset)
        segment.write(b"damaged")
    second = engine_on(pool)
    again = second.add(PROMPT)
    finish(second, damaged=1)
    assert again.hit_tokens == 16
    assert again.num_tokens == len(PROMPT) + 1
    assert second.recorder.counters["load_failure"] == 1


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
def test_blocks_are_reused_only_after_their_copies(pool: Any, race: Any) -> None:
    race(partial(engine_on, pool))


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_events_leaves_nothing_behind(pool: Any, seed: int) -> None:
    random_events(partial(engine_on, pool), seed)
