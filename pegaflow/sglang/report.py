"""What SGLang asks the backend about its transfers, and what it logs: each kind of failure once."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from pegaflow.errors import ForkedProcess, PegaFlowError, PoolClosed, PoolCorrupt
from pegaflow.sglang import engine_facts
from pegaflow.sglang.log import logger

T = TypeVar("T")

FATAL = (ForkedProcess, PoolClosed, PoolCorrupt)
"""Errors after which the pool is of no use to this process any more."""

KINDS_MAX = 64
"""Kinds of failures that are logged; more are only misses."""

SAMPLES_MAX = 1024
"""Transfers that are kept until SGLang asks for them."""


class Report:
    """Failures and transfers of one backend. Safe to use from many threads."""

    def __init__(self, metrics: bool) -> None:
        """``metrics``: whether SGLang wants to know about transfers."""
        self._metrics = metrics
        self._samples: dict[bool, deque[tuple[int, float]]] = {
            save: deque(maxlen=SAMPLES_MAX) for save in (False, True)
        }
        self._logged: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self.broken = False
        """Whether the pool is of no use any more."""

    def run(self, what: str, default: T, function: Callable[[], T], *, always: bool = False) -> T:
        """Result of ``function()``, or ``default`` if it raises: nothing gets out to SGLang's threads. ``always``: also
        when the pool is of no use any more."""
        if self.broken and not always:
            return default
        try:
            return function()
        except Exception as error:  # a thread of SGLang ends with whatever gets out of here
            self.note(what, error)
            return default

    def note(self, what: str, error: Exception) -> None:
        """Log an error, the first of its kind, and turn the backend off after one that will not go away."""
        kind = (what, type(error).__name__)
        with self._lock:
            new = kind not in self._logged and len(self._logged) < KINDS_MAX
            self._logged.add(kind) if new else None
        self.broken = self.broken or isinstance(error, FATAL)
        if new:
            # Our own errors say all there is to say in a sentence; of others we want to know where they come from.
            trace = None if isinstance(error, PegaFlowError) else error
            end = "the cache is off from now on" if self.broken else "this counts as a miss"
            logger.error("PegaFlow: %s (%s); %s.", what, error, end, exc_info=trace)

    def moved(self, save: bool, pages: int, page_bytes: int, started: float) -> None:
        """Book one transfer that began at ``started`` (``time.perf_counter``)."""
        if self._metrics and pages:
            seconds = max(time.perf_counter() - started, 1e-9)
            self._samples[save].append((pages, pages * page_bytes / seconds / 1e9))

    def take(self) -> Any:
        """Transfers since the last call as SGLang's report: pages, and GB/s. ``None`` if it does not want any."""
        report = engine_facts.storage_metrics() if self._metrics else None
        if report is None:
            return None
        for save, name in ((False, "prefetch"), (True, "backup")):
            samples = self._samples[save]
            while samples:
                pages, rate = samples.popleft()
                getattr(report, f"{name}_pgs").append(pages)
                getattr(report, f"{name}_bandwidth").append(rate)
        return report
