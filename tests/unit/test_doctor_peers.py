"""What ``pegaflow doctor`` says about RDMA ports and the options of peers."""

from pathlib import Path
from typing import Any

import pytest

from pegaflow.cli import checks_peers
from pegaflow.cli.finding import ERROR, INFO, OK, WARNING, Finding
from pegaflow.cli.host import bind_problem
from pegaflow.config import _OPTIONS
from pegaflow.errors import InvalidArgument, PoolRefused
from tests.unit.made_up_host import MadeUpHost, made_up_host

TOKEN = "0123456789abcdef-secret"
DEVICE = "/sys/class/infiniband/mlx5_0"


@pytest.fixture
def host(tmp_path: Path) -> MadeUpHost:
    return made_up_host(tmp_path)


def rdma(host: MadeUpHost) -> Finding:
    return checks_peers.rdma(host, lambda device, port: 4096)


def test_rdma_ports_are_described(host: MadeUpHost) -> None:
    assert rdma(host).level == INFO
    host.put(f"{DEVICE}/ports/1/state", "1: DOWN\n")
    host.put(f"{DEVICE}/ports/1/rate", "400 Gb/sec (4X NDR)\n")
    host.put(f"{DEVICE}/ports/1/link_layer", "InfiniBand\n")
    host.put(f"{DEVICE}/ports/1/lid", "0x7\n")
    host.put(f"{DEVICE}/device/numa_node", "1\n")
    for node in range(2):
        host.put(f"/sys/devices/system/node/node{node}/cpulist", "0\n")
    assert "/dev/infiniband" in rdma(host).advice
    host.put("/dev/infiniband/uverbs0")
    assert "No port can be used" in rdma(host).advice
    host.put(f"{DEVICE}/ports/1/state", "4: ACTIVE\n")
    finding = rdma(host)
    assert finding.level == OK
    assert finding.value == "mlx5_0:1 (InfiniBand 400 Gb/sec (4X NDR) numa 1; LID 7, MTU 4096)"


def test_port_without_an_address_is_said_to_be_of_no_use(host: MadeUpHost) -> None:
    for name, text in {"state": "4: ACTIVE", "rate": "25 Gb/sec", "link_layer": "Ethernet"}.items():
        host.put(f"{DEVICE}/ports/1/{name}", text)
    host.put("/dev/infiniband/uverbs0")
    finding = rdma(host)
    assert finding.level == WARNING
    assert "mlx5_0:1 (Ethernet 25 Gb/sec; not used: it has no RoCEv2 GID" in finding.value


def peers(host: MadeUpHost, problem: str | None = None, **environ: str) -> Finding:
    given: Any = host.environ
    given.update({f"PEGAFLOW_{name.upper()}": text for name, text in environ.items()})
    return checks_peers.peers(host, lambda ip: problem, asked_directory)


def asked_directory(url: str) -> tuple[str, str | None]:
    """What is said of a directory: hosts whose name begins with "down" do not answer."""
    shown = url.replace("user:hidden@", "")
    if "none" in url:
        raise InvalidArgument("the directory's URL names 2 hosts: write redis://host:port/db")
    if "unknown" in url:
        raise PoolRefused("No pool can be made here.")
    return shown, "the directory at down:6379 does not answer" if "down" in url else None


def test_all_options_of_peers_are_looked_at() -> None:
    of_peers = {name for name in _OPTIONS if name.startswith("peer")} | {"directory", "nics", "qps_per_peer"}
    assert {name.lower() for name in checks_peers.OPTIONS} == {*of_peers, "peer_token"}


@pytest.mark.parametrize(
    ("environ", "value"),
    [
        ({}, "serves nobody, asks who has what in the directory redis://kv:6379/0, token without TLS"),
        (
            {"peers": "10.0.0.2:7"},
            "serves nobody, asks 10.0.0.2:7, who has what in the directory redis://kv:6379/0, token without TLS",
        ),
        (
            {"peer_listen": "10.0.0.1:7"},
            "serves 10.0.0.1:7, asks who has what in the directory redis://kv:6379/0, token without TLS",
        ),
    ],
)
def test_a_directory_is_asked_whatever_else_is_set(host: MadeUpHost, environ: dict[str, str], value: str) -> None:
    finding = peers(host, directory="redis://user:hidden@kv:6379/0", peer_token=TOKEN, **environ)
    assert (finding.level, finding.value) == (OK, value)
    assert "hidden" not in repr(finding)


@pytest.mark.parametrize(
    ("name", "level", "says"),
    [
        ("down", WARNING, "the directory at down:6379 does not answer. Until it answers"),
        ("unknown", WARNING, "it could not be tried: No pool can be made here."),
        ("none", ERROR, "names 2 hosts"),
    ],
)
def test_a_directory_that_does_not_answer_is_told_without_its_password(
    host: MadeUpHost, name: str, level: str, says: str
) -> None:
    finding = peers(host, directory=f"redis://user:hidden@{name}:6379/0", peer_token=TOKEN)
    assert finding.level == level
    assert says in finding.advice
    assert "hidden" not in repr(finding)


def test_peers_are_optional(host: MadeUpHost) -> None:
    assert peers(host).level == INFO
    assert peers(host, peer_token="whatever").level == INFO


def test_sound_options_are_shown_without_the_token(host: MadeUpHost) -> None:
    finding = peers(host, peers="10.0.0.2:7,kv:7", peer_listen="10.0.0.1:7", peer_token=TOKEN)
    assert finding.level == OK
    assert finding.value == "serves 10.0.0.1:7, asks 10.0.0.2:7, kv:7, token without TLS"
    assert "secret" not in repr(finding)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"peers": "10.0.0.2:7"}, "peer_token_file"),
        ({"peers": "10.0.0.2", "peer_token": TOKEN}, "PEGAFLOW_PEERS must"),
        ({"peer_listen": "0.0.0.0:7", "peer_token": TOKEN}, "PEGAFLOW_PEER_LISTEN must"),
        ({"peers": "h:1", "peer_token": "short"}, "visible ASCII"),
        ({"directory": "http://user:secret@h", "peer_token": TOKEN}, "PEGAFLOW_DIRECTORY must"),
        ({"directory": "redis://h"}, "PEGAFLOW_DIRECTORY needs"),
    ],
)
def test_options_that_cannot_be_are_an_error(host: MadeUpHost, environ: dict[str, str], says: str) -> None:
    finding = peers(host, **environ)
    assert finding.level == ERROR
    assert says in finding.advice


def test_address_that_is_not_of_this_host_is_an_error(host: MadeUpHost) -> None:
    finding = peers(host, "Cannot assign requested address", peer_listen="192.0.2.1:7", peer_token=TOKEN)
    assert finding.level == ERROR
    assert "Cannot assign" in finding.advice


def test_secret_that_others_can_read_is_a_warning(host: MadeUpHost, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o644)
    finding = peers(host, peers="h:1", peer_token_file=str(path))
    assert finding.level == WARNING
    assert "chmod 600" in finding.advice
    path.chmod(0o600)
    assert peers(host).level == OK


def test_whether_an_address_is_of_this_host_is_found_out() -> None:
    assert bind_problem("127.0.0.1") is None
    assert bind_problem("192.0.2.1") is not None  # of documents, and of no host
