"""One engine's ends of the connections to other hosts: the server that answers for the pool, and the client that asks.

Both are made when the pool is open, in the scheduler's process alone. What cannot be made is said once, and serving
goes on without it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pegaflow.config import ConnectorConfig
from pegaflow.connector.log import logger
from pegaflow.connector.peer_runs import PeerClient
from pegaflow.errors import InvalidArgument, PegaFlowError
from pegaflow.p2p import devices
from pegaflow.p2p.addresses import Addresses
from pegaflow.p2p.devices import Port
from pegaflow.p2p.directed import Announcer, DirectedPeers, Directory

if TYPE_CHECKING:
    from pegaflow._native import Pool


class Server(Protocol):
    """``PeerServer``."""

    def facts(self) -> dict[str, Any]:
        """What it does."""
        ...

    def close(self) -> None:
        """Answer no more."""
        ...


class Client(PeerClient, Protocol):
    """``Peers``, or those of them that a directory names, by who owns it."""

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Other hosts from now on."""
        ...

    def close(self) -> None:
        """Leave all peers."""
        ...


@dataclass(frozen=True)
class PeerTypes:
    """The engine's own classes: ``PeerServer``, ``Peers``, ``Nic`` and ``Directory``."""

    server: Callable[..., Server]
    client: Callable[..., Any]
    nic: Callable[..., Any]
    directory: Callable[..., Directory]
    find_ports: Callable[[], list[Port]] = devices.find_ports


class PeerLink:
    """What one engine has of other hosts."""

    def __init__(self, config: ConnectorConfig, types: PeerTypes) -> None:
        """Raises ``InvalidArgument`` for a port of ``pegaflow.nics`` that is not there."""
        self._config = config
        self._types = types
        self.server: Server | None = None
        self.client: Client | None = None
        self._addresses: Addresses | None = None
        self._directory: Directory | None = None
        self._announcer: Announcer | None = None
        self._nics: list[Any] = []
        self._closed = False
        self._lock = threading.Lock()
        """The pool may be opened by a thread while the engine shuts down."""
        if self.wanted and config.nics != ():
            ports = devices.choose(types.find_ports(), config.nics, devices.own_node())
            self._nics = [types.nic(one.device, one.port, one.gid_index, one.mtu_bytes, one.node) for one in ports]
            logger.info("PegaFlow: blocks of peers come by %s.", ", ".join(one.name for one in ports) or "TCP")

    @property
    def wanted(self) -> bool:
        """Whether the user asked for any of it."""
        config = self._config
        return bool(config.peers) or config.peer_listen is not None or config.directory is not None

    def open(self, pool: "Pool") -> None:
        """The pool is there: serve it, and look for others. Raises ``InvalidArgument`` for options that cannot be."""
        with self._lock:
            if not self.wanted or self._closed:
                return
            try:
                self._open(pool)
            except PegaFlowError as error:
                self._close_parts()
                if isinstance(error, InvalidArgument):
                    raise
                logger.warning("PegaFlow: no peers, serving goes on without them: %s", error)

    def close(self) -> None:
        """Answer and ask no more. Idempotent."""
        with self._lock:
            self._closed = True
            self._close_parts()

    def _open(self, pool: "Pool") -> None:
        config = self._config
        shared = {"token": config.peer_token, "tls": config.peer_tls, "nics": self._nics}
        if config.directory is not None:
            self._directory = self._types.directory(pool, config.directory)
        if config.peer_listen is not None:
            self.server = server = self._types.server(pool, config.peer_listen, **shared)
            if self._directory is not None:
                self._announcer = Announcer(self._directory, lambda: _serving_at(server), _warn)
        if config.reads and (config.peers or self._directory is not None):
            self._addresses = addresses = Addresses(config.peers, self._tell, _warn)
            known = addresses.known()
            client = self._types.client(pool, known, qps_per_peer=config.qps_per_peer, **shared)
            self.client = client if self._directory is None else DirectedPeers(client, self._directory, known)
            addresses.start()

    def _tell(self, hosts: Sequence[str]) -> None:
        client = self.client
        if client is not None:
            client.set_addresses(hosts)

    def _close_parts(self) -> None:
        parts = (self._addresses, self.client, self._announcer, self.server, self._directory)
        self._addresses = self.client = self._announcer = self.server = self._directory = None
        for part in parts:
            if part is not None:
                part.close()


def _serving_at(server: Server) -> str | None:
    """Where a server answers, if it is this process's turn."""
    facts = server.facts()
    return str(facts["address"]) if facts["serving"] else None


def _warn(sentence: str) -> None:
    logger.warning("PegaFlow: %s", sentence)
