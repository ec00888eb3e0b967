"""Requests that wait for their whole prompt: no longer than somebody may bring it, and never in anybody's way."""

from typing import Any

import pytest

from pegaflow.connector import waiting
from pegaflow.connector.geometry import Geometry
from tests.fakes import FakePool
from tests.unit.mini_engine import CHUNKED, DRAFTED, DRAFTED_RECURRENT, HYBRID, RECURRENT, SINGLE, MiniEngine

PROMPT = list(range(300, 342))
STEPS_MAX = 1_000_000


@pytest.fixture(autouse=True)
def probe_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of tests take no time."""
    monkeypatch.setattr(waiting, "PROBE_SECONDS", 0.0)


def pair(geometry: Geometry = SINGLE, **options: Any) -> tuple[MiniEngine, MiniEngine]:
    """An engine that computes prompts and one that waits for them, on one pool."""
    pool = FakePool()
    pool.others = 1
    tails = geometry is SINGLE
    prefill = MiniEngine(geometry, pool, blocks=400, pd_tail_save=tails)
    waits = {"wait_for_full_prefix": True, **options}
    return prefill, MiniEngine(geometry, pool, blocks=400, pd_tail_load=tails, **waits)


@pytest.mark.parametrize(
    ("geometry", "tokens", "hit"),
    [
        (SINGLE, 42, 42),
        (SINGLE, 41, 40),
        (SINGLE, 40, 40),
        (SINGLE, 3, 3),
        (HYBRID, 42, 40),
        (HYBRID, 40, 32),
        (DRAFTED, 42, 36),
        (DRAFTED, 40, 36),
        (RECURRENT, 42, 40),
        (RECURRENT, 40, 32),
        (DRAFTED_RECURRENT, 42, 32),
        (CHUNKED, 42, 40),
        (CHUNKED, 34, 32),
    ],
)
def test_request_waits_until_the_last_of_its_prompt_is_there(geometry: Geometry, tokens: int, hit: int) -> None:
    prefill, decode = pair(geometry)
    request = decode.add(PROMPT[:tokens])
    sent = prefill.add(PROMPT[:tokens])
    decode.step()
    assert request.state == "waiting"
    while prefill.requests or prefill.scheduler.has_pending_saves():
        prefill.step()
        decode.step()
        assert request.hit_tokens in (0, hit)
    assert sent.num_tokens == tokens + 1
    decode.run()
    assert request.hit_tokens == hit
    assert decode.recorder.samples["full_prefix_wait_seconds"]
    assert "full_prefix_incomplete" not in decode.recorder.counters
    decode.assert_nothing_held()


def test_what_is_there_already_is_taken_at_once() -> None:
    prefill, decode = pair()
    prefill.add(PROMPT)
    prefill.run()
    request = decode.add(PROMPT)
    decode.step()
    assert request.state != "waiting"
    assert "full_prefix_wait_seconds" not in decode.recorder.samples
    decode.run()
    assert request.hit_tokens == 42


def test_nobody_waits_for_a_prompt_that_nothing_is_saved_of() -> None:
    _, decode = pair()
    request = decode.add([7])
    decode.step()
    assert request.state != "waiting"


def test_request_gives_up_at_once_when_nobody_else_lives() -> None:
    prefill, decode = pair()
    prefill.add(PROMPT[:24])
    prefill.run()
    request = decode.add(PROMPT)
    for _ in range(5):
        decode.step()
    assert request.state == "waiting"
    decode.pool.others = 0
    decode.step()
    assert request.state != "waiting"
    decode.run()
    assert request.hit_tokens == 24
    assert decode.recorder.counters["full_prefix_incomplete"] == 1


def test_request_gives_up_after_its_time_and_never_waits_again() -> None:
    prefill, decode = pair(wait_for_full_prefix_seconds=0.02)
    prefill.add(PROMPT[:24])
    prefill.run()
    request = decode.add(PROMPT, more=8)
    while request.state != "running":
        decode.step()
    assert request.hit_tokens == 24
    decode.preempt(request)
    decode.step()
    assert request.state != "waiting"
    decode.run(STEPS_MAX)
    assert decode.recorder.counters["full_prefix_incomplete"] == 1


def test_waiting_request_is_in_nobodys_way() -> None:
    prefill, decode = pair()
    prefill.add(PROMPT)
    prefill.run()
    missing = decode.add(list(range(900, 942)))
    present = decode.add(PROMPT)
    for _ in range(6):
        decode.step()
    assert present.request_id not in decode.requests
    assert present.hit_tokens == 42
    assert missing.state == "waiting"
    decode.abort(missing)
    decode.run()
    decode.assert_nothing_held()


def test_engine_that_was_not_told_to_wait_does_not() -> None:
    _, decode = pair(wait_for_full_prefix=False)
    request = decode.add(PROMPT)
    decode.step()
    assert request.state != "waiting"


def test_engine_that_only_saves_does_not_wait() -> None:
    _, decode = pair(mode="save_only")
    request = decode.add(PROMPT)
    decode.step()
    assert request.state != "waiting"


def test_others_are_counted_no_more_often_than_makes_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PROBE_SECONDS", 1000.0)
    _, decode = pair()
    asked = 0

    def others(self: Any) -> int:
        nonlocal asked
        asked += 1
        return 1

    namespace = decode.store.namespaces()[0]  # type: ignore[index]
    monkeypatch.setattr(type(namespace), "others", others)
    for _ in range(3):
        decode.add(PROMPT)
    for _ in range(20):
        decode.step()
    assert asked == 1
