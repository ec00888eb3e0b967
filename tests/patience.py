"""Waiting for what other threads, processes and hosts do, however slow the machine is.

Bounds are a safety net: they end tests of code that is wrong, and are far longer than anything takes that is right.
"""

import resource
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pegaflow.errors import PoolBusy

WAIT_SECONDS_MAX = 240.0
PAUSE_SECONDS = 0.005

T = TypeVar("T")


def await_(what: Callable[[], Any], why: Callable[[], Any] = lambda: "it does not come about") -> None:
    """Until it is so. ``why``: what to say if it never is."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not what():
        assert time.monotonic() < deadline, why()
        time.sleep(PAUSE_SECONDS)


def patiently(call: Callable[[], T], in_the_way: tuple[type[Exception], ...] = (PoolBusy,)) -> T:
    """What ``call`` returns once nobody is in its way. A living thread or process that holds what it needs may get no
    processor for longer than the pool waits. ``in_the_way``: errors that say so."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while True:
        try:
            return call()
        except in_the_way as error:
            if time.monotonic() > deadline:
                raise AssertionError("it is in the way for ever") from error


def times_slept() -> int:
    """How often this thread has given up its processor to wait for something. A wait in a loop of short sleeps, as the
    pool's are, has no more of them than fit into the time that it may take, however slow the machine is."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
