"""No exception reaches vLLM, but for one: each becomes the hook's answer for "nothing", a count and a log line."""

from collections.abc import Callable
from typing import TypeVar

from pegaflow.connector.log import logger
from pegaflow.errors import ForkedProcess, PegaFlowError, PoolClosed, PoolCorrupt
from pegaflow.metrics import Recorder

T = TypeVar("T")

KINDS_MAX = 64
"""Kinds of errors that are logged; more are only counted."""

FATAL = (ForkedProcess, PoolClosed, PoolCorrupt)
"""Errors after which the pool is of no use to this process any more."""


class MustStop(Exception):
    """A worker of vLLM computes from blocks that a load was to fill and did not. The one exception that vLLM hears of:
    its engine ends, and with it all requests, in errors. What it would say otherwise would be wrong."""


class Guard:
    """Runs the hooks of one connector."""

    def __init__(self, recorder: Recorder, on_fatal: Callable[[str], None]) -> None:
        """``on_fatal`` is told why the cache has to be turned off."""
        self._recorder = recorder
        self._on_fatal = on_fatal
        self._logged: set[tuple[str, str]] = set()

    def run(self, hook: str, default: T, function: Callable[[], T]) -> T:
        """Result of ``function()``, or ``default`` if it raises."""
        try:
            return function()
        except MustStop:
            raise
        except Exception as error:  # vLLM's engine dies of whatever gets out of a hook
            self.note(hook, error)
            return default

    def note(self, hook: str, error: Exception) -> None:
        """Count and, the first time, log an error that was turned into a miss."""
        self._recorder.count("hook_errors")
        kind = (hook, type(error).__name__)
        if kind not in self._logged and len(self._logged) < KINDS_MAX:
            self._logged.add(kind)
            # Our own errors say all there is to say in a sentence; of others we want to know where they come from.
            trace = None if isinstance(error, PegaFlowError) else error
            logger.error("PegaFlow: %s failed (%s); this counts as a miss.", hook, error, exc_info=trace)
        if isinstance(error, FATAL):
            self._on_fatal(str(error))
