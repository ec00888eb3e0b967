"""Cache files on SSD, looked at while no pool uses them: the native calls with Python types.

Nothing here attaches to a pool. Only ``remove_cache`` changes anything.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pegaflow import _native
from pegaflow.shm.report import decode, decode_list

Progress = Callable[[int, int], object]
"""Told how much is done and how much there is; what it raises ends the call early."""


@dataclass(frozen=True)
class CacheFile:
    """One cache file of a directory. What cannot be known without opening it is ``None``."""

    name: str
    path: str
    uid: int
    """The user in its name."""
    layout_version: int
    state: str
    """``"ok"``; ``"in use"``: a process has it open; ``"refused"``: not ours, or of another layout version;
    ``"damaged"``: it has no valid superblock, or cannot be opened."""
    error: str | None
    """Why it is refused or damaged."""
    bytes: int
    """What it takes on the disk."""
    block_bytes: int | None
    zone_bytes: int | None
    zones: int | None
    created_unix_s: int | None
    namespaces_forgotten: int | None
    """Namespaces that were reset and are remembered for it."""
    zones_used: int | None
    records: int | None
    """Blocks that lookups would find, those of namespaces that were reset included."""
    record_bytes: int | None


@dataclass(frozen=True)
class HeldReport:
    """Blocks of one namespace on SSD."""

    fingerprint: str
    group: int
    records: int
    bytes: int


@dataclass(frozen=True)
class CheckReport:
    """Outcome of reading a whole cache."""

    ok: bool
    records: int
    """Blocks that are whole."""
    bytes: int
    forgotten: int
    """Blocks of namespaces that were reset: never found again, and no damage."""
    damaged: int
    """Blocks that will be misses: their bytes are not what was written."""
    unreadable: int
    """Blocks that the disk did not give."""
    problems: list[str]
    """One sentence each, of the first hundred."""
    namespaces: list[HeldReport]


def list_caches(directory: str | os.PathLike[str], progress: Progress | None = None) -> list[CacheFile]:
    """All cache files in ``directory``, foreign ones included. ``progress`` counts zones of one file after the other.
    Raises ``PoolNotFound`` if there is no such directory."""
    return decode_list(CacheFile, _native.ssd_inspect(os.fspath(directory), progress))


def verify_cache(
    directories: Sequence[str | os.PathLike[str]], name: str = "default", progress: Progress | None = None
) -> CheckReport:
    """Read every block of cache ``name`` in ``directories`` as a pool would. ``progress`` counts zones, then bytes.
    Raises ``PoolNotFound``, ``PoolInUse``, ``PoolRefused`` (not ours, or of another version), ``PoolCorrupt`` (no valid
    superblock) or ``DeviceError``."""
    paths = [os.fspath(directory) for directory in directories]
    return decode(CheckReport, _native.ssd_verify(paths, name, progress))


def remove_cache(directory: str | os.PathLike[str], name: str = "default", *, force: bool = False) -> int:
    """Delete the file of cache ``name`` in ``directory`` and return the bytes that it took. Raises ``PoolNotFound``,
    ``PoolRefused``, or ``PoolInUse`` unless ``force``: who uses it keeps it until it ends."""
    return _native.ssd_remove(os.fspath(directory), name, force)
