"""Key-value stores behind one interface, for ``put_get``."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, cast

from benchmarks._common import note

REDIS_START_SECONDS_MAX = 10.0


class Store(Protocol):
    """What is timed."""

    name: str

    def put(self, key: str, value: bytes) -> None:
        """Store."""

    def get(self, key: str) -> bytes | None:
        """Fetch."""

    def remove(self, key: str) -> bytes | None:
        """Delete, and return what was there."""


class DictStore:
    """A Python dict: it stores and returns references and copies nothing."""

    name = "dict"

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self.get = self._values.get

    def put(self, key: str, value: bytes) -> None:
        """Store a reference."""
        self._values[key] = value

    def remove(self, key: str) -> bytes | None:
        """Drop the reference."""
        return self._values.pop(key, None)


class FileStore:
    """One file per key in a directory in shared memory."""

    name = "file"

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = str(directory)

    def put(self, key: str, value: bytes) -> None:
        """Create or overwrite the file."""
        fd = os.open(f"{self._directory}/{key}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            view = memoryview(value)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)

    def get(self, key: str) -> bytes | None:
        """Read the whole file."""
        try:
            with open(f"{self._directory}/{key}", "rb", buffering=0) as file:
                return file.read()
        except FileNotFoundError:
            return None

    def remove(self, key: str) -> bytes | None:
        """Read and delete the file."""
        value = self.get(key)
        if value is not None:
            os.unlink(f"{self._directory}/{key}")
        return value


class RedisStore:
    """A Redis server over a TCP connection on the loopback interface."""

    name = "redis"

    def __init__(self, port: int) -> None:
        import redis

        self._client = redis.Redis(host="127.0.0.1", port=port)

    def put(self, key: str, value: bytes) -> None:
        """SET."""
        self._client.set(key, value)

    def get(self, key: str) -> bytes | None:
        """GET."""
        return cast("bytes | None", self._client.get(key))

    def remove(self, key: str) -> bytes | None:
        """GETDEL."""
        return cast("bytes | None", self._client.getdel(key))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


@contextmanager
def redis_store() -> Iterator[RedisStore | None]:
    """A private Redis server without persistence for the length of a block; ``None`` if it is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        note("redis-server is not installed (Debian: apt install redis-server): no column for it.")
        yield None
        return
    try:
        import redis  # noqa: F401
    except ImportError:
        note("The Python package redis is not installed: no column for it.")
        yield None
        return
    port = _free_port()
    directory = tempfile.mkdtemp(prefix="pegaflow-bench-redis-")
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", directory]
    server = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_it_listens(server, port)
        store = RedisStore(port)
        try:
            yield store
        finally:
            store.close()
    finally:
        server.terminate()
        server.wait(timeout=30)
        shutil.rmtree(directory, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_it_listens(server: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + REDIS_START_SECONDS_MAX
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise SystemExit("redis-server was started and does not answer; uninstall it or repair it.")
