"""Pools that serve and ask each other over the loopback of this host."""

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from pegaflow import _native
from tests.patience import await_

TOKEN = "0123456789abcdef-of-tests"
PORTS = range(12_000, 30_000)
"""Below those that systems give to whoever connects, so that nobody gets one of them between a look and its use."""


def free_address() -> str:
    """An address of this host whose port, and the one behind it, nobody has now."""
    return f"127.0.0.1:{free_port(2)}"


def free_port(count: int = 1) -> int:
    """The first of so many ports that nobody has now."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with ExitStack() as stack:
            try:
                for number in range(port, port + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            except OSError:
                continue
        return port


@contextmanager
def served(pool: Any, address: str | None = None, **options: Any) -> Iterator[tuple[str, Any]]:
    """``(address, server)`` of a pool that answers."""
    address = address or free_address()
    server = _native.PeerServer(pool, address, **({"token": TOKEN} | options))
    try:
        await_(lambda: server.facts()["serving"])
        yield address, server
    finally:
        server.close()


@contextmanager
def asking(pool: Any, *addresses: str, **options: Any) -> Iterator[Any]:
    """Connections of a pool to others that are up."""
    client = _native.Peers(pool, list(addresses), **({"token": TOKEN} | options))
    try:
        await_(lambda: all(peer["state"] == "up" for peer in client.facts()))
        yield client
    finally:
        client.close()
