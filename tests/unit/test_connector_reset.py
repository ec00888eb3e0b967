"""Resets: weights were replaced, so nothing of before is found and nothing of after is shared."""

import inspect
import threading
from collections.abc import Callable

import pytest
from vllm.v1.engine.core import EngineCore

from pegaflow.connector import compat, namespaces
from pegaflow.keys import PRIVATE_MARK
from tests.unit.mini_engine import HYBRID, SINGLE, MiniEngine
from tests.unit.test_connector_device import engine_on_device
from tests.unit.test_connector_requests import PROMPT, warm


def hit(engine: MiniEngine, tokens: list[int] = PROMPT) -> int:
    request = engine.add(tokens)
    engine.run()
    engine.assert_nothing_held()
    return request.hit_tokens


def test_engine_that_was_reset_shares_with_itself_only(caplog: pytest.LogCaptureFixture) -> None:
    engine = MiniEngine()
    sibling = MiniEngine(SINGLE, engine.pool)
    warm(engine)
    assert hit(sibling) == len(PROMPT)
    with caplog.at_level("INFO", "vllm.pegaflow"):
        assert engine.scheduler.reset()
        assert engine.scheduler.reset()
    assert caplog.text.count("shares no blocks") == 1
    warm(engine)
    assert hit(engine) == len(PROMPT)
    assert hit(sibling) == 0  # neither what was saved before nor what was saved after
    assert hit(MiniEngine(SINGLE, engine.pool)) == len(PROMPT)  # the sibling has saved it anew


def test_later_resets_stay_in_the_private_namespace() -> None:
    engine = MiniEngine()
    warm(engine)
    for _ in range(5):
        assert engine.scheduler.reset()
        assert hit(engine) == 0
        assert hit(engine) == len(PROMPT)
    assert len(engine.pool._namespaces) == 2
    shared, private = (key for key, _ in engine.pool._namespaces)
    assert (shared.endswith(PRIVATE_MARK), private.endswith(PRIVATE_MARK)) == (False, True)


def test_reset_before_anything_is_known_takes_effect_as_soon_as_it_is() -> None:
    sibling = MiniEngine()
    warm(sibling)
    engine = MiniEngine(SINGLE, sibling.pool)
    engine.identity.ready = False
    assert engine.scheduler.reset()
    engine.identity.ready = True
    assert hit(engine) == 0
    assert hit(engine) == len(PROMPT)
    assert hit(sibling) == 0


def test_reset_that_cannot_be_done_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MiniEngine()
    warm(engine)
    assert engine.store._lock.acquire(blocking=False)
    answers: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(namespaces, "RESET_WAIT_SECONDS_MAX", 0.01)
        thread = threading.Thread(target=lambda: answers.append(engine.scheduler.reset()))
        thread.start()
        thread.join()
    engine.store._lock.release()
    assert answers == [False]
    assert engine.scheduler.reset()
    assert hit(engine) == 0


def test_workers_get_ready_for_the_private_namespace() -> None:
    engine, _, copiers = engine_on_device()
    warm(engine)
    [(public, _)] = copiers[0].registered
    assert engine.scheduler.reset()
    warm(engine)
    namespaces = engine.store.namespaces()
    assert namespaces is not None
    assert copiers[0].registered == [(public, 0), (namespaces[0], 0)]
    assert namespaces[0] is not public
    assert len(copiers) == 1


def test_blocks_in_flight_at_a_reset_are_saved_anew() -> None:
    engine = MiniEngine()
    warm(engine, [99] * 8)
    engine.copiers[0].held = True
    engine.add(PROMPT[:12])
    engine.step()
    assert engine.scheduler.reset()
    new = engine.add(PROMPT[:12])
    engine.step()
    assert [len(refs) for job in engine.plans[-1].saves for _, refs, _ in job.blocks] == [3]
    engine.copiers[0].held = False
    engine.run()
    engine.assert_nothing_held()
    assert hit(engine, [*PROMPT[:12], 1]) == 12
    assert new.hit_tokens == 0


def test_preempted_request_saves_its_blocks_anew_after_a_reset() -> None:
    engine = MiniEngine()
    request = engine.add(PROMPT)
    engine.step()
    engine.step()
    engine.preempt(request)
    assert engine.scheduler.reset()
    engine.run()
    assert request.hit_tokens == 0
    assert hit(engine) == len(PROMPT)


def test_one_step_resets_all_groups_for_every_sibling() -> None:
    engine = MiniEngine(HYBRID)
    sibling = MiniEngine(HYBRID, engine.pool)
    warm(engine)
    assert hit(sibling) > 0
    spaces = sibling.store.namespaces()
    assert spaces is not None
    assert len(spaces) > 1
    assert engine.scheduler.reset()
    assert {space.epoch for space in spaces.values()} == {2}, "once, not once per group"
    assert hit(sibling) == 0


def test_saves_of_a_sibling_that_were_in_flight_at_a_reset_never_appear() -> None:
    engine = MiniEngine()
    warm(engine, [99] * 8)
    sibling = MiniEngine(SINGLE, engine.pool)
    warm(sibling, [98] * 8)
    sibling.copiers[0].held = True
    sibling.add(PROMPT)
    sibling.step()
    sibling.step()
    reserved = engine.pool.reserved()
    assert reserved
    assert engine.scheduler.reset()
    sibling.copiers[0].held = False
    sibling.run()
    sibling.assert_nothing_held()
    assert not any(ref in engine.pool.slots for ref in reserved)
    assert hit(MiniEngine(SINGLE, engine.pool)) == 0


def test_load_of_a_sibling_that_was_in_flight_at_a_reset_gets_the_old_bytes() -> None:
    engine = MiniEngine()
    warm(engine)
    sibling = MiniEngine(SINGLE, engine.pool)
    warm(sibling, [98] * 8)
    sibling.copiers[0].held = True
    request = sibling.add(PROMPT)
    sibling.step()
    assert request.hit_tokens == len(PROMPT)
    leased = engine.pool.leased()
    assert leased > 0
    assert engine.scheduler.reset()
    for other in range(5):
        engine.add([90 + other] * 8)
    engine.run()
    assert engine.pool.leased() == leased
    sibling.copiers[0].held = False
    sibling.run()  # checks every byte against what the prompt's blocks must hold
    sibling.assert_nothing_held()
    assert request.hit_tokens == len(PROMPT)


@pytest.mark.parametrize("keep", [False, True])
def test_engine_that_goes_to_sleep_takes_nothing_from_its_siblings(keep: bool) -> None:
    engine = MiniEngine(keep_on_sleep=keep)
    warm(engine)
    sibling = MiniEngine(pool=engine.pool)
    assert hit(sibling) == 40
    assert engine.scheduler.reset(pausing=True)
    assert hit(sibling) == 40
    assert hit(engine) == (40 if keep else 0), "weights may be others after the sleep"
    assert hit(engine) == 40
    assert engine.scheduler.reset(pausing=True)
    assert hit(engine) == (40 if keep else 0)
    assert engine.scheduler.reset()
    assert hit(engine) == 0
    assert hit(sibling) == 0, "somebody asked for this, so it is for all"


@pytest.mark.parametrize("known", [False, True])
def test_reset_for_all_reaches_siblings_after_any_pause(known: bool) -> None:
    sibling = MiniEngine()
    warm(sibling)
    engine = MiniEngine(pool=sibling.pool)
    if known:
        assert hit(engine) == 40
    else:
        engine.store._namespaces = None
    assert engine.scheduler.reset(pausing=True)
    for _ in range(3):
        hit(engine)
        assert hit(sibling) == 40
        assert engine.scheduler.reset()
        assert hit(engine) == 0
        assert hit(sibling) == 0
    assert len(engine.pool._namespaces) == 2


def test_sleep_before_anything_is_known_resets_nobody_later() -> None:
    engine = MiniEngine()
    warm(engine)
    late = MiniEngine(pool=engine.pool)
    late.identity.ready = False
    late.store._namespaces = None
    assert late.scheduler.reset(pausing=True)
    late.identity.ready = True
    assert hit(late) == 0
    assert hit(engine) == 40


@pytest.mark.parametrize("keep", [False, True])
def test_sleep_with_a_load_in_flight_is_asked_for_again(keep: bool) -> None:
    engine = MiniEngine(keep_on_sleep=keep)
    warm(engine)
    engine.add(PROMPT)
    engine.before_workers = lambda: None
    engine.copiers[0].held = True
    engine.step()
    assert not engine.scheduler.reset(pausing=True)
    engine.copiers[0].held = False
    engine.run()
    assert engine.scheduler.reset(pausing=True)


def test_pauses_are_told_from_resets_that_somebody_asked_for() -> None:
    def _reset_caches(ask: Callable[[], bool]) -> bool:
        return (lambda: ask())()

    assert _reset_caches(compat.is_pausing)
    assert not compat.is_pausing()
    assert "_reset_caches" in inspect.getsource(EngineCore._finish_pause)
    assert "reset_prefix_cache" in inspect.getsource(EngineCore._reset_caches)
