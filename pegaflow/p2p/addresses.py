"""Addresses of peers: how they are written, and which hosts stand behind a name at the moment."""

import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pegaflow.errors import InvalidArgument

PEERS_MAX = 256
"""Peers of one process; more are left out."""

PORT_MAX = 65_534
"""The port behind it carries the blocks."""

RESOLVE_SECONDS = 30.0
"""Pause between two looks at what stands behind names, ..."""

RETRY_SECONDS = 5.0
"""... and as long as one of them was never found."""

_STORE = re.compile(r"(?:redis|valkey)s?(?:\+sentinel|\+cluster)?://\S+\Z")
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")


@dataclass(frozen=True)
class Address:
    """Where a peer answers."""

    host: str
    """A name, or an IP address without brackets."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_name(self) -> bool:
        """Whether the host has to be looked up."""
        return _ip(self.host) is None


def parse_address(text: Any, name: str) -> Address:
    """``"10.0.0.2:7441"``, ``"[fd00::2]:7441"`` or ``"kv.example:7441"``. ``name``: of the option, for the error."""
    host, colon, port = text.strip().rpartition(":") if isinstance(text, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    ip = _ip(bare)
    known = isinstance(ip, ipaddress.IPv6Address) if bracketed else ip is not None or _HOST.fullmatch(bare)
    if not colon or not known or (ip is not None and ip.version == 6 and not bracketed):
        raise InvalidArgument(f'{name} must be "host:port" such as "10.0.0.2:7441" or "[fd00::2]:7441", not {text!r}.')
    if not port.isdecimal() or not 1 <= int(port) <= PORT_MAX:
        raise InvalidArgument(f"{name} must have a port from 1 to {PORT_MAX}, which {text!r} has not.")
    return Address(str(ip) if ip is not None else bare, int(port))


def parse_peers(value: Any, name: str) -> tuple[str, ...]:
    """Addresses in a list, or in one string with commas between them. Raises ``InvalidArgument``."""
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not 1 <= len(given) <= PEERS_MAX:
        raise InvalidArgument(f'{name} must be "host:port" or a list of up to {PEERS_MAX} of them, not {value!r}.')
    addresses = tuple(str(parse_address(one, name)) for one in given)
    if len(set(addresses)) < len(addresses):
        raise InvalidArgument(f"{name} names a peer twice in {value!r}: name each once.")
    return addresses


def parse_listen(value: Any, name: str) -> str:
    """One address of this host. Raises ``InvalidArgument`` for names and for addresses that stand for all."""
    address = parse_address(value, name)
    ip = _ip(address.host)
    if ip is None or ip.is_unspecified or ip.is_multicast:
        raise InvalidArgument(
            f'{name} must be one IP address of this host with a port, such as "10.0.0.2:7441", so that nobody serves '
            f"a network by accident, not {value!r}."
        )
    return str(address)


def parse_store(value: Any, name: str) -> str:
    """URL of a Redis or Valkey. Raises ``InvalidArgument``, without the URL, which may hold a password. Whether the
    rest of it is right is found out when it is opened."""
    if not isinstance(value, str) or not _STORE.match(value):
        raise InvalidArgument(
            f'{name} must be the URL of a Redis or Valkey, such as "redis://10.0.0.9:6379/0", '
            '"redis+sentinel://host:port,host:port/master/0" or "redis+cluster://host:port,host:port".'
        )
    return value


def resolve(address: Address) -> list[str]:
    """``"ip:port"`` of each host behind ``address``, sorted. Raises ``OSError`` if there is none. May take long."""
    if not address.is_name:
        return [str(address)]
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return sorted({str(Address(str(place[0]), address.port)) for *_, place in found})


class Addresses:
    """The hosts behind a list of addresses, names looked up again now and then on a thread of its own.

    What was behind a name stays there while it cannot be looked up: a name server that is down costs no peer.
    """

    def __init__(
        self,
        given: Iterable[str],
        tell: Callable[[Sequence[str]], None],
        warn: Callable[[str], None],
        look_up: Callable[[Address], list[str]] = resolve,
        seconds: float = RESOLVE_SECONDS,
    ) -> None:
        """``tell`` is called, on the thread, with all hosts whenever they change; ``warn`` with a sentence."""
        self._given = [parse_address(one, "an address") for one in given]
        self._tell, self._warn, self._look_up, self._seconds = tell, warn, look_up, seconds
        self._behind: dict[Address, list[str]] = {one: [str(one)] for one in self._given if not one.is_name}
        self._told = self.known()
        self._warned: set[Address | None] = set()
        self._closing = threading.Event()

    def known(self) -> list[str]:
        """Hosts that are known now, each once, at most ``PEERS_MAX``."""
        hosts = dict.fromkeys(host for one in self._given for host in self._behind.get(one, ()))
        return list(hosts)[:PEERS_MAX]

    def start(self) -> None:
        """Look names up from now on, if there are any."""
        if any(one.is_name for one in self._given):
            threading.Thread(target=self._run, name="pegaflow-peer-names", daemon=True).start()

    def close(self) -> None:
        """Tell nothing more. A look-up that is under way ends by itself. Idempotent."""
        self._closing.set()

    def refresh(self) -> None:
        """Look all names up once, and tell what changed."""
        for one in self._given:
            if one.is_name and not self._closing.is_set():
                self._refresh(one)
        hosts = self.known()
        if sum(map(len, self._behind.values())) > PEERS_MAX:
            self._warn_once(None, f"more than {PEERS_MAX} peers stand behind the names; the others are not asked.")
        if hosts != self._told and not self._closing.is_set():
            self._told = hosts
            self._tell(hosts)

    def _refresh(self, one: Address) -> None:
        try:
            self._behind[one] = self._look_up(one)
            self._warned.discard(one)
        except OSError as error:
            self._warn_once(one, f"the peer {one} cannot be looked up, trying again: {error.strerror or error}.")

    def _warn_once(self, about: Address | None, sentence: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            self._warn(sentence)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.refresh()
            except Exception as error:  # a thread has nobody to raise to
                self._warn_once(None, f"peers cannot be looked up: {error!r}.")
            missing = any(one not in self._behind for one in self._given)
            self._closing.wait(min(RETRY_SECONDS, self._seconds) if missing else self._seconds)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    return None if getattr(ip, "scope_id", None) else ip
