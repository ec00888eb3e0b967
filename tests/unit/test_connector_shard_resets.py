"""Replicas over several hosts when they are reset, also while pools are busy, ranks are late or copies under way."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from pegaflow.connector import shard_worker
from pegaflow.connector.events import ANNOUNCED_MAX
from pegaflow.connector.shard_pool import ShardPool
from pegaflow.errors import PoolBusy, ShmFull
from pegaflow.keys import PRIVATE_MARK
from tests.fakes import FakeNamespace
from tests.unit.mini_engine import HYBRID
from tests.unit.shard_hosts import PROMPT, STEPS_MAX, FakeHosts, hit

BLOCKS = len(PROMPT) // 4


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that was busy is tried again with the next plan."""
    monkeypatch.setattr(shard_worker, "RETRY_SECONDS", 0.0)


def test_a_reset_reaches_every_host_though_nothing_runs() -> None:
    hosts = FakeHosts()
    engine, sibling = hosts.engine(), hosts.engine()
    hit(engine)
    assert hit(sibling) == len(PROMPT)
    assert engine.scheduler.reset()
    assert engine.scheduler.has_pending_saves()  # so vLLM steps until all have heard
    engine.run(STEPS_MAX)
    assert [hosts.blocks(number) for number in range(2)] == [0, 0]
    assert hit(sibling) == 0
    assert hit(engine) == 0
    assert hit(engine) == len(PROMPT)
    assert hit(sibling) == len(PROMPT)
    assert engine.scheduler.reset()
    assert hit(engine) == 0
    hosts.assert_nothing_held()


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("busy", [4, 8, 12])
def test_a_host_that_cannot_be_reset_at_once_is_reset_as_soon_as_it_can(busy: int) -> None:
    hosts = FakeHosts()
    sibling = hosts.engine()
    hit(sibling)
    engine = hosts.engine()
    hosts.busy = [PoolBusy("try again")] * busy
    assert engine.scheduler.reset()
    for family in (8, 9, 10):
        engine.add([family] * 8)
        engine.run(STEPS_MAX)
    assert hosts.busy == []
    assert engine.store.off is None
    assert hit(sibling) == 0
    assert hit(engine) == 0
    assert hit(engine) == len(PROMPT)


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("resets", [1, 2])
def test_a_host_whose_reset_has_to_wait_finds_and_saves_nothing_until_then(
    resets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = FakeHosts()
    engine = hosts.engine()
    for _ in range(resets - 1):
        hit(engine)
        engine.scheduler.reset()
    hit(engine)
    assert hit(engine) == len(PROMPT)
    assert engine.scheduler.reset()
    with monkeypatch.context() as patch:
        patch.setattr(FakeNamespace, "reset", Mock(side_effect=PoolBusy("try again")))
        assert [hit(engine), hit(engine)] == [0, 0]
    assert engine.store.off is None
    assert hit(engine) == 0
    assert hit(engine) == len(PROMPT)
    hosts.assert_nothing_held()


def test_a_pool_that_is_busy_is_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(shard_worker, "time", SimpleNamespace(monotonic=lambda: now))
    hosts = FakeHosts()
    engine = hosts.engine()
    hosts.busy = [PoolBusy("try again")] * 8
    for left in (4, 0):
        assert [hit(engine), hit(engine)] == [0, 0]
        assert len(hosts.busy) == left  # each of four ranks has tried once
        now += shard_worker.RETRY_SECONDS
    assert hit(engine) == 0
    assert hit(engine) == len(PROMPT)
    hosts.assert_nothing_held()


@pytest.mark.parametrize("late", [0, 3])
def test_a_rank_that_is_still_reading_its_weights_saves_nothing_and_keeps_the_cache_on(late: int) -> None:
    hosts = FakeHosts()
    engine = hosts.engine()
    worker: Any = engine.workers[late]
    weights, worker._weights = worker._weights, None
    assert hit(engine) == 0
    assert hit(engine) == 0
    hosts.assert_nothing_held()
    worker._weights = weights
    assert engine.store.off is None
    assert hit(engine) == 0
    assert hit(engine) == len(PROMPT)


def test_a_rank_that_can_copy_nothing_any_more_still_resets_its_host() -> None:
    hosts = FakeHosts()
    engine, sibling = hosts.engine(), hosts.engine()
    hit(engine)
    assert hit(sibling) == len(PROMPT)
    for worker in engine.workers:
        worker.refuse("its device is gone")
    hit(engine)
    assert engine.store.off == "its device is gone"
    assert engine.scheduler.reset()
    engine.run(STEPS_MAX)
    assert hit(sibling) == 0


@pytest.mark.parametrize("resets", [0, 1])
@pytest.mark.parametrize("pausing", [False, True])
@pytest.mark.parametrize("ends", ["before", "after"])
@pytest.mark.parametrize("steps", range(2, 7))
def test_what_was_computed_before_a_reset_never_becomes_visible_after_it(
    steps: int, ends: str, pausing: bool, resets: int
) -> None:
    hosts = FakeHosts()
    engine = hosts.engine()
    for _ in range(resets):
        engine.scheduler.reset()
    engine.add([9] * 8)
    engine.run(STEPS_MAX)
    for copier in hosts.copiers:
        copier.held = True
    engine.add(PROMPT)
    engine.add([60] * 40)
    for _ in range(steps):
        engine.step()
    for when in ("before", "after"):
        for request in list(engine.requests.values()) if when == ends else ():
            engine.abort(request)  # what is full then is saved with the next step
        if when == "before":
            engine.scheduler.reset(pausing)
    for copier in hosts.copiers:
        copier.held = False
    engine.run(STEPS_MAX)
    assert visible_in_private(hosts) == 0
    assert hit(engine) == 0
    assert hit(engine) == len(PROMPT)
    hosts.assert_nothing_held()


def visible_in_private(hosts: FakeHosts) -> int:
    return sum(
        key.endswith(PRIVATE_MARK) and space is slot.namespace and slot.state == "sealed" and slot.epoch == space.epoch
        for pool in hosts.pools
        for slot in pool.slots.values()
        for (key, _), space in pool._namespaces.items()
    )


def test_a_host_that_can_have_no_pool_turns_the_cache_off(caplog: pytest.LogCaptureFixture) -> None:
    hosts = FakeHosts()
    engine = hosts.engine()
    hosts.busy = [ShmFull("no space is left")]
    assert hit(engine) == 0
    assert hit(engine) == 0
    assert engine.store.off == "a worker cannot use the pool of its host: no space is left"
    assert caplog.text.count("no space is left") == 2  # by the rank, and by the scheduler
    hosts.assert_nothing_held()


@pytest.mark.parametrize("change", ["nothing", "reset", "another name"])
def test_what_was_reserved_before_names_changed_is_freed_instead(change: str) -> None:
    pool = ShardPool()
    space = pool.namespace(b"a" * 32, 0, [48])
    [(_, ref)] = space.reserve([b"key"], parents=[None])
    if change == "reset":
        space.reset()
    elif change == "another name":
        pool.namespace(b"b" * 32, 0, [48])
    kept = change == "nothing"
    assert pool.publish([ref]) == int(kept)
    orders = pool.take_orders([], [])
    assert orders is not None
    assert (orders.published, orders.aborted) == (((ref,), ()) if kept else ((), (ref,)))
    assert space.contains([b"key"])[0] == kept
    assert pool.take_orders([], []) is None


def test_an_engine_that_only_saves_does_so_again_after_a_reset() -> None:
    hosts = FakeHosts()
    engine = hosts.engine(HYBRID, mode="save_only")
    engine.scheduler.reset()
    hit(engine)
    saved = visible_in_private(hosts)
    assert saved > 4 * BLOCKS
    engine.scheduler.reset()
    hit(engine)
    assert visible_in_private(hosts) == saved
    hosts.assert_nothing_held()


@pytest.mark.usefixtures("no_pause")
def test_a_host_that_missed_new_names_answers_with_nothing_of_the_old_ones() -> None:
    hosts = FakeHosts()
    engine = hosts.engine()
    hit(engine)
    engine.scheduler.reset()
    for worker in engine.workers[2:]:
        worker._pool = None  # type: ignore[attr-defined]
    hosts.busy = [PoolBusy("try again")] * 100
    first = engine.add(PROMPT)
    engine.run(STEPS_MAX)
    assert len(hosts.busy) < 100
    hosts.busy = []
    second, third = engine.add(PROMPT), engine.add(PROMPT)
    engine.run(STEPS_MAX)
    assert [first.hit_tokens, second.hit_tokens, third.hit_tokens] == [0, 0, 0]
    last = engine.add(PROMPT)
    engine.run(STEPS_MAX)
    assert last.hit_tokens == len(PROMPT)


def test_as_much_is_remembered_to_be_stored_as_is_told_of() -> None:
    space = ShardPool().namespace(b"a" * 32, 0, [48])
    keys = [b"%d" % number for number in range(ANNOUNCED_MAX)]
    space.learn(keys, b"\x01" * len(keys))
    assert space.contains(keys) == b"\x01" * len(keys)
    space.learn([b"one more"], b"\x01")
    assert space.contains([keys[0], keys[1], b"one more"]) == b"\x00\x01\x01"
