"""Loads that vLLM goes on with before they are over, as the scheduler sees them.

Such a load is landing from the moment that vLLM counts its tokens as computed until every rank has reported it. Its
slots stay leased and its blocks are held in vLLM's block pool for so long: whatever becomes of the request, nobody gets
blocks that a copy may still write. A load that has failed on one rank before vLLM went on, so that vLLM knows, lands
like others; one that fails later ends the engine (see ``guard.MustStop``).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pegaflow.connector.metadata import LoadOutcome
from pegaflow.connector.pins import Pins
from pegaflow.connector.request_state import Offer, Phase, RequestState, RequestTable


@dataclass
class Landing:
    """One load that vLLM goes on with."""

    state: RequestState
    offer: Offer
    refs: list[int]
    held: list[Any]
    outcome: LoadOutcome | None


class Landings:
    """All of them, and which loads may become one."""

    def __init__(self, table: RequestTable, pins: Pins, ranks: int, mode: str, possible: bool) -> None:
        """``mode``: one of ``config.LAYERWISE``. ``possible``: whether vLLM names layers before it runs them."""
        self._table = table
        self._pins = pins
        self._ranks = ranks
        self._mode = mode if possible else "off"
        self._open: dict[str, Landing] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def request_ids(self) -> Collection[str]:
        """Requests whose loads are landing."""
        return self._open.keys()

    def under(self, tables: Sequence[Sequence[int]]) -> set[str]:
        """Requests whose loads may still write some of these blocks."""
        if not self._open:
            return set()
        blocks = {block for table in tables for block in table}
        return {
            request_id
            for request_id, landing in self._open.items()
            if any(block.block_id in blocks for block in landing.held)
        }

    def hold(self, state: RequestState, block_ids: list[int]) -> bool:
        """Whether the load that is about to start may be followed; then its blocks are held from now on.

        With ``auto`` only one on which everything waits: a forward pass behind a load would hold up whoever else runs.
        """
        if self._mode == "off" or not self._pins.bound or not block_ids:
            return False
        if self._mode == "auto" and (self._open or any(map(_is_busy, (s for s in self._table if s is not state)))):
            return False
        state.held = self._pins.hold(block_ids)
        return True

    def begin(self, state: RequestState, offer: Offer, refs: list[int]) -> Landing | None:
        """vLLM goes on with ``state``. Returns the load if it is over, else keeps it until it is."""
        held, state.held = state.held, []
        landing = Landing(state, offer, refs, held, state.load_outcome)
        if not held or self._is_over(landing):
            return landing
        self._open[state.request.request_id] = landing
        return None

    def reported(self, request_id: str, outcome: LoadOutcome) -> Landing | None:
        """Some ranks report a load. Returns it if all have."""
        landing = self._open[request_id]
        landing.outcome = landing.outcome.merge(outcome) if landing.outcome else outcome
        return self._open.pop(request_id) if self._is_over(landing) else None

    def let_go(self, landing: Landing) -> None:
        """The load is over: its blocks need not be held any more."""
        self._pins.let_go(landing.held)

    def _is_over(self, landing: Landing) -> bool:
        return landing.outcome is not None and landing.outcome.ranks >= self._ranks


def _is_busy(state: RequestState) -> bool:
    return state.phase in (Phase.LOADING, Phase.ORPHANED) or state.computed_seen > 0
