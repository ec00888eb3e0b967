"""``PegaEngine``: values by name in shared memory, without a server."""

import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from pegaflow import _native
from pegaflow.config import parse_size
from pegaflow.errors import InvalidArgument

SHM_DIR = "/dev/shm"


class PegaEngine:
    """A store of values by name: private to this process, or shared between processes and restarts.

    >>> with PegaEngine(pool_size="64mb") as engine:
    ...     engine.put("greeting", "hello")
    ...     engine.get("greeting")
    'hello'

    Keys are ``str``, at most 64 KiB as UTF-8. Values are ``str`` or any C-contiguous bytes-like object (``bytes``,
    ``bytearray``, ``memoryview``, a numpy array) of 0 bytes to 1 GiB; a ``str`` comes back as ``str``, everything else
    as ``bytes``. ``put`` copies the value, ``get`` returns a new object.

    Safe to use from many threads and, with a name, from many processes. A value is stored as a whole or not at all,
    whoever is killed meanwhile. After ``fork()`` the child has to open its own engine.

    Any call may raise ``ForkedProcess``, ``PoolClosed``, ``InvalidArgument``, or ``PoolBusy`` (after waiting 2 s for
    another process of the pool that does not go on, for instance because it is stopped).
    """

    def __init__(
        self,
        *,
        name: str | None = None,
        pool_size: str | int | None = None,
        shm_dir: str | os.PathLike[str] = SHM_DIR,
        evict: bool = False,
        checksum: bool = True,
    ) -> None:
        """Open the engine.

        ``name``: the pool, created by whoever comes first; without one, memory of this process alone that goes with
        the engine. ``pool_size``: its size if this call creates it, in bytes or as ``"1gb"``; by default the smaller
        of 30 GB and half of what ``shm_dir`` has left. ``evict``: let the values of the pool that were used longest
        ago go when it is full; by default ``put`` raises ``PoolFull`` then. ``checksum``: store a checksum with each
        value, and compare it when the value is read.

        Raises ``PoolRefused``, ``ShmFull`` or ``PoolBusy`` (too many processes are attached).
        """
        if name is not None and not isinstance(name, str):
            raise InvalidArgument(f"name must be a str, or None for a private engine, not {name!r}.")
        for option, value in (("evict", evict), ("checksum", checksum)):
            if not isinstance(value, bool):
                raise InvalidArgument(f"{option} must be True or False, not {value!r}.")
        self.name = name
        self._store = _native.ObjectStore.open(
            name,
            shm_dir=_directory(shm_dir),
            pool_bytes=None if pool_size is None else parse_size(pool_size, "pool_size"),
            evict=evict,
            checksum=checksum,
        )

    def put(self, key: str, value: Any) -> None:
        """Store ``value`` under ``key``, in place of what was there.

        Raises ``PoolFull`` if there is no room; then what was there stays.
        """
        try:
            self._store.put(key, value)
        except TypeError:
            raise _wrong_key(key) from None

    def get(self, key: str) -> str | bytes | None:
        """The value of ``key``, or ``None``.

        Raises ``PoolCorrupt`` if its bytes do not match their checksum.
        """
        try:
            return self._store.get(key)
        except TypeError:
            raise _wrong_key(key) from None

    def remove(self, key: str) -> str | bytes | None:
        """Take the value of ``key`` out and return it; ``None`` if there is none.

        Of several that race for a value, one gets it. Raises ``PoolCorrupt`` as ``get`` does; the value is gone then.
        """
        try:
            return self._store.remove(key)
        except TypeError:
            raise _wrong_key(key) from None

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, str):
            raise _wrong_key(key)
        return self._store.contains(key)

    def __len__(self) -> int:
        return self._store.count()

    def __iter__(self) -> Iterator[str]:
        """All keys of now, in no order; changing the engine meanwhile is fine."""
        return iter(self._store.keys())

    @property
    def path(self) -> str | None:
        """Directory of the pool's files; ``None`` for a private engine."""
        return self._store.path or None

    @property
    def pool_bytes(self) -> int:
        """Size of the pool, in bytes: an existing pool keeps that which it was created with."""
        return self._store.pool_bytes

    def stats(self) -> dict[str, int]:
        """Counters of this engine, such as ``values_put``, ``values_found`` and ``values_evicted``, and those of its
        pool (see ``Pool.stats``)."""
        return self._store.stats()

    def close(self) -> None:
        """Leave the pool; every other call raises ``PoolClosed`` from then on. Closing again does nothing.

        The values of a named pool stay, those of a private engine are gone.
        """
        self._store.close()

    def __enter__(self) -> "PegaEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "private" if self.name is None else f"name={self.name!r}"
        return f"<PegaEngine {where}, {self.pool_bytes} bytes>"


def _directory(shm_dir: object) -> str:
    path = os.fspath(shm_dir) if isinstance(shm_dir, str | os.PathLike) else None
    if not isinstance(path, str):
        raise InvalidArgument(f"shm_dir must be a directory such as {SHM_DIR}, not {shm_dir!r}.")
    return path


def _wrong_key(key: object) -> InvalidArgument:
    return InvalidArgument(f"keys are of type str, not {type(key).__name__}.")
