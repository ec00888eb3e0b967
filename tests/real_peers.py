"""Pools that serve and ask each other over the loopback of this host."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pegaflow import _native

TOKEN = "0123456789abcdef-of-tests"
WAIT_SECONDS_MAX = 30.0


def free_address() -> str:
    """An address of this host whose port, and the one behind it, nobody has now."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            if port > 65_000:
                continue
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return f"127.0.0.1:{port}"


def await_(what: Callable[[], Any]) -> None:
    """Until it is so."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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
