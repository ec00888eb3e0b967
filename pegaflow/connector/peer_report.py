"""Peers in the log and in the metrics of one engine."""

import time
from collections.abc import Mapping
from typing import Any

from pegaflow.connector.log import logger
from pegaflow.connector.peer_link import PeerLink
from pegaflow.metrics import Recorder

INTERVAL_SECONDS = 1.0
"""Pause between two looks."""

SUMS = {
    "peer_read_bytes": "bytes_fetched",
    "peer_queued_bytes": "queued_bytes",
    "peer_corrupt_blocks": "blocks_corrupt",
}
"""Numbers of all peers, and of which of ``Peers.facts`` each is the sum."""

SAID_MAX = 256
"""Peers whose state is remembered."""


class PeerReport:
    """What one engine says of its peers."""

    def __init__(self) -> None:
        self._next_look = 0.0
        self._said: dict[str, str | None] = {}

    def observe(self, link: PeerLink, recorder: Recorder, *, at_rest: bool = False) -> None:
        """Look, unless it is too early. ``at_rest``: this step may be the last one for hours, so it is not."""
        now = time.monotonic()
        client, server = link.client, link.server
        if (now < self._next_look and not at_rest) or (client is None and server is None):
            return
        self._next_look = now + INTERVAL_SECONDS
        if server is not None:
            self._serves(server.facts(), recorder)
        if client is not None:
            peers = client.facts()
            recorder.gauge("peers_up", sum(peer["state"] == "up" for peer in peers))
            recorder.gauge("peers_failing", sum(peer["state"] == "backing off" for peer in peers))
            for key, source in SUMS.items():
                recorder.gauge(key, sum(int(peer[source]) for peer in peers))
            for peer in peers[:SAID_MAX]:
                self._say_state(peer)

    def _serves(self, facts: Mapping[str, Any], recorder: Recorder) -> None:
        recorder.gauge("peer_serving", int(facts["serving"]))
        recorder.gauge("peer_sessions", int(facts["sessions"]))
        recorder.gauge("peer_leased_bytes", int(facts["leased_bytes"]))
        recorder.gauge("peer_sent_bytes", int(facts.get("bytes_sent", 0)))  # while it serves
        if self._changed("", facts["problem"]) and facts["problem"] is not None:
            logger.warning("PegaFlow: this process cannot serve peers: %s", facts["problem"])

    def _say_state(self, peer: Mapping[str, Any]) -> None:
        address, problem = str(peer["address"]), peer["problem"]
        first = address not in self._said
        if peer["state"] == "unknown" or not self._changed(address, problem):
            return
        if problem is not None:
            logger.warning("PegaFlow: the peer %s is left alone for a while: %s", address, problem)
        elif not first:
            logger.info("PegaFlow: the peer %s is back.", address)

    def _changed(self, about: str, now: str | None) -> bool:
        if about in self._said and self._said[about] == now:
            return False
        if len(self._said) >= SAID_MAX:
            self._said.clear()
        self._said[about] = now
        return True
