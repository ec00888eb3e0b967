"""The ends of connections to other hosts: made with the pool, closed with the engine, and never in its way."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pegaflow.config import ConnectorConfig
from pegaflow.connector import peer_report
from pegaflow.connector.peer_link import PeerLink, PeerTypes
from pegaflow.connector.peer_report import PeerReport
from pegaflow.errors import InvalidArgument, PoolBusy
from pegaflow.metrics import Recorder
from pegaflow.p2p import addresses
from pegaflow.p2p.devices import Port
from tests.fakes import FakePool
from tests.unit.mini_engine import MiniEngine

TOKEN = "0123456789abcdef"
PORT = Port("mlx5_0", 1, "Ethernet", 3, "", 0, 4096, 1, "100 Gb/sec", None)
DOWN = Port("mlx5_1", 1, "Ethernet", 3, "", 0, 4096, 1, "100 Gb/sec", "the link is down")


class Parts:
    """Stands for all native classes, and remembers what was made of them."""

    def __init__(self, *ports: Port) -> None:
        self.made: list[str] = []
        self.arguments: dict[str, Any] = {}
        self.open: list[str] = []
        self.told: list[list[str]] = []
        self.was_told = threading.Event()
        self.fails: dict[str, Exception] = {}
        self.server_facts: dict[str, Any] = {"serving": True, "problem": None, "sessions": 2, "leased_bytes": 7}
        self.peer_facts: list[dict[str, Any]] = []
        self.types = PeerTypes(
            self._make("server"), self._make("client"), lambda *nic: nic, self._make("directory"), lambda: list(ports)
        )

    def _make(self, kind: str) -> Any:
        parts = self

        class Part:
            def __init__(self, *arguments: Any, **options: Any) -> None:
                if kind in parts.fails:
                    raise parts.fails[kind]
                parts.made.append(kind)
                parts.open.append(kind)
                parts.arguments[kind] = (arguments, options)

            def facts(self) -> Any:
                return parts.server_facts if kind == "server" else parts.peer_facts

            def set_addresses(self, hosts: Sequence[str]) -> None:
                parts.told.append(list(hosts))
                parts.was_told.set()

            def close(self) -> None:
                parts.open.remove(kind)

        return Part


def config(**options: Any) -> ConnectorConfig:
    return ConnectorConfig(peer_token=TOKEN, **options)


def test_engine_that_was_not_told_of_peers_has_none() -> None:
    parts = Parts(PORT)
    link = PeerLink(ConnectorConfig(), parts.types)
    link.open(FakePool())  # type: ignore[arg-type]
    assert (link.client, link.server, parts.made) == (None, None, [])


def test_pool_is_served_and_peers_are_asked() -> None:
    parts = Parts(PORT, DOWN)
    pool: Any = FakePool()
    link = PeerLink(config(peers=("10.0.0.2:7",), peer_listen="10.0.0.1:7", qps_per_peer=3), parts.types)
    link.open(pool)
    shared = {"token": TOKEN, "tls": None, "nics": [("mlx5_0", 1, 3, 4096, 1)]}
    assert parts.arguments["server"] == ((pool, "10.0.0.1:7"), shared)
    assert parts.arguments["client"] == ((pool, ["10.0.0.2:7"]), shared | {"qps_per_peer": 3})
    link.close()
    link.close()
    assert parts.open == []
    link.open(pool)
    assert len(parts.made) == 2, "a pool that opens after the end is not served"


def test_engine_that_only_saves_serves_and_asks_nobody() -> None:
    parts = Parts()
    link = PeerLink(config(mode="save_only", peers=("10.0.0.2:7",), peer_listen="10.0.0.1:7"), parts.types)
    link.open(FakePool())  # type: ignore[arg-type]
    assert parts.made == ["server"]
    assert link.client is None


def test_without_rdma_the_kernel_is_not_asked_for_ports() -> None:
    parts = Parts(PORT)
    link = PeerLink(config(peers=("10.0.0.2:7",), nics=()), parts.types)
    link.open(FakePool())  # type: ignore[arg-type]
    assert parts.arguments["client"][1]["nics"] == []
    with pytest.raises(InvalidArgument, match=r"mlx5_2 .* is not there"):
        PeerLink(config(peers=("10.0.0.2:7",), nics=("mlx5_2",)), Parts(PORT, DOWN).types)


def test_named_port_that_is_down_is_left_out() -> None:
    parts = Parts(PORT, DOWN)
    link = PeerLink(config(peers=("10.0.0.2:7",), nics=("mlx5_1",)), parts.types)
    link.open(FakePool())  # type: ignore[arg-type]
    assert parts.arguments["client"][1]["nics"] == []


@pytest.mark.parametrize("kind", ["server", "client"])
def test_options_that_cannot_be_are_raised_and_other_failures_are_said(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    both = config(peers=("10.0.0.2:7",), peer_listen="10.0.0.1:7")
    parts = Parts()
    parts.fails[kind] = PoolBusy("too many servers")
    link = PeerLink(both, parts.types)
    with caplog.at_level("WARNING", "vllm.pegaflow"):
        link.open(FakePool())  # type: ignore[arg-type]
    assert "too many servers" in caplog.text
    assert (link.client, link.server, parts.open) == (None, None, [])
    parts.fails[kind] = InvalidArgument("no such address")
    with pytest.raises(InvalidArgument):
        PeerLink(both, parts.types).open(FakePool())  # type: ignore[arg-type]
    assert parts.open == []


def test_hosts_behind_a_name_are_told_when_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts()
    link = PeerLink(config(peers=("10.0.0.2:7", "kv:8")), parts.types)
    found = [("", "", "", "", ("10.0.0.3", 8)), ("", "", "", "", ("10.0.0.4", 8))]
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda host, port, **options: found)
    link.open(FakePool())  # type: ignore[arg-type]
    assert parts.was_told.wait(240)
    assert parts.told == [["10.0.0.2:7", "10.0.0.3:8", "10.0.0.4:8"]]
    link.close()
    link._tell(["10.0.0.9:1"])
    assert len(parts.told) == 1, "nothing is told after the end"


def peer(address: str, state: str, problem: str | None = None) -> dict[str, Any]:
    numbers = {"bytes_fetched": 1_000, "queued_bytes": 10, "blocks_corrupt": 1}
    return {"address": address, "state": state, "problem": problem, **numbers}


def test_metrics_and_log_say_how_peers_are(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_report, "INTERVAL_SECONDS", 0.0)
    parts = Parts()
    link = PeerLink(config(peers=("10.0.0.2:7",), peer_listen="10.0.0.1:7"), parts.types)
    recorder, report = Recorder(), PeerReport()
    report.observe(link, recorder)
    assert recorder.take() is None, "no pool yet"
    link.open(FakePool())  # type: ignore[arg-type]
    parts.peer_facts = [peer("a:1", "unknown"), peer("b:1", "up"), peer("c:1", "backing off", "it refuses")]
    with caplog.at_level("INFO", "vllm.pegaflow"):
        for _ in range(3):
            report.observe(link, recorder)
        parts.peer_facts = [peer("a:1", "up"), peer("b:1", "backing off", "gone"), peer("c:1", "up")]
        parts.server_facts |= {"serving": False, "problem": "no such address here"}
        for _ in range(3):
            report.observe(link, recorder)
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "c:1" in line] == [
        "PegaFlow: the peer c:1 is left alone for a while: it refuses",
        "PegaFlow: the peer c:1 is back.",
    ]
    assert [line for line in lines if "b:1" in line] == ["PegaFlow: the peer b:1 is left alone for a while: gone"]
    assert sum("no such address here" in line for line in lines) == 1
    assert recorder.gauges == {
        "peers_up": 2, "peers_failing": 1, "peer_serving": 0, "peer_sessions": 2, "peer_leased_bytes": 7,
        "peer_sent_bytes": 0, "peer_read_bytes": 3_000, "peer_queued_bytes": 30, "peer_corrupt_blocks": 3,
    }  # fmt: skip


def test_state_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_report, "INTERVAL_SECONDS", 1_000.0)
    parts = Parts()
    link = PeerLink(config(peers=("10.0.0.2:7",)), parts.types)
    link.open(FakePool())  # type: ignore[arg-type]
    recorder, report = Recorder(), PeerReport()
    report.observe(link, recorder)
    parts.peer_facts = [peer("a:1", "up")]
    report.observe(link, recorder)
    assert recorder.gauges["peers_up"] == 0


def test_engine_leaves_its_peers_when_it_shuts_down(tmp_path: Path) -> None:
    parts = Parts()
    link = PeerLink(config(peers=("10.0.0.2:7",), peer_listen="10.0.0.1:7"), parts.types)
    engine = MiniEngine()
    engine.scheduler._link = link
    link.open(engine.pool)
    engine.scheduler.shutdown()
    assert parts.open == []
    assert engine.pool.closed
