"""Zero-copy, read-only views of blocks in a pool.

A view owns one lease. The lease is given back when the view is closed (or forgotten) *and* every memoryview, array and
tensor made of it is gone, so no array can ever show the bytes of another block. The pool stays attached for as long,
whatever happens to the ``Pool`` handle that the view came from.
"""

import os
import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pegaflow import _native
from pegaflow.errors import InvalidArgument, PegaFlowError, PoolClosed
from pegaflow.shm.mapping import map_segment

if TYPE_CHECKING:
    import numpy
    import torch


class BlockView:
    """The bytes of one part of one block. Made by ``view_block``, ``view_prefix`` and ``block_view``."""

    def __init__(self, ref: int, part: int, buffer: Any) -> None:
        self.ref = ref
        self.part = part
        self._buffer = buffer

    @property
    def memory(self) -> memoryview:
        """The bytes, read-only, format ``B``. Raises ``PoolClosed`` after ``close``."""
        return memoryview(self._live_buffer()).cast("B").toreadonly()

    def numpy(self, dtype: Any = "uint8") -> "numpy.ndarray[Any, Any]":
        """A one-dimensional, read-only array over the bytes (default ``uint8``); the length must be a multiple of the
        item size."""
        import numpy

        return numpy.frombuffer(self.memory, dtype=dtype)

    def torch(self, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
        """A one-dimensional tensor over the bytes (default ``torch.uint8``).

        Torch has no read-only tensors: writing into this one kills the process with SIGSEGV, since the memory is
        mapped read-only. ``clone()`` it first.
        """
        import torch

        return torch.frombuffer(memoryview(self._live_buffer()).cast("B"), dtype=dtype or torch.uint8)

    def __len__(self) -> int:
        """Bytes of this part."""
        return len(self._live_buffer())

    def __buffer__(self, flags: int, /) -> memoryview:
        """``memoryview(view)`` and ``bytes(view)`` on Python 3.12 and later."""
        return self.memory

    def close(self) -> None:
        """Let go of the bytes; what was made of them stays valid and keeps the lease. Idempotent."""
        self._buffer = None

    def __enter__(self) -> "BlockView":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _live_buffer(self) -> Any:
        if self._buffer is None:
            raise PoolClosed("This view of a block was closed; take a new one.")
        return self._buffer


def view_block(pool: _native.Pool, namespace: _native.Namespace, key: bytes, part: int = 0) -> BlockView | None:
    """A view of ``part`` of the block ``key``, or ``None`` if it is not in the pool."""
    views = view_prefix(pool, namespace, [key], part)
    return views[0] if views else None


def view_prefix(
    pool: _native.Pool, namespace: _native.Namespace, keys: Sequence[bytes], part: int = 0
) -> list[BlockView]:
    """Views of ``part`` of the longest run of ``keys`` that is in the pool, in order; possibly none."""
    refs = namespace.lease(keys)
    views: list[BlockView] = []
    try:
        for ref in refs:
            view = _take_over(pool, ref, part)
            if view is None:
                break
            views.append(view)
    except BaseException:
        # The failed ref has been answered for; those behind it are still ours to give back.
        pool.release(refs[len(views) + 1 :])
        raise
    pool.release(refs[len(views) + 1 :])
    return views


def block_view(pool: _native.Pool, ref: int, part: int = 0) -> BlockView:
    """A view of ``part`` of a block that the caller has leased. Takes that lease over, also when it fails: do not
    release ``ref`` yourself.

    Raises ``InvalidArgument`` if ``ref`` is stale, which a leased one never is unless its namespace was reset, and
    ``PoolRefused`` or ``PoolCorrupt`` if the segment cannot be trusted.
    """
    view = _take_over(pool, ref, part)
    if view is None:
        raise InvalidArgument(f"Block {ref:#x} is not in the pool any more; view only blocks that you hold a lease on.")
    return view


def _take_over(pool: _native.Pool, ref: int, part: int) -> BlockView | None:
    """Turn the caller's lease into a view, or give it back: nothing is left for the caller to release."""
    try:
        source = _source(pool)
        place = source.pool.locate(ref, part)
        if place is None:
            _give_back(pool, ref)
            return None
        file, offset_bytes, length_bytes = place
        mapping = map_segment(file)
        buffer = mapping.buffer(offset_bytes, length_bytes)
    except BaseException:
        _give_back(pool, ref)
        raise
    # The arguments of the callback keep mapping and pool alive for as long as anything refers to the buffer.
    weakref.finalize(buffer, _give_back, source, ref, mapping).atexit = False
    return BlockView(ref, part, buffer)


class _Source:
    """A handle of our own: closing the caller's must not make the process leave the pool under a living view."""

    def __init__(self, pool: _native.Pool) -> None:
        self.pool = _native.Pool.open(pool.name, shm_dir=pool.shm_dir, create=False)
        weakref.finalize(self, self.pool.close).atexit = False

    def release(self, refs: Sequence[int]) -> None:
        self.pool.release(refs)


_sources: "weakref.WeakValueDictionary[str, _Source]" = weakref.WeakValueDictionary()
_sources_lock = threading.Lock()


def _source(pool: _native.Pool) -> _Source:
    with _sources_lock:
        source = _sources.get(pool.path)
        if source is None:
            source = _Source(pool)
            _sources[pool.path] = source
        return source


def _forget_parent() -> None:
    """In a forked child: its parent's handles refuse to work here, and a lock that was held stays held for ever."""
    global _sources_lock
    _sources_lock = threading.Lock()
    _sources.clear()


os.register_at_fork(after_in_child=_forget_parent)


def _give_back(pool: "_native.Pool | _Source", ref: int, *_kept_alive: object) -> None:
    try:
        pool.release([ref])
    except PegaFlowError:
        # Runs in finalizers, maybe in a forked child, where nobody can catch: whoever is left reaps the lease.
        return
