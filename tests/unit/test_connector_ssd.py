"""Blocks on SSD: brought when it pays, waited for within bounds, and left to others when nobody needs them any more."""

import time
from typing import Any

import pytest

from pegaflow.connector import namespaces, prefetching, runs
from pegaflow.connector import speed as connector_speed
from pegaflow.connector.geometry import Geometry
from pegaflow.connector.speed import ComputeSpeed
from tests.engine_races import random_events
from tests.fake_ssd import BROKEN, FakeSsd
from tests.fakes import FakePool
from tests.unit.mini_engine import EVERY_KIND, HYBRID, SINGLE, MiniEngine

PROMPT = list(range(500, 542))


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of tests take no time, and the fake tier knows everything at once."""
    monkeypatch.setattr(namespaces, "SSD_SETTLE_SECONDS", 0.0)


def pool_with_tier() -> FakePool:
    pool = FakePool()
    pool.tier = FakeSsd()
    return pool


def tier_of(engine: MiniEngine) -> FakeSsd:
    assert engine.pool.tier is not None
    tier: FakeSsd = engine.pool.tier
    return tier


def engine_behind_ssd(geometry: Geometry = SINGLE, prompt: list[int] = PROMPT, **options: Any) -> MiniEngine:
    """An engine on a pool whose blocks of ``prompt`` are on SSD only."""
    pool = pool_with_tier()
    before = MiniEngine(geometry, pool, blocks=400, pd_tail_save=options.get("pd_tail_load", False))
    before.add(prompt)
    before.run()
    assert tier_of(before).spill(pool) > 0
    assert not pool.slots
    return MiniEngine(geometry, pool, blocks=400, **options)


def counted(engine: MiniEngine) -> tuple[int, int, int]:
    counters = engine.recorder.counters
    ram, ssd, miss = (counters.get(name, 0) for name in ("hit_tokens_ram", "hit_tokens_ssd", "miss_tokens"))
    return ram, ssd, miss


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("blocks_per_poll", [1, 3, 1_000])
def test_prompt_comes_from_ssd_to_the_byte_as_far_as_from_memory(kind: str, blocks_per_poll: int) -> None:
    engine = engine_behind_ssd(EVERY_KIND[kind])
    tier_of(engine).blocks_per_poll = blocks_per_poll
    from_ssd = engine.add(PROMPT)
    engine.run()
    from_memory = engine.add(PROMPT)
    engine.run()
    assert from_ssd.hit_tokens == from_memory.hit_tokens > 0
    assert counted(engine)[:2] == (from_memory.hit_tokens, from_ssd.hit_tokens)
    assert engine.recorder.samples["prefetch_wait_seconds"]
    assert not tier_of(engine).open
    engine.assert_nothing_held()


def test_tail_comes_from_ssd_too() -> None:
    engine = engine_behind_ssd(pd_tail_load=True)
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == 42
    engine.assert_nothing_held()


def test_request_is_put_off_while_blocks_are_on_their_way_and_others_run() -> None:
    engine = engine_behind_ssd()
    tier_of(engine).blocks_per_poll = 1
    waits, runs = engine.add(PROMPT), engine.add([1, 2, 3], more=4)
    engine.step()
    assert (waits.state, runs.state) == ("waiting", "running")
    engine.run()
    assert waits.hit_tokens == 40


@pytest.mark.parametrize("missing", [{3}, {0, 9}, {1, 2, 5}, set(range(1, 10))])
def test_blocks_on_ssd_between_blocks_in_memory_are_one_prefix(missing: set[int]) -> None:
    pool = pool_with_tier()
    engine = MiniEngine(SINGLE, pool, blocks=400)
    keys = engine.add(PROMPT).block_hashes
    engine.run()
    tier_of(engine).spill(pool, evict=False)
    for ref, slot in list(pool.slots.items()):
        if slot.key in [keys[block] for block in missing]:
            del pool.slots[ref]
    second = MiniEngine(SINGLE, pool, blocks=400)
    request = second.add(PROMPT)
    second.run()
    assert request.hit_tokens == 40
    assert counted(second) == (4 * min(missing), 40 - 4 * min(missing), 0)
    second.assert_nothing_held()


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_tier_that_brings_less_than_it_is_asked_for_is_asked_again(kind: str) -> None:
    engine = engine_behind_ssd(EVERY_KIND[kind])
    tier_of(engine).keys_max = 2
    from_ssd = engine.add(PROMPT)
    engine.run()
    from_memory = engine.add(PROMPT)
    engine.run()
    assert from_ssd.hit_tokens == from_memory.hit_tokens > 0
    engine.assert_nothing_held()


@pytest.mark.parametrize("present", [0, 1, 63, 64, 65, 191, 192, 193, 500])
def test_lookups_count_to_the_first_block_that_is_nowhere(present: int) -> None:
    class Space:
        asked = 0

        def tiers(self, keys: list[bytes]) -> bytes:
            self.asked += len(keys)
            return bytes(1 + int(key) % 2 if int(key) < present + 7 else 0 for key in keys)

    space = Space()
    keys = [str(number).encode() for number in range(507)]
    assert prefetching.TierView(space).lookup(keys, 7) == present  # type: ignore[arg-type]
    assert space.asked <= 2 * present + prefetching.LOOKUP_KEYS_MIN
    assert prefetching.TierView(space).lookup(keys[:3], 7) == 0  # type: ignore[arg-type]


def test_what_is_in_memory_is_taken_at_once() -> None:
    engine = engine_behind_ssd()
    engine.add(PROMPT)
    engine.run()
    asked = len(tier_of(engine).asked)
    request = engine.add(PROMPT)
    engine.step()
    assert request.state != "waiting"
    engine.run()
    assert len(tier_of(engine).asked) == asked
    assert counted(engine) == (40, 40, 0)


def test_long_prompts_are_asked_for_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "KEYS_MAX", 3)
    engine = engine_behind_ssd(HYBRID)
    tier_of(engine).blocks_per_poll = 2
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == 40
    assert max(tier_of(engine).asked) == 3
    engine.assert_nothing_held()


def test_nobody_waits_if_computing_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_behind_ssd()
    monkeypatch.setattr(ComputeSpeed, "seconds", lambda self, tokens: tokens * 1e-6)
    tier_of(engine).bytes_per_second = 1e3
    request = engine.add(PROMPT)
    engine.step()
    assert request.state != "waiting"
    engine.run()
    assert request.hit_tokens == 0
    assert tier_of(engine).asked == []
    assert counted(engine) == (0, 0, 40)


def test_nobody_waits_longer_than_computing_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_behind_ssd()
    monkeypatch.setattr(ComputeSpeed, "seconds", lambda self, tokens: 1e-3)
    tier_of(engine).blocks_per_poll = 0
    request = engine.add(PROMPT)
    engine.run(steps_max=1_000_000)
    assert request.hit_tokens < 40
    assert engine.recorder.counters["prefetch_incomplete"] == 1
    assert engine.recorder.samples["prefetch_wait_seconds"][0] < engine.scheduler._config.prefetch_wait_ms_max / 1_000


def test_what_came_in_time_is_taken() -> None:
    engine = engine_behind_ssd(prefetch_wait_ms_max=60_000)
    tier = tier_of(engine)
    tier.blocks_per_poll = 1
    request = engine.add(PROMPT)
    for _ in range(4):
        engine.step()
    tier.alive = False  # the disks hang: no estimate any more
    engine.step()
    assert request.state != "waiting"
    engine.run()
    assert request.hit_tokens == 16
    assert engine.recorder.counters["prefetch_incomplete"] == 1
    engine.assert_nothing_held()


def test_wait_ends_at_its_limit() -> None:
    engine = engine_behind_ssd(prefetch_wait_ms_max=20)
    tier_of(engine).blocks_per_poll = 0
    request = engine.add(PROMPT)
    started = time.monotonic()
    while request.state == "waiting":
        engine.step()
    assert time.monotonic() - started >= 0.02
    engine.run()
    assert request.hit_tokens < 40
    engine.assert_nothing_held()


def test_without_a_limit_nobody_waits() -> None:
    engine = engine_behind_ssd(prefetch_wait_ms_max=0)
    request = engine.add(PROMPT)
    engine.step()
    assert request.state != "waiting"
    engine.run()
    assert tier_of(engine).asked == []


@pytest.mark.parametrize("trouble", ["full board", "no leader"])
def test_without_anybody_to_read_a_request_goes_on_at_once(trouble: str) -> None:
    engine = engine_behind_ssd()
    if trouble == "full board":
        tier_of(engine).open_max = 0
    else:
        tier_of(engine).alive = False
    request = engine.add(PROMPT)
    engine.step()
    assert request.state != "waiting"
    engine.run()
    assert request.hit_tokens == 0
    engine.assert_nothing_held()


def test_blocks_of_an_aborted_request_are_there_for_others() -> None:
    engine = engine_behind_ssd()
    tier = tier_of(engine)
    tier.blocks_per_poll = 4
    request = engine.add(PROMPT)
    engine.step()
    engine.abort(request)
    assert engine.pool.leased() == 0
    assert not tier.open
    tier.alive = False
    other = engine.add(PROMPT)
    engine.run()
    assert other.hit_tokens >= 16
    engine.assert_nothing_held()


def test_reset_ends_waits_and_nothing_old_is_loaded() -> None:
    engine = engine_behind_ssd()
    tier_of(engine).blocks_per_poll = 1
    request = engine.add(PROMPT)
    engine.step()
    assert engine.scheduler.reset()
    assert engine.pool.leased() == 0
    assert not tier_of(engine).open
    engine.run()
    assert request.hit_tokens == 0
    engine.assert_nothing_held()


def test_reset_that_the_files_have_not_taken_yet_is_asked_for_again() -> None:
    engine = engine_behind_ssd()
    assert engine.store.namespaces() is not None
    tier_of(engine).lags = True
    assert not engine.scheduler.reset()
    assert not engine.scheduler.reset()
    assert tier_of(engine).waits == 2, "of what is shared, once each"
    tier_of(engine).lags = False
    assert engine.scheduler.reset()
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == 0


def test_reset_beside_a_tier_that_is_off_is_done_and_says_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_behind_ssd()
    assert engine.store.namespaces() is not None
    tier_of(engine).alive = False
    with caplog.at_level("WARNING", "vllm.pegaflow"):
        assert engine.scheduler.reset()
    assert caplog.text.count("the files have not forgotten") == 1
    tier_of(engine).alive = True
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == 0


def test_pauses_do_not_wait_for_the_files() -> None:
    engine = engine_behind_ssd()
    assert engine.store.namespaces() is not None
    tier_of(engine).lags = True
    assert not engine.scheduler.reset()
    waits = tier_of(engine).waits
    assert engine.scheduler.reset(pausing=True)
    engine.add(PROMPT)
    engine.run()
    assert engine.scheduler.reset(pausing=True)
    assert tier_of(engine).waits == waits


def test_reset_that_comes_before_namespaces_never_waits_in_a_step() -> None:
    sibling = engine_behind_ssd()
    spaces = sibling.store.namespaces()
    assert spaces is not None
    engine = MiniEngine(SINGLE, sibling.pool)
    engine.identity.ready = False
    assert engine.scheduler.reset()
    tier_of(engine).lags = True
    engine.identity.ready = True
    for _ in range(3):
        engine.add(PROMPT)
        engine.run()
    assert tier_of(engine).waits == 0
    assert spaces[0].epoch == 2, "reset once"
    request = sibling.add(PROMPT)
    sibling.run()
    assert request.hit_tokens == 0


def test_private_blocks_are_not_for_the_ssd() -> None:
    engine = engine_behind_ssd()
    assert engine.store.namespaces() is not None
    used = set(tier_of(engine).used)
    assert engine.scheduler.reset(pausing=True)
    for _ in range(2):
        request = engine.add(PROMPT)
        engine.run()
        engine.store._ssd_asked = 0.0
        engine.step()
    assert request.hit_tokens == 40, "in memory"
    assert not engine.store.ssd
    assert tier_of(engine).used == used
    engine.scheduler._ssd_report._next_look = 0.0
    engine.step()
    assert engine.recorder.gauges["ssd_serving"] == 1, "of the whole pool"


def put_off(**options: Any) -> tuple[MiniEngine, Any]:
    """An engine whose request waits and holds some of what it waits for."""
    engine = engine_behind_ssd(**options)
    tier_of(engine).keys_max, tier_of(engine).blocks_per_poll = 2, 1
    request = engine.add(PROMPT, more=30)
    for _ in range(3):
        engine.step()
    assert request.state == "waiting"
    assert engine.pool.leased() > 0
    return engine, request


def test_request_that_goes_on_without_the_cache_holds_nothing_of_what_was_brought() -> None:
    engine, request = put_off()
    engine.store.turn_off("of a test")
    engine.step()
    assert request.state == "running"
    assert engine.pool.leased() == 0
    assert not tier_of(engine).open


def test_engine_that_sleeps_holds_nothing_that_was_brought_and_asks_again_later() -> None:
    engine, request = put_off(keep_on_sleep=True)
    assert engine.scheduler.reset(pausing=True)
    assert engine.pool.leased() == 0
    assert not tier_of(engine).open
    engine.run()
    assert request.num_tokens == len(PROMPT) + 30
    engine.assert_nothing_held()


def test_failure_of_the_tier_is_a_miss_and_reaches_nobody() -> None:
    engine = engine_behind_ssd()
    tier = tier_of(engine)
    tier.blocks_per_poll = 1
    request = engine.add(PROMPT)
    engine.step()
    tier.fails = BROKEN
    while engine.requests:
        engine.step()
    assert request.hit_tokens < 40
    assert engine.pool.leased() == 0
    assert engine.recorder.counters["hook_errors"] > 0


def test_held_blocks_are_a_part_of_the_pool_at_most() -> None:
    engine = engine_behind_ssd()
    tier_of(engine).blocks_per_poll = 0
    spaces = engine.store.namespaces()
    assert spaces is not None
    engine.pool.pool_bytes = prefetching.SHARE_MAX * 10 * spaces[0].block_bytes
    first, second = engine.add(PROMPT), engine.add(PROMPT)
    engine.step()
    assert first.state == "waiting"
    assert second.state != "waiting"


def test_full_prefix_counts_what_is_on_ssd() -> None:
    engine = engine_behind_ssd(wait_for_full_prefix=True, pd_tail_load=True)
    engine.pool.others = 1
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == 42
    assert "full_prefix_incomplete" not in engine.recorder.counters


def test_preempted_request_may_wait_once_more_and_no_more() -> None:
    engine = engine_behind_ssd()
    request = engine.add(PROMPT, more=30)
    for round_number in range(4):
        while request.state != "running":
            engine.step()
        tier_of(engine).spill(engine.pool)
        engine.preempt(request)
        assert engine.scheduler.table.get(request.request_id).prefetches == min(  # type: ignore[union-attr]
            round_number + 1, prefetching.PREFETCHES_MAX
        )
    engine.run()
    engine.assert_nothing_held()


def test_tier_that_a_sibling_brings_later_is_used() -> None:
    pool = FakePool()
    engine = MiniEngine(SINGLE, pool, blocks=400)
    engine.add(PROMPT)
    engine.run()
    assert not engine.store.ssd
    pool.tier = FakeSsd()
    pool.tier.spill(pool)
    engine.store._ssd_asked = 0.0
    engine.step()
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == 40


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_events_beside_a_tier_leaves_nothing_behind(seed: int) -> None:
    pool = pool_with_tier()
    assert pool.tier is not None
    pool.tier.blocks_per_poll = 1 + seed % 3

    def engine_on(geometry: Any = SINGLE, **options: Any) -> MiniEngine:
        return MiniEngine(geometry, pool, **options)

    random_events(engine_on, seed, finish=lambda engine: (engine.run(100_000), engine.assert_nothing_held()))
    assert not pool.tier.open


def test_speed_is_that_of_most_tokens_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(connector_speed, "STEP_TOKENS_MIN", 32)
    speed = ComputeSpeed()

    def step(tokens: int, seconds: float) -> None:
        speed.planned(tokens)
        now[0] += seconds
        speed.ended()

    assert speed.seconds(100) is None
    step(1, 1.0)
    assert speed.seconds(100) is None, "one token says nothing"
    # Two steps on their way together: the second begins when the first ends.
    speed.planned(1_000)
    speed.planned(1_000)
    now[0] += 1.0
    speed.ended()
    now[0] += 1.0
    speed.ended()
    assert speed.seconds(1_000) == 1.0
    step(900, 1e-5)
    assert speed.seconds(1_000) == 1.0, "one odd step counts for little"
    for _ in range(20):
        step(32, 1.0)
    assert speed.seconds(1_000) == 1.0, "short steps count for little"


def test_steps_without_tokens_do_not_end_those_with_some(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(connector_speed, "STEP_TOKENS_MIN", 32)
    engine = MiniEngine()
    for tokens in [1_000, 0] * 5:
        engine.scheduler.plan(list, 0)
        engine.scheduler.plan(list, tokens)
        engine.scheduler.update(None, ())  # news of workers, which come with some steps only
        engine.scheduler.take_events()
        now[0] += 1.0
        engine.scheduler.take_events()
        assert engine.scheduler._speed.seconds(1_000) == 1.0


def test_requests_ask_again_while_the_tier_opens_its_files_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_behind_ssd()
    monkeypatch.setattr(namespaces, "SSD_SETTLE_SECONDS", 0.01)
    tier_of(engine).recovering = True
    request = engine.add(PROMPT)
    started = time.monotonic()
    while time.monotonic() - started < 0.05:
        engine.step()
    assert request.state == "waiting"
    monkeypatch.setattr(namespaces, "SSD_RECOVERY_SECONDS_MAX", 0.02)
    engine.run()
    assert request.num_tokens > len(PROMPT)


def test_blocks_that_came_and_those_that_were_late_are_counted_apart() -> None:
    engine = engine_behind_ssd()
    blocks = engine.add(PROMPT)
    engine.run()
    [space] = engine.pool._namespaces.values()
    here = blocks.hit_tokens // SINGLE.groups[0].block_tokens
    assert space.prompts[-1] == (0, 0, here, here, here, here)
    late = engine_behind_ssd(prefetch_wait_ms_max=60_000)
    tier_of(late).blocks_per_poll = 1
    late.add(PROMPT)
    for _ in range(4):
        late.step()
    tier_of(late).alive = False  # the disks hang: what came by now is taken
    late.run()
    [space] = late.pool._namespaces.values()
    assert space.prompts[-1] == (0, 0, 4, 4, here, here)
    assert late.recorder.counters["miss_blocks_late"] == here - 4
    late.assert_nothing_held()
