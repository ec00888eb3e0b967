"""What one engine says of the SSD tier, in its log and in its metrics."""

import logging
import threading
import time
from typing import Any

import pytest

from pegaflow.connector import ssd_report
from pegaflow.connector.ssd_report import GAUGES, SsdReport
from pegaflow.errors import PoolClosed
from pegaflow.metrics import GAUGES as KNOWN
from pegaflow.metrics import Recorder

WAIT_SECONDS_MAX = 240.0


class Tiers:
    """A pool whose tier goes through some states, one a look; the last one stays."""

    def __init__(self, *states: Any) -> None:
        self.states = list(states)
        self.looks = 0

    def ssd(self) -> Any:
        self.looks += 1
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return state


def tier(state: str, **fields: Any) -> dict[str, Any]:
    sources = {source: 0 for sources in GAUGES.values() for source in sources}
    return sources | {"state": state, "leads": True, "problem": None, "zones": 8, "zones_done": 2} | fields


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(ssd_report, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(ssd_report, "PROGRESS_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "vllm.pegaflow")
    return caplog


def watch(pool: Any) -> None:
    SsdReport().start(pool)
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while any(thread.name == "pegaflow-ssd-log" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_recovery_is_told_from_zone_to_zone_and_then_what_was_found(lines: pytest.LogCaptureFixture) -> None:
    watch(Tiers(tier("recovering"), tier("recovering", zones_done=5, records=7), tier("serving", records=9)))
    said = [record.getMessage() for record in lines.records]
    assert any("2 of 8 zones" in line for line in said)
    assert any("5 of 8 zones, 7 blocks" in line for line in said)
    assert "9 blocks are on SSD" in said[-1]
    assert "this process leads" in said[-1]


def test_problem_of_this_process_is_said_once_and_others_may_lead(lines: pytest.LogCaptureFixture) -> None:
    locked = {"problem": "the file is in use", "leads": False}
    watch(Tiers(tier("none", **locked), tier("none", **locked), tier("serving", **locked)))
    said = [record.getMessage() for record in lines.records]
    assert sum("the file is in use" in line for line in said) == 1
    assert "another process leads" in said[-1]


@pytest.mark.parametrize("end", [None, PoolClosed("closed")])
def test_watching_ends_with_the_pool(lines: pytest.LogCaptureFixture, end: Any) -> None:
    pool = Tiers(tier("recovering"), end)
    watch(pool)
    assert pool.looks == 2


def test_numbers_of_the_pool_become_gauges() -> None:
    recorder = Recorder()
    pool = Tiers(tier("serving", read_damaged=2, read_failed=3, zones_done=8))
    SsdReport().observe(pool, recorder)  # type: ignore[arg-type]
    assert recorder.gauges["ssd_bad_records"] == 5
    assert (recorder.gauges["ssd_serving"], recorder.gauges["ssd_recovery_percent"]) == (1, 100)
    assert set(recorder.gauges) <= set(KNOWN)


def test_the_tier_is_looked_at_now_and_then_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_report, "INTERVAL_SECONDS", 1_000.0)
    pool, report, recorder = Tiers(tier("serving")), SsdReport(), Recorder()
    for _ in range(100):
        report.observe(pool, recorder)  # type: ignore[arg-type]
    assert pool.looks == 1


def test_tier_that_goes_off_is_one_line(lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_report, "INTERVAL_SECONDS", 0.0)
    off = tier("off", problem="the disk does not answer")
    pool, report = Tiers(tier("serving"), off), SsdReport()
    for _ in range(5):
        report.observe(pool, Recorder())  # type: ignore[arg-type]
    said = [record.getMessage() for record in lines.records]
    assert sum("the disk does not answer" in line for line in said) == 1
