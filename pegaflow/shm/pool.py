"""Open, list, inspect, verify and remove pools: the native calls with Python types.

Only ``open_pool`` attaches to a pool. Everything else reads the files of a pool from outside, works while no engine is
running and, apart from ``reap_pool`` and ``unlink_pool``, changes nothing.
"""

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pegaflow import _native
from pegaflow.errors import PegaFlowError, PoolNotFound, PoolRefused
from pegaflow.shm.report import InspectReport, PoolListing, SystemReport, VerifyReport, decode, decode_list

SHM_DIR_DEFAULT = "/dev/shm"


@contextmanager
def open_pool(
    name: str,
    *,
    shm_dir: str | os.PathLike[str] = SHM_DIR_DEFAULT,
    pool_bytes: int | None = None,
    segment_bytes: int | None = None,
    slots_max: int | None = None,
    create: bool = False,
    label: str = "",
) -> Iterator[_native.Pool]:
    """Attach to pool ``name`` for the length of a ``with`` block.

    Sizes are bytes and only matter to the creator; ``create`` defaults to false, unlike ``_native.Pool.open``, because
    people who look at pools seldom want a new one. Raises ``PoolNotFound``, ``PoolRefused``, ``ShmFull``, ``PoolBusy``.
    """
    pool = _native.Pool.open(
        name,
        shm_dir=os.fspath(shm_dir),
        pool_bytes=pool_bytes,
        segment_bytes=segment_bytes,
        slots_max=slots_max,
        create=create,
        label=label,
    )
    try:
        yield pool
    finally:
        pool.close()


def list_pools(shm_dir: str | os.PathLike[str] = SHM_DIR_DEFAULT) -> list[PoolListing]:
    """All pools below ``shm_dir``, refused and half-created ones included. Attaches to none."""
    return decode_list(PoolListing, _native.list_pools(os.fspath(shm_dir)))


def find_pool(pool: str, shm_dir: str | os.PathLike[str] = SHM_DIR_DEFAULT, *, to_remove: bool = False) -> PoolListing:
    """The listing of one pool, named by its name or by the path of its directory (anything with a ``/``).

    Raises ``PoolNotFound`` if there is none, and ``PoolRefused`` if several pools have this name (pools of different
    layout versions or users can) so that a path is needed. Of those only what can be used counts for whoever wants to
    look, and all of them ``to_remove``: which one is meant cannot be told.
    """
    if os.sep in pool:
        path = os.path.abspath(pool)
        found = [one for one in list_pools(os.path.dirname(path)) if os.path.abspath(one.path) == path]
        if not found:
            raise PoolNotFound(f"There is no pool at {path}; see 'pegaflow pools'.")
        return found[0]
    listings = list_pools(shm_dir)
    named = [one for one in listings if one.name == pool]
    if not named:
        raise PoolNotFound(_not_found(pool, [one.name for one in listings], shm_dir))
    usable = named if to_remove else [one for one in named if one.state == "ok"] or named
    if len(usable) > 1:
        paths = ", ".join(one.path for one in usable)
        raise PoolRefused(f"Several pools are named {pool!r}; give one of their paths: {paths}.")
    return usable[0]


def inspect_pool(path: str | os.PathLike[str]) -> InspectReport:
    """Describe the pool in directory ``path``. Raises ``PoolNotFound`` or ``PoolRefused``."""
    return decode(InspectReport, _native.inspect(os.fspath(path)))


def inspect_if_ok(listing: PoolListing) -> InspectReport | None:
    """What is in a pool of ``list_pools``; ``None`` if it was refused, or removed or damaged since it was listed."""
    if listing.state != "ok":
        return None
    try:
        return inspect_pool(listing.path)
    except (PegaFlowError, OSError):
        return None


def verify_pool(path: str | os.PathLike[str], *, checksums: bool = True) -> VerifyReport:
    """Check every invariant of the pool in directory ``path`` and, unless ``checksums`` is false, read and check all
    its bytes. Exact when nobody changes the pool meanwhile. Raises ``PoolNotFound`` or ``PoolRefused``."""
    return decode(VerifyReport, _native.verify(os.fspath(path), checksums))


def reap_pool(path: str | os.PathLike[str]) -> int:
    """Clean up after the dead processes of the pool in directory ``path``; returns how many rows were reaped."""
    return _native.reap(os.fspath(path))


def unlink_pool(path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Delete the files of the pool in directory ``path``. Raises ``PoolInUse`` while a living process is attached,
    unless ``force``: those processes keep what they have mapped and get an empty pool when they restart."""
    _native.remove(os.fspath(path), force)


def system_report() -> SystemReport:
    """What the native engine knows about this host."""
    return decode(SystemReport, _native.system_info())


def pool_files_bytes(listing: PoolListing) -> int:
    """Bytes that the files of a pool occupy, wherever its blocks are; 0 for what cannot be read."""
    directories = {listing.path, listing.segments_path or listing.path}
    return sum(map(files_bytes, directories))


def files_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes that the files directly inside directory ``path`` occupy; 0 for what cannot be read."""
    total = 0
    try:
        for entry in os.scandir(path):
            if entry.is_file(follow_symlinks=False):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError:
        return total
    return total


def _not_found(pool: str, names: list[str], shm_dir: str | os.PathLike[str]) -> str:
    near = difflib.get_close_matches(pool, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "see 'pegaflow pools'."
    return f"There is no pool named {pool!r} in {Path(shm_dir)}; {hint}"
