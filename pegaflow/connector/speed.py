"""How fast this engine computes prompts, seen from the steps that vLLM plans and ends."""

import time
from collections import deque

STEP_TOKENS_MIN = 32
"""Steps of fewer tokens say more about overhead than about speed."""

STEPS_REMEMBERED = 32
STEPS_OPEN_MAX = 16


class ComputeSpeed:
    """Tokens per second at which half of the last tokens were computed, or faster: so long steps, which are prompts,
    count for more than short ones, and one odd step counts for little."""

    def __init__(self) -> None:
        self._open: deque[tuple[float, int]] = deque(maxlen=STEPS_OPEN_MAX)
        self._steps: deque[tuple[float, int]] = deque(maxlen=STEPS_REMEMBERED)
        self._last_end = 0.0

    def planned(self, tokens: int) -> None:
        """A step of so many tokens goes to the workers. Steps of none end like all others."""
        self._open.append((time.monotonic(), tokens))

    def ended(self) -> None:
        """The oldest step that was planned is over. Once for each step."""
        if not self._open:
            return
        planned, tokens = self._open.popleft()
        now = time.monotonic()
        # With steps on their way together, one begins when the one before it ends.
        seconds = now - max(planned, self._last_end)
        self._last_end = now
        if tokens >= STEP_TOKENS_MIN and seconds > 0:
            self._steps.append((tokens / seconds, tokens))

    def seconds(self, tokens: int) -> float | None:
        """What computing ``tokens`` takes; ``None`` while nothing is known."""
        left = sum(count for _, count in self._steps) / 2
        for speed, count in sorted(self._steps, reverse=True):
            left -= count
            if left <= 0:
                return tokens / speed
        return None
