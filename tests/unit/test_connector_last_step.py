"""Metrics of an engine that has nothing left to do: vLLM steps it no further, so the last step has to tell all."""

from types import SimpleNamespace
from typing import Any

import pytest

from pegaflow.connector import device_report, peer_report
from pegaflow.connector.connector import PegaKVConnector
from pegaflow.connector.copies import NativeTypes
from pegaflow.connector.device import MOVED
from pegaflow.connector.device_report import DeviceReport
from pegaflow.connector.guard import Guard
from pegaflow.metrics import Recorder, merge
from tests.fakes import FakeCopier, FakeDone, FakeLayout, FakePool
from tests.unit.mini_engine import PART_BYTES, MiniEngine

PROMPT = list(range(40))


class CountingCopier(FakeCopier):
    """Says what it has moved, as the one for a device does."""

    moved = 0

    def _copy(self, job: int, *what: Any) -> FakeDone:
        self.moved += len(what[3]) * PART_BYTES
        return super()._copy(job, *what)

    def progress(self) -> dict[str, int]:
        return {"bytes_registered": 0, "bytes_total": 0, **dict.fromkeys(MOVED, 0), "bytes_saved": self.moved}


def hooks(engine: MiniEngine, worker: bool) -> Any:
    """The connector's hooks of one role of an engine."""
    connector: Any = PegaKVConnector.__new__(PegaKVConnector)
    connector._recorder = engine.recorder
    connector._guard = Guard(connector._recorder, lambda reason: None)
    connector._device_report = DeviceReport()
    connector._worker = engine.workers[0] if worker else None
    connector._scheduler = None if worker else engine.scheduler
    return connector


@pytest.fixture(autouse=True)
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever only looks now and then looks once."""
    monkeypatch.setattr(device_report, "INTERVAL_SECONDS", 1e9)
    monkeypatch.setattr(peer_report, "INTERVAL_SECONDS", 1e9)


def has_work(engine: MiniEngine) -> bool:
    """Whether vLLM makes another step."""
    return bool(engine.requests) or engine.scheduler.has_pending_saves()


@pytest.mark.parametrize("settle", [False, True])
def test_what_copies_moved_is_told_with_the_last_step(settle: bool) -> None:
    pool, copiers = FakePool(), list[CountingCopier]()

    def copier(pool: Any, device: str) -> Any:
        copiers.append(CountingCopier(pool))
        return copiers[-1]

    native: Any = NativeTypes(lambda name, shm_dir: pool, copier, FakeLayout)  # type: ignore[arg-type, return-value]
    engine = MiniEngine(pool=pool, native=native, settle=settle)
    worker, told = hooks(engine, worker=True), dict[str, Any]()
    for number in range(3):
        engine.add([number, *PROMPT])
        while has_work(engine):
            engine.step()
            stats = worker.get_kv_connector_stats()
            merge(told, stats.data if stats else {})
        assert told["counters"]["saved_bytes"] == copiers[0].moved > 0


def test_device_is_looked_at_now_and_then_while_copies_go_on() -> None:
    looks, report = 0, DeviceReport()

    def progress() -> None:
        nonlocal looks
        looks += 1

    for _ in range(100):
        report.observe(progress, Recorder())
    assert looks == 1
    report.observe(progress, Recorder(), at_rest=True)
    assert looks == 2


def test_rest_is_told_once_and_not_before_all_copies_have_ended() -> None:
    engine = MiniEngine()
    worker = engine.workers[0]
    engine.add(PROMPT)
    engine.step()
    engine.copiers[0].held = True
    while engine.requests:
        engine.step()
    worker.came_to_rest()
    engine.step()
    assert not worker.came_to_rest()
    engine.copiers[0].held = False
    engine.run()
    assert worker.came_to_rest()
    assert not worker.came_to_rest()


def test_saves_that_are_given_up_are_not_told_as_pending_for_ever() -> None:
    """vLLM passes nothing on from workers in a step in which they have nothing to say."""
    engine = MiniEngine()
    scheduler = hooks(engine, worker=False)
    engine.add(PROMPT)
    engine.step()
    engine.copiers[0].held = True
    while engine.requests:
        engine.step()
    told = scheduler.get_kv_connector_stats().data["gauges"]
    assert told["pending_save_requests"] > 0
    assert told["pinned_blocks"] > 0
    engine.scheduler._saves._overdue_seconds = 0.0
    engine.scheduler.plan(list, 0)
    assert not has_work(engine)
    told = scheduler.get_kv_connector_stats().data["gauges"]
    assert (told["pending_save_requests"], told["pinned_blocks"]) == (0, 0)


def test_peers_are_looked_at_in_the_last_step() -> None:
    numbers = {"address": "a:1", "state": "unknown", "problem": None, "queued_bytes": 0, "blocks_corrupt": 0}
    read_bytes, looks = 0, 0

    def facts() -> list[dict[str, Any]]:
        nonlocal looks
        looks += 1
        return [{**numbers, "bytes_fetched": read_bytes}]

    engine, link = MiniEngine(), SimpleNamespace(client=SimpleNamespace(facts=facts), server=None)
    engine.scheduler._link = link  # type: ignore[assignment]
    scheduler, told = hooks(engine, worker=False), dict[str, Any]()
    engine.add(PROMPT)
    while has_work(engine):
        engine.step()
        if has_work(engine):
            read_bytes += 1_000
            assert looks == 1
        stats = scheduler.get_kv_connector_stats()
        merge(told, stats.data if stats else {})
    assert told["gauges"]["peer_read_bytes"] == read_bytes > 0
