"""RDMA ports of this host: which can be used, by which GID, how near.

The kernel tells nearly all of it in sysfs. What it does not (the path MTU of an InfiniBand port) is asked of pyverbs
where that can be imported.
"""

import ipaddress
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pegaflow.errors import InvalidArgument

logger = logging.getLogger("pegaflow")

SYSFS = Path("/sys")
PORTS_MAX = 16
"""Ports of one process; more are left out."""

GIDS_MAX = 256
"""Entries of a port's table that are looked at."""

ETHERNET, INFINIBAND = "Ethernet", "InfiniBand"
ROCE_V2 = "RoCE v2"
MTUS_BYTES = (4096, 2048, 1024, 512, 256)
ROCE_HEADER_BYTES = 96
"""What the kernel sets aside in a packet of the network for the longest headers of RoCE."""

INFINIBAND_MTU_BYTES = 2048
"""What every fabric carries."""

DISTANCE_UNKNOWN = 1_000

_NIC = re.compile(r"([A-Za-z0-9_.-]{1,63})(?::([0-9]{1,3}))?")
_ZERO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"

AskMtu = Callable[[str, int], int | None]
"""Bytes of the path MTU of a device's port; ``None`` if that cannot be told."""


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device."""

    device: str
    port: int
    link_layer: str
    """``"Ethernet"`` (RoCE) or ``"InfiniBand"``."""
    gid_index: int
    """Of the GID to use; 0 on InfiniBand, where peers go by ``lid``."""
    gid: str
    lid: int
    mtu_bytes: int
    node: int | None
    """NUMA node that the device hangs on; ``None`` if unknown, or there is but one."""
    rate: str
    """As the kernel writes it."""
    problem: str | None
    """Why it cannot be used, in a few words; ``None`` if it can."""

    @property
    def name(self) -> str:
        """As it is written in ``pegaflow.nics``."""
        return f"{self.device}:{self.port}"


def parse_nics(value: Any, name: str) -> tuple[str, ...]:
    """``"none"``, ``"mlx5_0"``, ``"mlx5_0:1,mlx5_1:1"`` or a list of such names; empty stands for ``"none"``. Raises
    ``InvalidArgument``."""
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not 1 <= len(given) <= PORTS_MAX:
        raise InvalidArgument(f'{name} must be "none", "mlx5_0", "mlx5_0:1" or a list of ports, not {value!r}.')
    names = tuple(one.strip() if isinstance(one, str) else "" for one in given)
    if names == ("none",):
        return ()
    if "none" in names or len(set(names)) < len(names) or not all(_NIC.fullmatch(one) for one in names):
        raise InvalidArgument(
            f'{name} must name each port once, such as "mlx5_0" or "mlx5_0:1", or be "none" for TCP only, '
            f"not {value!r}."
        )
    return names


def find_ports(sysfs: Path = SYSFS, ask_mtu: AskMtu | None = None) -> list[Port]:
    """All ports of all RDMA devices, by name. Empty where the kernel has none."""
    base = sysfs / "class/infiniband"
    several = len(_names(sysfs / "devices/system/node", "node")) > 1
    ask = ask_mtu or _verbs_mtu
    ports = []
    for device in _names(base):
        node = _number(base / device / "device/numa_node")
        near = node if several and node is not None and node >= 0 else None
        for port in _names(base / device / "ports"):
            if port.isdecimal():
                ports.append(_port(sysfs, base / device / "ports" / port, device, int(port), near, ask))
    return ports


def choose(
    ports: Sequence[Port], wanted: Sequence[str] | None, near: int | None = None, sysfs: Path = SYSFS
) -> list[Port]:
    """The ports to use: all that can be (``wanted`` ``None``), nearest to NUMA node ``near`` first, or those that are
    named, in their order. One that is named and cannot be used now, its link being down say, is left out with a line in
    the log. Raises ``InvalidArgument`` for a name that there is not."""
    if wanted is None:
        usable = [port for port in ports if port.problem is None]
        distances = _distances(sysfs, near)
        return sorted(usable, key=lambda port: distances(port.node))[:PORTS_MAX]
    chosen: dict[str, Port] = {}
    for name in wanted:
        named = [port for port in ports if name in (port.device, port.name)]
        if not named:
            there = ", ".join(port.name for port in ports) or "none at all"
            raise InvalidArgument(
                f"The port {name} of pegaflow.nics is not there (there is {there}): "
                'name others, or "none" for TCP only.'
            )
        fit = [port for port in named if port.problem is None]
        if not fit:
            logger.warning(
                "PegaFlow: the port %s of pegaflow.nics is left out until this process starts again: %s.",
                name,
                named[0].problem,
            )
        chosen |= {port.name: port for port in fit}
    return list(chosen.values())[:PORTS_MAX]


def own_node(sysfs: Path = SYSFS) -> int | None:
    """The NUMA node that this process is bound to; ``None`` if it may run on several."""
    allowed = os.sched_getaffinity(0)
    nodes = _names(sysfs / "devices/system/node", "node")
    own = [node for node in nodes if allowed & _cpus(sysfs / "devices/system/node" / node / "cpulist")]
    return int(own[0][4:]) if len(own) == 1 and len(nodes) > 1 else None


def _port(sysfs: Path, path: Path, device: str, port: int, node: int | None, ask: AskMtu) -> Port:
    link = _text(path / "link_layer") or "unknown"
    lid = _number(path / "lid") or 0
    problem = None
    if (_text(path / "state") or "").rpartition(": ")[2] != "ACTIVE":
        problem = "the link is down"
    if link == INFINIBAND:
        gid_index, gid = 0, _text(path / "gids/0") or _ZERO_GID
        mtu_bytes = ask(device, port) or INFINIBAND_MTU_BYTES
        problem = problem or (None if lid else "the subnet manager has given it no LID")
    else:
        gid_index, gid = _roce_gid(path)
        net = _text(path / f"gid_attrs/ndevs/{gid_index}") or ""
        mtu_bytes = ask(device, port) or _roce_mtu(_number(sysfs / "class/net" / net / "mtu") if net else None)
        known = link == ETHERNET and gid_index >= 0
        problem = problem or (None if known else "it has no RoCEv2 GID; has its network interface an address?")
    rate = _text(path / "rate") or "unknown rate"
    return Port(device, port, link, max(0, gid_index), gid, lid, mtu_bytes, node, rate, problem)


def _roce_gid(path: Path) -> tuple[int, str]:
    """``(index, GID)``: of RoCEv2, of an IPv4 address rather than a global IPv6 one, and of that rather than one of the
    link; ``(-1, "")`` if there is none."""
    found = []
    indexes = sorted(int(one) for one in _names(path / "gids") if one.isdecimal())
    for index in indexes[:GIDS_MAX]:
        gid = _text(path / f"gids/{index}")
        if gid and gid != _ZERO_GID and _text(path / f"gid_attrs/types/{index}") == ROCE_V2:
            found.append((_rank(gid), index, gid))
    return min(found)[1:] if found else (-1, "")


def _rank(gid: str) -> int:
    try:
        ip = ipaddress.IPv6Address(gid)
    except ValueError:
        return 3
    return 0 if ip.ipv4_mapped else 2 if ip.is_link_local else 1


def _roce_mtu(net_bytes: int | None) -> int:
    room = (net_bytes or 1500) - ROCE_HEADER_BYTES
    return next((mtu for mtu in MTUS_BYTES if mtu <= room), MTUS_BYTES[-1])


def _verbs_mtu(device: str, port: int) -> int | None:
    try:
        from pyverbs.device import Context

        with Context(name=device) as context:
            active = int(context.query_port(port).active_mtu)
    except Exception:  # absent, of another rdma-core, or the device may not be opened: sysfs has to do
        return None
    return 128 << active if 1 <= active <= len(MTUS_BYTES) else None


def _distances(sysfs: Path, near: int | None) -> Callable[[int | None], int]:
    text = _text(sysfs / f"devices/system/node/node{near}/distance") if near is not None else None
    try:
        distances = [int(one) for one in (text or "").split()]
    except ValueError:
        distances = []

    def distance(node: int | None) -> int:
        return distances[node] if node is not None and node < len(distances) else DISTANCE_UNKNOWN

    return distance


def _cpus(path: Path) -> set[int]:
    try:
        ranges = [part.partition("-") for part in (_text(path) or "").split(",") if part]
        return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
    except ValueError:
        return set()


def _names(path: Path, prefix: str = "") -> list[str]:
    try:
        found = [one.name for one in path.iterdir() if one.name.startswith(prefix)]
    except OSError:
        return []
    wanted = [one for one in found if not prefix or one[len(prefix) :].isdecimal()]
    return sorted(wanted, key=lambda one: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", one)])


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None


def _number(path: Path) -> int | None:
    try:
        return int(_text(path) or "", 0)
    except ValueError:
        return None
