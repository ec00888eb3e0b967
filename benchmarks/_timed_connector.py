"""The connector, with a clock in each of the calls that vLLM makes while it serves: how long an engine's own thread was
in them. Processes write into ``PEGAFLOW_BENCH_CLOCKS``, a directory, a file each.
"""

import mmap
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from pegaflow.connector import PegaKVConnector

CLOCKS = "PEGAFLOW_BENCH_CLOCKS"
CLOCK_BYTES = 8
ONCE = ("shutdown", "register_kv_caches", "register_cross_layers_kv_cache", "unregister_kv_caches", "restore_kv_caches")
"""Calls of a start or an end."""


class _Clock:
    """Nanoseconds that this process spent in calls, where others can read them. A call within a call counts once."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # vLLM imports the connector before it forks its engine

    def _begin(self) -> None:
        path = self._place / f"{os.getpid()}"
        path.write_bytes(bytes(CLOCK_BYTES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), CLOCK_BYTES)
        self._nanoseconds, self._inside = 0, False

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, counted."""

        @wraps(function)
        def call(*values: Any, **named: Any) -> Any:
            if self._inside:
                return function(*values, **named)
            self._inside, began = True, time.perf_counter_ns()
            try:
                return function(*values, **named)
            finally:
                self._nanoseconds += time.perf_counter_ns() - began
                self._memory[:] = self._nanoseconds.to_bytes(CLOCK_BYTES, "little")
                self._inside = False

        return call


def seconds_in_calls(place: Path) -> float:
    """Of all processes so far."""
    return sum(int.from_bytes(path.read_bytes(), "little") for path in place.iterdir()) / 1e9


class TimedConnector(PegaKVConnector):
    """See the top of this file."""


if CLOCKS in os.environ:
    _clock = _Clock(Path(os.environ[CLOCKS]))
    for _name, _function in list(vars(PegaKVConnector).items()):
        if callable(_function) and not _name.startswith("_") and _name not in ONCE:
            setattr(TimedConnector, _name, _clock.timed(_function))
