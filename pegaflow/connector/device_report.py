"""A device's copies in metrics: what they moved and for how long, and how much of the pool is page-locked for them."""

import time
from collections.abc import Callable, Mapping

from pegaflow.metrics import Recorder

INTERVAL_SECONDS = 1.0
"""Pause between two looks; the numbers change slowly."""

COUNTED = {
    "registration_bytes": "bytes_total",
    "bounced_bytes": "bytes_bounced",
    "loaded_bytes": "bytes_loaded",
    "saved_bytes": "bytes_saved",
    "load_moving_us": "load_moving_us",
    "save_moving_us": "save_moving_us",
}
"""Counters of the metrics, and the copier's counts that they follow."""


class DeviceReport:
    """Turns what a copier has counted since its start into what happened since the last look."""

    def __init__(self) -> None:
        self._counted: dict[str, int] = {}
        self._next_look = 0.0

    def observe(
        self, progress: Callable[[], Mapping[str, int] | None], recorder: Recorder, *, at_rest: bool = False
    ) -> None:
        """Look, unless it is too early. ``progress``: see ``DeviceCopier.progress``; ``None``: nothing to report.
        ``at_rest``: the last copy has ended, so this step may be the last one for hours: then it is not too early."""
        now = time.monotonic()
        if now < self._next_look and not at_rest:
            return
        self._next_look = now + INTERVAL_SECONDS
        counted = progress()
        if counted is None:
            return
        recorder.gauge("registered_bytes", counted["bytes_registered"])
        for key, source in COUNTED.items():
            recorder.count(key, counted[source] - self._counted.get(key, 0))
            self._counted[key] = counted[source]
