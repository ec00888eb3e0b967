"""The shortest history: requests and events are left out for as long as the same thing goes wrong."""

import re
import time

from tests.storm import world
from tests.storm.plan import Plan

SECONDS_MAX = 120.0


def signature(error: Exception) -> str:
    """What went wrong, without where and to whom."""
    text = str(error).split("\n")[0].split("[")[0]
    return f"{type(error).__name__}: {re.sub(r'[0-9]+', '#', text)[:60]}"


def failure(plan: Plan) -> Exception | None:
    """What goes wrong with a plan."""
    try:
        world.run(plan)
    except Exception as error:
        return error
    return None


def shrink(plan: Plan, error: Exception, seconds_max: float = SECONDS_MAX) -> tuple[Plan, Exception]:
    """A plan of which no part can be left out, as far as time allows, and how it fails."""
    wanted, deadline = signature(error), time.monotonic() + seconds_max
    piece = max(1, len(plan) // 2)
    while True:
        left_out = False
        start = 0
        while start < len(plan) and time.monotonic() < deadline:
            shorter = plan.without(set(range(start, start + piece)))
            found = failure(shorter)
            if found is not None and signature(found) == wanted:
                plan, error, left_out = shorter, found, True
            else:
                start += piece
        if time.monotonic() >= deadline or (piece == 1 and not left_out):
            return plan, error
        piece = max(1, piece // 2) if not left_out or piece > len(plan) else piece
