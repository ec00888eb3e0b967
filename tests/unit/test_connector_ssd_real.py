"""The connector's halves on a real pool with a real SSD tier: files in a directory, read and written by threads."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pegaflow import _native, ssd
from tests.engine_races import PROMPT, STEPS_MAX, random_events
from tests.patience import await_
from tests.unit.mini_engine import HYBRID, SINGLE
from tests.unit.native_engine import engine_on, finish
from tests.unit.ssd_pools import await_written, in_some_try, pool_with_tier


def await_known(engine: Any, request: Any) -> None:
    """Until the tier says that it has the request's blocks."""
    space = engine.store.namespaces()[0]
    await_(lambda: 2 in space.tiers(request.block_hashes))


def write(pool: Any, geometry: Any = SINGLE) -> None:
    """Until the prompt is on SSD."""
    engine = engine_on(pool, geometry, blocks=400)
    engine.add(PROMPT)
    finish(engine)
    await_written(pool, engine)


@pytest.mark.parametrize("geometry", [SINGLE, HYBRID], ids=["single", "hybrid"])
def test_prompt_outlives_its_pool_to_the_byte(tmp_path: Path, geometry: Any) -> None:
    def outlives(place: Path) -> bool:
        with pool_with_tier(place / "shm", place / "disk") as pool:
            write(pool, geometry)
        # As a reboot: another place for the pool, the same disk.
        with pool_with_tier(place / "shm after", place / "disk") as pool:
            second = engine_on(pool, geometry, blocks=400)
            request = second.add(PROMPT)
            await_known(second, request)
            second.run(STEPS_MAX)
            if request.hit_tokens < (len(PROMPT) if geometry is SINGLE else 32):
                return False
            assert second.recorder.counters["hit_tokens_ssd"] == request.hit_tokens
            shown = json.loads(_native.inspect(pool.path))["ssd"]
            assert (shown["state"], shown["leader_row"]) == ("serving", pool.member()[0])
            assert shown["read_blocks"] == pool.ssd()["read_blocks"] > 0
            again = second.add(PROMPT)
            finish(second)
            assert second.recorder.counters["hit_tokens_ram"] == again.hit_tokens
        report = ssd.verify_cache([place / "disk"], "real")
        assert report.ok
        assert report.records > 0
        return True

    in_some_try(tmp_path, outlives)


def test_reset_reaches_the_disk(tmp_path: Path) -> None:
    with pool_with_tier(tmp_path / "shm", tmp_path / "disk") as pool:
        first = engine_on(pool, blocks=400)
        first.add(PROMPT)
        finish(first)
        await_written(pool, first)
        await_(first.scheduler.reset)  # False: the files have not taken note yet
    with pool_with_tier(tmp_path / "shm after", tmp_path / "disk") as pool:
        second = engine_on(pool, blocks=400)
        request = second.add(PROMPT)
        finish(second)
        assert request.hit_tokens == 0


def test_two_engines_read_a_block_once(tmp_path: Path) -> None:
    def both_have_it(place: Path) -> bool:
        with pool_with_tier(place / "shm", place / "disk") as pool:
            write(pool)
        with pool_with_tier(place / "shm after", place / "disk") as pool:
            pair = [engine_on(pool, blocks=400) for _ in range(2)]
            requests = [engine.add(PROMPT) for engine in pair]
            await_known(pair[0], requests[0])
            while any(engine.requests for engine in pair):
                for engine in pair:
                    engine.step()
            assert pool.ssd()["read_blocks"] <= len(PROMPT) // 4
            for engine in pair:
                finish(engine)
            return [request.hit_tokens for request in requests] == [len(PROMPT)] * 2

    in_some_try(tmp_path, both_have_it)


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_events_leaves_nothing_behind(tmp_path: Path, seed: int) -> None:
    with pool_with_tier(tmp_path / "shm", tmp_path / "disk") as pool:
        random_events(partial(engine_on, pool), seed, finish=finish)
