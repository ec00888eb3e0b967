"""What ``doctor`` asks about other hosts: RDMA ports, and the options of peers in the environment."""

from collections.abc import Callable
from typing import Any

from pegaflow.cli.finding import ERROR, INFO, OK, WARNING, Finding
from pegaflow.cli.host import Host
from pegaflow.cli.output import printable
from pegaflow.config import parse_config
from pegaflow.errors import InvalidArgument, PegaFlowError
from pegaflow.p2p import devices
from pegaflow.p2p.addresses import parse_address
from pegaflow.p2p.devices import AskMtu, Port
from pegaflow.p2p.secrets import open_to_others

OPTIONS = (
    "PEERS",
    "PEER_LISTEN",
    "DIRECTORY",
    "PEER_TOKEN",
    "PEER_TOKEN_FILE",
    "PEER_TLS_CERT",
    "PEER_TLS_KEY",
    "PEER_TLS_CA",
    "NICS",
    "QPS_PER_PEER",
)
AskDirectory = Callable[[str], tuple[str, str | None]]
"""Of a URL: the same without its password, and why nobody answers there; ``None`` if somebody does."""

VARIABLES = tuple(f"PEGAFLOW_{name}" for name in OPTIONS)


def rdma(host: Host, ask_mtu: AskMtu | None = None) -> Finding:
    """RDMA devices, their ports, and whether this user may open them."""
    ports = devices.find_ports(host.root / "sys", ask_mtu)
    if not ports:
        return Finding("rdma", INFO, "no devices", "Nothing to do: blocks of other hosts come by TCP.")
    value = "; ".join(map(_described, ports))
    verbs = [one for one in host.names("/dev/infiniband") if one.startswith("uverbs")]
    if not any(host.accessible(f"/dev/infiniband/{one}") for one in verbs):
        advice = "This process may not open /dev/infiniband/uverbs*: docker --device /dev/infiniband, or fix its mode."
        return Finding("rdma", WARNING, value, advice)
    if all(port.problem for port in ports):
        advice = "No port can be used, so blocks of other hosts come by TCP: check the cable, 'ip link' and 'ibstat'."
        return Finding("rdma", WARNING, value, advice)
    return Finding("rdma", OK, value)


def peers(host: Host, binds: Callable[[str], str | None], ask_directory: AskDirectory) -> Finding:
    """Options of peers as the environment says them. ``binds``: why this host cannot listen on an address, if so."""
    given = {name: text for name in VARIABLES if (text := host.environ.get(name))}
    if not any(f"PEGAFLOW_{name}" in given for name in ("PEERS", "PEER_LISTEN", "DIRECTORY")):
        advice = (
            "Optional: pegaflow.peers, or pegaflow.directory, and pegaflow.peer_listen share blocks with other hosts "
            "(docs/p2p.md)."
        )
        return Finding("peers", INFO, "not configured in this environment", advice)
    try:
        config = parse_config({}, given)
    except InvalidArgument as error:
        return Finding("peers", ERROR, "options that cannot be", printable(str(error)))
    asked, silence = list(config.peers), None
    if config.directory is not None:
        try:
            store, silence = ask_directory(config.directory)
        except InvalidArgument as error:
            return Finding("peers", ERROR, "options that cannot be", printable(str(error)))
        except PegaFlowError as error:  # no pool can be made here, which is a finding of its own
            store, silence = "", f"it could not be tried: {error}"
        asked.append(f"who has what in the directory {store}".rstrip())
    serves = f"serves {config.peer_listen}" if config.peer_listen else "serves nobody"
    value = f"{serves}, asks {', '.join(asked) or 'nobody'}, {'TLS' if config.peer_tls else 'token without TLS'}"
    problem = binds(parse_address(config.peer_listen, "x").host) if config.peer_listen else None
    if problem is not None:
        return Finding("peers", ERROR, value, f"This host cannot listen there: {printable(problem)}.")
    secrets = [one for one in (config.peer_token_file, config.peer_tls_key) if one is not None]
    shown = [one for one in secrets if open_to_others(one)]
    if shown:
        return Finding("peers", WARNING, value, f"Others on this host can read {printable(shown[0])}: chmod 600.")
    if silence is not None:
        advice = f"Of the directory: {printable(silence.rstrip('.'))}. Until it answers only pegaflow.peers are asked."
        return Finding("peers", WARNING, value, advice)
    return Finding("peers", OK, value)


def _described(port: Port) -> str:
    node = f" numa {port.node}" if port.node is not None else ""
    path: Any = f"LID {port.lid}" if port.link_layer == devices.INFINIBAND else f"GID {port.gid_index}"
    state = f"not used: {port.problem}" if port.problem else f"{path}, MTU {port.mtu_bytes}"
    return f"{port.name} ({port.link_layer} {port.rate}{node}; {state})"
