"""Pages of one host pool in the shared pool: stored and found by key, copied by the engine's threads.

SGLang calls from threads of its own that may wait: one for queries, one for reads, one for writes. Nothing here is for
its scheduler's thread but ``clear``.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegaflow import _native

if TYPE_CHECKING:
    from pegaflow._native import CopyDone, HostCopier, KVLayout, Namespace, Pool, Prefetch

ROOM_WAIT_MS_MAX = 1000
"""How long one batch waits for the pool to grow or to make room."""

POLL_SECONDS = 0.002
COPY_WAIT_MS = 1000


@dataclass
class Batch:
    """Pages of one call, in the order of their chain."""

    keys: Sequence[bytes]
    layouts: "Sequence[tuple[KVLayout, Sequence[int]]]"
    """Where they lie: one layout with a number per page, or a layout of one page for each."""
    parent: bytes | None = None
    """Key of the page before the first one, if SGLang said so."""
    chained: bool = True
    """Whether the pages before each one are stored in the same pool. Of states and windows only some are."""

    def parents(self, indices: Sequence[int]) -> list[bytes | None]:
        """For each of these pages the key of the one that it is of no use without."""
        if not self.chained:
            return [None] * len(indices)
        return [self.keys[index - 1] if index else self.parent for index in indices]


class Copying:
    """A copier that one thread at a time uses, and that has nothing in flight between calls."""

    def __init__(self, pool: "Pool") -> None:
        self._copier: HostCopier = _native.HostCopier(pool)
        self._lock = threading.Lock()

    def run(self, save: bool, batch: Batch, indices: Sequence[int], refs: Sequence[int]) -> list[bool]:
        """Copy the pages ``indices`` of a batch to (``save``) or from slots ``refs``. Returns which were copied. Ends
        when the last byte is in place: SGLang reuses the memory then."""
        start = self._copier.save if save else self._copier.load
        with self._lock:
            jobs: dict[int, list[int]] = {}
            try:
                if len(batch.layouts) == 1:
                    layout, numbers = batch.layouts[0]
                    jobs[start(0, layout, refs, [numbers[index] for index in indices])] = list(range(len(refs)))
                else:
                    for position, (index, ref) in enumerate(zip(indices, refs, strict=True)):
                        layout, numbers = batch.layouts[index]
                        jobs[start(0, layout, [ref], numbers)] = [position]
            finally:
                done = self._finish(len(jobs))
        copied = [False] * len(refs)
        for job in done:
            positions = jobs[job.job]
            bad = set(range(len(positions))) if not job.ok and not job.failed else set(job.failed)
            for at, position in enumerate(positions):
                copied[position] = at not in bad
        return copied

    def close(self) -> None:
        """Stop its threads. Idempotent."""
        with self._lock:
            self._copier.close()

    def _finish(self, jobs: int) -> "list[CopyDone]":
        done: list[CopyDone] = []
        while len(done) < jobs:
            done += self._copier.wait(COPY_WAIT_MS)
        return done


class PageStore:
    """Pages of one host pool, in one namespace of the shared pool."""

    def __init__(
        self,
        pool: "Pool",
        namespace: "Namespace",
        copying: tuple[Copying, Copying],
        *,
        tier_wait_ms: int | None,
        closing: threading.Event,
        counts: bool = True,
    ) -> None:
        """``copying``: for reads and for writes. ``tier_wait_ms``: how long a read waits for an SSD; ``None``: there is
        none. ``closing``: ends waits. ``counts``: whether what is asked for counts in the pool's statistics; of ranks
        with the same pages one does."""
        self._pool, self._namespace = pool, namespace
        self._reads, self._writes = copying
        self._tier_wait_ms = tier_wait_ms
        self._closing = closing
        self._has_tier = False
        self._counts = counts
        pool.grow_ahead(namespace)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self._namespace.block_bytes

    def prefix(self, keys: Sequence[bytes]) -> int:
        """How many of ``keys``, the pages that a prompt asks for, are there, from the first on; on SSD counts."""
        in_memory = found = self._namespace.lookup(keys)
        if found < len(keys) and self._tier():
            tiers = self._namespace.tiers(keys[found:])
            found += next((index for index, tier in enumerate(tiers) if not tier), len(tiers))
        if self._counts:
            self._namespace.note_prompt(keys, start=0, ram=in_memory, ssd=found, peer=found, late=found)
        return found

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of ``keys`` are there; on SSD counts."""
        there = self._namespace.tiers(keys) if self._tier() else self._namespace.contains(keys)
        return [bool(one) for one in there]

    def load(self, batch: Batch) -> list[bool]:
        """Copy pages out, up to the first that is missing. Returns which are in place, whole."""
        refs: list[int] = []
        copied: list[bool] = []
        try:
            self._lease(batch, refs)
            if refs:
                copied = self._reads.run(False, batch, range(len(refs)), refs)
        finally:
            self._pool.release(refs)
        self._namespace.note_loaded(sum(copied))
        return copied + [False] * (len(batch.keys) - len(copied))

    def save(self, batch: Batch) -> list[bool]:
        """Store pages that are not there yet. Returns which are there now."""
        stored = [False] * len(batch.keys)
        rest = list(range(len(batch.keys)))
        deadline = time.monotonic() + ROOM_WAIT_MS_MAX / 1000
        while True:
            tried, published = self._save_some(batch, rest)
            for index in published:
                stored[index] = True
            # What was copied and could not be published will not be the next time either.
            rest = [index for index in rest if index not in tried]
            for index, there in zip(rest, self._namespace.contains([batch.keys[index] for index in rest]), strict=True):
                stored[index] = stored[index] or bool(there)
            rest = [index for index in rest if not stored[index]]
            if not rest or time.monotonic() >= deadline or self._closing.wait(POLL_SECONDS):
                return stored

    def clear(self) -> None:
        """Forget all pages, for every process at once, on SSD too."""
        self._tier()
        self._namespace.reset()

    def _save_some(self, batch: Batch, rest: list[int]) -> tuple[set[int], list[int]]:
        """Store of ``rest`` what there is room for now. Returns ``(pages that had room, those that are there now)``."""
        keys = [batch.keys[index] for index in rest]
        self._tier()
        reserved = self._namespace.reserve(keys, parents=batch.parents(rest))
        if not reserved:
            return set(), []
        indices, refs = [rest[at] for at, _ in reserved], [ref for _, ref in reserved]
        copied = [False] * len(refs)
        try:
            copied = self._writes.run(True, batch, indices, refs)
        finally:
            self._pool.abort([ref for ref, ok in zip(refs, copied, strict=True) if not ok])
        whole = [index for index, ok in zip(indices, copied, strict=True) if ok]
        published = self._pool.publish([ref for ref, ok in zip(refs, copied, strict=True) if ok])
        if published < len(whole):
            # Their parents are gone, or a reset came between; or a sibling was first, and then they are there.
            there = self._namespace.contains([batch.keys[index] for index in whole])
            whole = [index for index, one in zip(whole, there, strict=True) if one]
        return set(indices), whole

    def _lease(self, batch: Batch, refs: list[int]) -> None:
        """Add to ``refs``, which are the caller's to release whatever happens, leases on the longest run of pages that
        is in memory, or comes there from an SSD in time."""
        keys = batch.keys
        refs += self._namespace.lease(keys)
        if len(refs) == len(keys) or not self._tier() or not self._tier_wait_ms:
            return
        rest = list(range(len(refs), len(keys)))
        request = self._namespace.prefetch(keys[len(refs) :], parent=batch.parents(rest)[0], chained=batch.chained)
        if request is None:
            return
        try:
            self._await(request)
            refs += self._namespace.lease(keys, start=len(refs))
        finally:
            request.close()

    def _await(self, request: "Prefetch") -> None:
        deadline = time.monotonic() + (self._tier_wait_ms or 0) / 1000
        while request.poll() is None and time.monotonic() < deadline:
            if self._closing.wait(POLL_SECONDS):
                return

    def _tier(self) -> bool:
        """Whether these pages may be on SSD. A pool has its tier when the first process has opened the files."""
        if self._tier_wait_ms is not None and not self._has_tier:
            self._has_tier = self._namespace.use_ssd()
        return self._has_tier
