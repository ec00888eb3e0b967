"""Many requests that wait for what the ranks of several hosts hold: who is asked for, and who is a miss."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from pegaflow.connector import loads, shard_asks
from pegaflow.connector.metadata import ShardAnswer, ShardOrders
from pegaflow.connector.shard_asks import ShardAsks
from pegaflow.connector.shard_pool import ShardPool
from pegaflow.metrics import Recorder
from tests.unit.mini_engine import PART_BYTES, SINGLE
from tests.unit.shard_hosts import PROMPT, FakeHosts

STEP_SECONDS = 0.02
STEPS_MAX = 20_000


class Queue:
    """Requests that wait in their order for one to end, at a rate, and ranks that answer with the next step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, keys: int = 1) -> None:
        """``keys`` of each request."""
        self.now = 1_000.0
        monkeypatch.setattr(shard_asks, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.recorder, self.pool, self.keys = Recorder(), ShardPool(), keys
        self.spaces: Any = {0: self.pool.namespace(b"f" * 32, 0, [PART_BYTES])}
        self.asks = ShardAsks(SINGLE, self.pool, 1, self.recorder)
        self.keys_held_most = 0
        """Keys that ranks held blocks of for requests that did not run."""
        self.found: dict[int, int] = {}
        """Blocks of each request that vLLM has admitted."""

    def ask(self, number: int) -> int | None:
        """Blocks that a request finds; ``None``: it is put off."""
        keys = [b"%d %d" % (number, block) for block in range(self.keys)]
        views = self.asks.views(str(number), self.spaces, {0: keys})
        return views[0].lookup(keys) if views is not None else None

    def step(self, *, answers: bool = True) -> ShardOrders | None:
        """A step in which the ranks hear of all orders, and all of them have everything."""
        self.now += STEP_SECONDS
        self.asks.drop_old()
        held = [asked.ask.keys for asked in self.asks._open.values() if asked.ask is not None]
        self.keys_held_most = max(self.keys_held_most, sum(held))
        orders = self.pool.take_orders((), ())
        for ask in orders.asks if orders is not None and answers else ():
            present = tuple(b"\x01" * len(keys) for _, _, keys, _ in ask.groups)
            self.asks.answered(ask.number, ShardAnswer(1, present), self.spaces)
        return orders

    def admit(self, requests: int, per_second: float) -> None:
        """Step until all of them run."""
        waiting, begun = list(range(requests)), self.now
        for _ in range(STEPS_MAX):
            may_run = int((self.now - begun) * per_second)
            for number in list(waiting):
                found = self.ask(number) if len(self.found) < may_run else None
                if found is not None:
                    self.found[number] = found
                    self.asks.drop(str(number))
                    waiting.remove(number)
                if len(self.found) >= may_run:
                    break
            if not waiting:
                return
            self.step()
        raise AssertionError("some requests never came to run")


@pytest.fixture
def patience() -> None:
    """Time passes as these tests say, so the limits may be what they are."""


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    return Queue(monkeypatch)


@pytest.mark.parametrize("per_second", [2, 4, 8, 12, 30, 60, 500])
def test_cached_requests_in_a_long_queue_are_hits_however_fast_it_goes(queue: Queue, per_second: float) -> None:
    queue.admit(600, per_second)
    assert list(queue.found.values()) == [1] * 600
    assert not queue.recorder.counters.get("shard_late")
    assert not queue.recorder.counters.get("shard_crowded")


def test_a_queue_that_takes_longer_than_a_turn_may_is_all_hits_as_long_as_it_moves(queue: Queue) -> None:
    queue.admit(4_000, 200)
    assert sum(queue.found.values()) == 4_000


def test_the_wait_for_answers_begins_when_the_ranks_are_asked(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard_asks, "OPEN_MAX", 1)
    assert [queue.ask(0), queue.ask(1)] == [None, None]
    for _ in range(int(0.9 * shard_asks.ANSWER_SECONDS_MAX / STEP_SECONDS)):
        queue.step(answers=False)
        assert [queue.ask(0), queue.ask(1)] == [None, None]
    queue.asks.drop("0")
    steps = 0
    while queue.ask(1) is None:
        queue.step(answers=False)
        steps += 1
    assert steps >= shard_asks.ANSWER_SECONDS_MAX / STEP_SECONDS - 1
    assert queue.recorder.counters["shard_late"] == 1
    assert "not all ranks have said" in caplog.text


def test_a_request_that_never_has_a_turn_is_a_miss_with_a_reason_of_its_own(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard_asks, "OPEN_MAX", 2)
    monkeypatch.setattr(shard_asks, "HELD_SECONDS_MAX", 1_000.0)
    assert [queue.ask(0), queue.ask(1)] == [None, None]
    steps = 0
    while queue.ask(2) is None:
        queue.step()
        steps += 1
    assert steps >= shard_asks.TURN_SECONDS_MAX / STEP_SECONDS - 1
    assert queue.ask(2) == 0
    assert queue.recorder.counters["shard_crowded"] == 2
    assert "shard_late" not in queue.recorder.counters
    assert caplog.text.count("no turn to be asked for") == 1
    assert queue.ask(0) == 1


@pytest.mark.parametrize(("requests", "keys"), [(100, 2_000), (8, shard_asks.KEYS_MAX), (300, 100)])
def test_few_long_prompts_are_asked_for_at_a_time_and_all_are_found(
    monkeypatch: pytest.MonkeyPatch, requests: int, keys: int
) -> None:
    queue = Queue(monkeypatch, keys)
    queue.admit(requests, 20)
    assert list(queue.found.values()) == [keys] * requests
    most = min(shard_asks.KEYS_OPEN_MAX + keys - 1, shard_asks.OPEN_MAX * keys)
    assert 0 < queue.keys_held_most <= most < 2 * shard_asks.KEYS_OPEN_MAX
    assert queue.asks._keys_open == 0


def test_answers_of_ranks_are_joined_key_by_key() -> None:
    one, other = (
        ShardAnswer(1, (b"\x01\x00\x01\x00", b"", b"\x00")),
        ShardAnswer(2, (b"\x01\x01\x00\x00", b"", b"\x01")),
    )
    assert one.merge(other) == other.merge(one) == ShardAnswer(3, (b"\x01\x00\x00\x00", b"", b"\x00"))


def test_what_can_be_gained_is_looked_for_before_the_ranks_are_asked_and_not_at_every_visit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = Mock(wraps=loads.find_match)
    monkeypatch.setattr(loads, "find_match", looked)
    engine = FakeHosts().engine()
    request = engine.add(PROMPT)
    for _ in range(10):
        assert engine.scheduler.match(request, 0, False) == (None, False)
    engine.abort(request)
    assert looked.call_count == 1
