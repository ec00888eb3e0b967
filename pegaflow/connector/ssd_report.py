"""The pool's SSD tier in the log and in the metrics of one engine."""

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pegaflow.connector.log import logger
from pegaflow.errors import PegaFlowError
from pegaflow.metrics import Recorder

if TYPE_CHECKING:
    from pegaflow._native import Pool

POLL_SECONDS = 0.2
PROGRESS_SECONDS = 5.0
"""Pause between two lines about a recovery that goes on."""

START_SECONDS_MAX = 600.0
INTERVAL_SECONDS = 1.0
"""Pause between two looks for the metrics."""

GAUGES = {
    "ssd_spilled_bytes": ("spilled_bytes",),
    "ssd_read_bytes": ("read_bytes",),
    "ssd_joined_blocks": ("read_joined",),
    "ssd_read_wait_ms_max": ("read_wait_ms_max",),
    "ssd_bad_records": ("read_damaged", "read_failed"),
    "ssd_dropped_blocks": ("ssd_dropped",),
    "ssd_records": ("records",),
    "ssd_read_bytes_per_second": ("read_bytes_per_second",),
    "ssd_queued_bytes": ("queued_bytes",),
}
"""Numbers of the whole pool, and of which of ``Pool.ssd`` each is the sum."""


class SsdReport:
    """What one engine says of the tier."""

    def __init__(self) -> None:
        self._state = ""
        self._next_look = 0.0
        self._closing = threading.Event()

    def start(self, pool: "Pool") -> None:
        """Tell in the log how recovery goes: the engine is idle then, so on a thread."""
        threading.Thread(target=self._watch, args=(pool,), name="pegaflow-ssd-log", daemon=True).start()

    def close(self) -> None:
        """Say nothing more. Idempotent."""
        self._closing.set()

    def observe(self, pool: "Pool", recorder: Recorder) -> None:
        """Look, unless it is too early."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + INTERVAL_SECONDS
        tier = pool.ssd()
        if tier is None:
            return
        for key, sources in GAUGES.items():
            recorder.gauge(key, sum(int(tier[source]) for source in sources))
        recorder.gauge("ssd_serving", int(tier["state"] == "serving"))
        recorder.gauge("ssd_recovery_percent", 100 * tier["zones_done"] // max(1, tier["zones"]))
        if tier["state"] == "off" != self._state:
            logger.warning("PegaFlow: the SSD tier is off, serving goes on without it: %s", tier["problem"] or "")
        self._state = tier["state"]

    def _watch(self, pool: "Pool") -> None:
        started = said = time.monotonic()
        problem = None
        try:
            while not self._closing.wait(POLL_SECONDS) and time.monotonic() - started < START_SECONDS_MAX:
                tier = pool.ssd()
                if tier is None:
                    return
                if tier["problem"] not in (None, problem):
                    problem = tier["problem"]
                    logger.warning("PegaFlow: no SSD tier yet, serving goes on without it: %s", problem)
                if tier["state"] in ("serving", "off"):
                    self._said_ready(tier, time.monotonic() - started)
                    return
                if time.monotonic() - said >= PROGRESS_SECONDS:
                    said = time.monotonic()
                    logger.info(
                        "PegaFlow: looking for blocks on SSD: %d of %d zones, %d blocks so far.",
                        tier["zones_done"], tier["zones"], tier["records"],
                    )  # fmt: skip
        except PegaFlowError as error:
            if not self._closing.is_set():
                logger.warning("PegaFlow: the SSD tier cannot be looked at: %s", error)

    @staticmethod
    def _said_ready(tier: Mapping[str, Any], seconds: float) -> None:
        if tier["state"] == "off":
            return  # said with the metrics
        logger.info(
            "PegaFlow: %d blocks are on SSD (found in %.1f s; %s).",
            tier["records"], seconds, "this process leads" if tier["leads"] else "another process leads",
        )  # fmt: skip
