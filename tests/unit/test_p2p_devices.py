"""RDMA ports as a made-up sysfs tells of them: which are used, in which order, by which GID."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pegaflow.errors import InvalidArgument
from pegaflow.p2p import devices
from pegaflow.p2p.devices import Port, choose, find_ports, parse_nics

LINK_LOCAL = "fe80:0000:0000:0000:0202:c9ff:fe00:0001"
GLOBAL = "fd00:0000:0000:0000:0000:0000:0000:0007"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0002"
NOTHING = "0000:0000:0000:0000:0000:0000:0000:0000"


class Sysfs:
    """A tree that a kernel could have made."""

    def __init__(self, root: Path, nodes: int = 2) -> None:
        self.root = root
        for node in range(nodes):
            far = " ".join("10" if other == node else "21" for other in range(nodes))
            self.put(f"devices/system/node/node{node}/distance", far)
            self.put(f"devices/system/node/node{node}/cpulist", f"{4 * node}-{4 * node + 3}")

    def put(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def roce(self, device: str, gids: list[tuple[str, str]], node: int = 0, mtu: int = 9000, **files: object) -> None:
        """An Ethernet port with ``(type, GID)`` in its table."""
        port = f"class/infiniband/{device}/ports/1"
        given = {"link_layer": "Ethernet", "state": "4: ACTIVE", "rate": "100 Gb/sec (4X EDR)", "lid": "0x0"}
        for name, text in (given | files).items():
            self.put(f"{port}/{name}", text)
        for index, (kind, gid) in enumerate(gids):
            self.put(f"{port}/gids/{index}", gid)
            self.put(f"{port}/gid_attrs/types/{index}", kind)
            self.put(f"{port}/gid_attrs/ndevs/{index}", f"net-{device}")
        self.put(f"class/net/net-{device}/mtu", mtu)
        self.put(f"class/infiniband/{device}/device/numa_node", node)

    def infiniband(self, device: str, ports: int = 1, lid: str = "0x1a", **files: object) -> None:
        """Ports on a fabric."""
        for port in range(1, ports + 1):
            given = {"link_layer": "InfiniBand", "state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "lid": lid}
            for name, text in (given | files).items():
                self.put(f"class/infiniband/{device}/ports/{port}/{name}", text)
            self.put(f"class/infiniband/{device}/ports/{port}/gids/0", LINK_LOCAL)
        self.put(f"class/infiniband/{device}/device/numa_node", -1)

    def ports(self, mtu_bytes: int | None = None) -> list[Port]:
        return find_ports(self.root, lambda device, port: mtu_bytes)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


ROCE = [("IB/RoCE v1", LINK_LOCAL), ("RoCE v2", LINK_LOCAL), ("IB/RoCE v1", IPV4), ("RoCE v2", IPV4)]


def test_host_without_devices_has_no_ports(sysfs: Sysfs) -> None:
    assert sysfs.ports() == []
    assert choose([], None) == []


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        (ROCE, 3),
        ([("RoCE v2", LINK_LOCAL), ("RoCE v2", GLOBAL), ("RoCE v2", NOTHING), ("RoCE v2", IPV4)], 3),
        ([("RoCE v2", LINK_LOCAL), ("RoCE v2", GLOBAL)], 1),
        ([("IB/RoCE v1", IPV4), ("RoCE v2", LINK_LOCAL)], 1),
        ([("RoCE v2", "what is this")], 0),
        ([("RoCE v2", IPV4)] * 12, 0),
    ],
)
def test_roce_goes_by_the_best_gid_of_version_two(sysfs: Sysfs, gids: list[tuple[str, str]], index: int) -> None:
    sysfs.roce("mlx5_0", gids)
    (port,) = sysfs.ports()
    assert (port.gid_index, port.gid, port.problem) == (index, gids[index][1], None)


@pytest.mark.parametrize("gids", [[], [("IB/RoCE v1", IPV4)], [("RoCE v2", NOTHING)]])
def test_port_without_such_a_gid_is_not_used(sysfs: Sysfs, gids: list[tuple[str, str]]) -> None:
    sysfs.roce("mlx5_0", gids)
    (port,) = sysfs.ports()
    assert port.problem is not None
    assert "RoCEv2" in port.problem
    assert choose([port], None) == []


@pytest.mark.parametrize(("net", "path"), [(9000, 4096), (4192, 4096), (4191, 2048), (1500, 1024), (300, 256)])
def test_path_mtu_fits_into_that_of_the_network(sysfs: Sysfs, net: int, path: int) -> None:
    sysfs.roce("rxe0", ROCE, mtu=net)
    assert sysfs.ports()[0].mtu_bytes == path
    assert sysfs.ports(mtu_bytes=512)[0].mtu_bytes == 512, "the device knows better"


def test_infiniband_goes_by_lid(sysfs: Sysfs) -> None:
    sysfs.infiniband("mlx5_3", ports=2)
    ports = sysfs.ports()
    assert [(port.name, port.lid, port.mtu_bytes, port.node, port.problem) for port in ports] == [
        ("mlx5_3:1", 0x1A, 2048, None, None),
        ("mlx5_3:2", 0x1A, 2048, None, None),
    ]
    assert sysfs.ports(mtu_bytes=4096)[0].mtu_bytes == 4096


def test_ports_that_are_down_or_have_no_manager_are_not_used(sysfs: Sysfs) -> None:
    sysfs.infiniband("mlx5_1", lid="0x0")
    sysfs.infiniband("mlx5_2", state="1: DOWN")
    sysfs.roce("mlx5_4", ROCE, state="2: INIT")
    assert [port.problem is not None for port in sysfs.ports()] == [True] * 3
    assert choose(sysfs.ports(), None) == []


def test_nearest_ports_come_first_and_order_is_by_number_else(sysfs: Sysfs) -> None:
    for number, node in ((10, 0), (2, 1), (0, 1), (1, 0)):
        sysfs.roce(f"mlx5_{number}", ROCE, node=node)
    names = [port.device for port in sysfs.ports()]
    assert names == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_10"]
    assert [port.device for port in choose(sysfs.ports(), None, 0, sysfs.root)] == [
        "mlx5_1", "mlx5_10", "mlx5_0", "mlx5_2",
    ]  # fmt: skip
    assert [port.device for port in choose(sysfs.ports(), None, 1, sysfs.root)][:2] == ["mlx5_0", "mlx5_2"]
    assert [port.device for port in choose(sysfs.ports(), None, None, sysfs.root)] == names


def test_host_with_one_node_has_no_near_ones(tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path, nodes=1)
    sysfs.roce("mlx5_0", ROCE)
    assert sysfs.ports()[0].node is None


def test_named_ports_are_used_in_their_order(sysfs: Sysfs) -> None:
    sysfs.infiniband("mlx5_0", ports=2)
    sysfs.roce("mlx5_1", ROCE)
    ports = sysfs.ports()
    assert [port.name for port in choose(ports, ("mlx5_1", "mlx5_0:2"))] == ["mlx5_1:1", "mlx5_0:2"]
    assert [port.name for port in choose(ports, ("mlx5_0", "mlx5_0:1"))] == ["mlx5_0:1", "mlx5_0:2"]
    assert choose(ports, ()) == []


@pytest.mark.parametrize("name", ["mlx5_7", "mlx5_0:2"])
def test_named_port_that_is_not_there_is_an_error(sysfs: Sysfs, name: str) -> None:
    sysfs.roce("mlx5_0", ROCE)
    with pytest.raises(InvalidArgument, match=f"{name} .*is not there .*mlx5_0:1"):
        choose(sysfs.ports(), (name,))


def test_named_port_that_is_down_costs_a_line_in_the_log_and_no_start(
    sysfs: Sysfs, caplog: pytest.LogCaptureFixture
) -> None:
    """A link that flaps while an engine starts must not end it."""
    sysfs.roce("mlx5_0", ROCE)
    sysfs.roce("down", ROCE, state="1: DOWN")
    sysfs.roce("bare", [])
    assert [port.name for port in choose(sysfs.ports(), ("down", "mlx5_0", "bare"))] == ["mlx5_0:1"]
    assert choose(sysfs.ports(), ("down:1",)) == []
    lines = [record.getMessage() for record in caplog.records]
    assert [" ".join(line.split()[3:5]) for line in lines] == ["down of", "bare of", "down:1 of"]
    assert all("left out" in line for line in lines)
    assert "link is down" in lines[0]
    assert "GID" in lines[1]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("none", ()),
        ("mlx5_0", ("mlx5_0",)),
        ("mlx5_0:1, mlx5_1", ("mlx5_0:1", "mlx5_1")),
        (["mlx5_0", "rxe0:1"], ("mlx5_0", "rxe0:1")),
    ],
)
def test_names_of_ports(value: object, names: tuple[str, ...]) -> None:
    assert parse_nics(value, "x") == names


@pytest.mark.parametrize(
    "value", ["", [], None, 3, "mlx5_0,none", "mlx5_0,mlx5_0", "a/b", "mlx5_0:", [1], [f"n{n}" for n in range(17)]]
)
def test_what_is_no_name_of_a_port_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"^pegaflow\.nics must"):
        parse_nics(value, "pegaflow.nics")


def test_nonsense_in_sysfs_is_survived(sysfs: Sysfs) -> None:
    sysfs.roce("mlx5_0", ROCE, node=0, lid="what", state="")
    sysfs.put("class/infiniband/mlx5_0/device/numa_node", "far")
    sysfs.put("class/net/net-mlx5_0/mtu", "large")
    sysfs.put("class/infiniband/empty/node_guid", "0")
    sysfs.put("devices/system/node/node0/distance", "near")
    (port,) = sysfs.ports()
    assert (port.lid, port.node, port.mtu_bytes) == (0, None, 1024)
    assert port.problem is not None
    assert choose([port], None, 0, sysfs.root) == []


def test_process_that_is_bound_to_a_node_is_near_it(sysfs: Sysfs, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpus, node in (({5, 6}, 1), ({0}, 0), ({3, 4}, None), ({64}, None)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cpus=cpus: cpus)
        assert devices.own_node(sysfs.root) == node


@pytest.mark.parametrize(("active", "mtu_bytes"), [(5, 4096), (1, 256), (0, None), (6, None)])
def test_verbs_are_asked_where_they_are(monkeypatch: pytest.MonkeyPatch, active: int, mtu_bytes: int | None) -> None:
    class Context:
        def __init__(self, name: str) -> None:
            assert name == "mlx5_0"

        def __enter__(self) -> "Context":
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def query_port(self, port: int) -> Any:
            return SimpleNamespace(active_mtu=active)

    module = ModuleType("pyverbs.device")
    module.Context = Context  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyverbs", ModuleType("pyverbs"))
    monkeypatch.setitem(sys.modules, "pyverbs.device", module)
    assert devices._verbs_mtu("mlx5_0", 1) == mtu_bytes


def test_without_verbs_sysfs_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    assert devices._verbs_mtu("mlx5_0", 1) is None
