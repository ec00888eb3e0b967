"""For all tests of one process: whatever else keeps the machine busy decides nothing.

Hypothesis measures no time, and what the connector waits for at most is longer than any test. Tests of such a limit set
it, or the clock, themselves.
"""

import pytest
from hypothesis import HealthCheck, settings

from pegaflow.connector import adapters, early, namespaces, peer_watch, pins, shard_asks, speed, worker
from pegaflow.p2p import directed, probe

PATIENCE_SECONDS = 600.0
STEP_TOKENS_MIN = 1 << 20
"""So that nobody has a measured speed: how long a step of a test takes says nothing of what is worth waiting for."""

LIMITS = (
    (adapters, "CHECK_SECONDS_MAX"),
    (adapters, "READY_WAIT_SECONDS_MAX"),
    (directed, "CONNECT_SECONDS_MAX"),
    (early, "TAKE_SECONDS_MAX"),
    (namespaces, "READY_WAIT_SECONDS_MAX"),
    (namespaces, "RESET_WAIT_SECONDS_MAX"),
    (namespaces, "SSD_RECOVERY_SECONDS_MAX"),
    (peer_watch, "GRACE_SECONDS"),
    (peer_watch, "PRESENT_SECONDS"),
    (pins, "FREES_SOON_SECONDS"),
    (probe, "ANSWER_SECONDS_MAX"),
    (probe, "CONNECT_SECONDS_MAX"),
    (shard_asks, "ANSWER_SECONDS_MAX"),
    (shard_asks, "HELD_SECONDS_MAX"),
    (shard_asks, "TURN_SECONDS_MAX"),
    (worker, "DRAIN_SECONDS_MAX"),
    (worker, "SETTLE_SECONDS_MAX"),
)

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit is reached by itself."""
    for module, name in LIMITS:
        assert isinstance(getattr(module, name), float)
        monkeypatch.setattr(module, name, PATIENCE_SECONDS)
    monkeypatch.setattr(speed, "STEP_TOKENS_MIN", STEP_TOKENS_MIN)
