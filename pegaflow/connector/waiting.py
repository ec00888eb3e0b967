"""Requests that wait until all of their prompt is in the pool, since another process is about to put it there.

vLLM asks again in every step. A request waits as long as the last of its prompt is missing, but no longer than a limit,
and only while another living process uses the same namespace. Then it takes what is there, and never waits again.
"""

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pegaflow.connector.geometry import Geometry
from pegaflow.connector.request_state import RequestState
from pegaflow.connector.tails import Tails
from pegaflow.metrics import Recorder

if TYPE_CHECKING:
    from pegaflow._native import Namespace
    from pegaflow.connector.peer_watch import WatchedView
    from pegaflow.connector.prefetching import TierView

    Places = Mapping[int, Namespace] | Mapping[int, TierView] | Mapping[int, WatchedView]

PROBE_SECONDS = 0.05
"""For so long the answer to whether others are alive is not asked for again."""


class Waiting:
    """Who waits in one engine, and for how long."""

    def __init__(self, geometry: Geometry, tails: Tails, recorder: Recorder, seconds_max: float) -> None:
        """``seconds_max`` 0: nobody waits."""
        self._geometry = geometry
        self._tails = tails
        self._recorder = recorder
        self._seconds_max = seconds_max
        self._others = False
        self._probe_at = 0.0

    def goes_on(self, state: RequestState, namespaces: "Places", computed_tokens: int) -> bool:
        """Whether a request with ``computed_tokens`` on the device has to ask again later."""
        if not self._seconds_max or state.waited:
            return False
        wanted = self._last_keys(state, computed_tokens)
        # Each of them is looked for, so that peers are asked for all that is missing at once.
        present = [namespaces[group].contains([key])[0] for group, key in wanted]
        complete = all(present)
        now = time.monotonic()
        first = state.waits_since is None
        since = state.waits_since = now if state.waits_since is None else state.waits_since
        if not complete and now - since < self._seconds_max and self._others_live(namespaces, now):
            return True
        state.waited = True
        if not first:
            self._recorder.observe("full_prefix_wait_seconds", now - since)
        if not complete:
            self._recorder.count("full_prefix_incomplete")
        return False

    def _last_keys(self, state: RequestState, computed_tokens: int) -> Iterator[tuple[int, bytes]]:
        """Key of the last block that a hit on the whole prompt needs, by group. What is before it was there first."""
        tail = self._tails.to_load(state)
        if tail is not None:
            yield self._geometry.groups[0].index, tail.key
            return
        tokens = self._geometry.hit_tokens_max(int(state.request.num_prompt_tokens))
        for group in self._geometry.groups:
            blocks = tokens // group.block_tokens + group.extra_blocks
            if tokens > computed_tokens:
                yield group.index, bytes(state.hashes()[blocks * group.hashes_per_block - 1])

    def _others_live(self, namespaces: "Places", now: float) -> bool:
        if now >= self._probe_at:
            self._others = any(namespace.others() for namespace in namespaces.values())
            self._probe_at = now + PROBE_SECONDS
        return self._others
