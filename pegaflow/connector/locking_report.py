"""Page-locking in metrics: how much of the pool is ready for the device, and what it cost that it was not."""

import time
from collections.abc import Callable, Mapping

from pegaflow.metrics import Recorder

INTERVAL_SECONDS = 1.0
"""Pause between two looks; the numbers change slowly."""


class LockingReport:
    """Turns what a copier has counted since its start into what happened since the last look."""

    def __init__(self) -> None:
        self._counted: dict[str, int] = {}
        self._next_look = 0.0

    def observe(self, progress: Callable[[], Mapping[str, int] | None], recorder: Recorder) -> None:
        """Look, unless it is too early. ``progress``: see ``DeviceCopier.progress``; ``None``: nothing to report."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + INTERVAL_SECONDS
        counted = progress()
        if counted is None:
            return
        recorder.gauge("registered_bytes", counted["bytes_registered"])
        for key, source in (("registration_bytes", "bytes_total"), ("bounced_bytes", "bytes_bounced")):
            recorder.count(key, counted[source] - self._counted.get(key, 0))
            self._counted[key] = counted[source]
