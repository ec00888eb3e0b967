"""A rank gets ready for the pool while vLLM is still starting.

Which blocks an engine will use is known with its first request. Until then a thread makes the rank's copier, which
takes a few hundred milliseconds, and has it page-lock what an earlier engine of the same shape left in the pool. A
wrong guess costs nothing but work: it is undone when the truth is known.
"""

import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pegaflow import _native
from pegaflow.connector.log import logger

if TYPE_CHECKING:
    from pegaflow._native import Pool
    from pegaflow.connector.copies import Copier, NativeTypes

TAKE_SECONDS_MAX = 30.0
"""Longest wait for the thread when its work is needed."""

REPORT_BYTES_MAX = 16 << 20
"""A longer description of a pool is not read."""


class EarlyStart:
    """Pool and copier of one rank, in the making."""

    def __init__(self, native: "NativeTypes", device: str, part: int, part_bytes: Mapping[int, int]) -> None:
        """``part``: number of this rank's part in each block. ``part_bytes``: bytes of it, by KV cache group."""
        self._native, self._device, self._part, self._part_bytes = native, device, part, dict(part_bytes)
        self._made: tuple[Pool, Copier] | None = None
        self._abandoned = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="pegaflow-early", daemon=True)
        self._thread.start()

    def take(self, name: str, shm_dir: str) -> "tuple[Pool, Copier] | None":
        """What was made, if it is for this pool; then it is the caller's. ``None`` if the caller has to make it."""
        made = self._give_up()
        if made is None or (made[0].name, made[0].shm_dir) == (name, shm_dir):
            return made
        _close(made)
        return None

    def close(self) -> None:
        """Nobody will take what was made."""
        made = self._give_up()
        if made is not None:
            _close(made)

    def _give_up(self) -> "tuple[Pool, Copier] | None":
        self._thread.join(TAKE_SECONDS_MAX)
        with self._lock:
            self._abandoned = True
            made, self._made = self._made, None
        return made

    def _run(self) -> None:
        try:
            made = self._make()
        except Exception as error:
            # Whoever needs it tries again, and says what is wrong.
            logger.debug("PegaFlow: nothing could be prepared: %r", error)
            return
        with self._lock:
            if made is not None and not self._abandoned:
                self._made = made
                return
        if made is not None:
            _close(made)

    def _make(self) -> "tuple[Pool, Copier] | None":
        if self._native.create_pool is None:
            return None
        pool = self._native.create_pool()
        try:
            copier = self._native.copier(pool, self._device)
        except Exception:
            pool.close()
            raise
        expect = getattr(copier, "expect", None)
        if expect is not None:
            try:
                for group, fingerprint, sizes in likely_namespaces(
                    _native.inspect(pool.path), self._part, self._part_bytes
                ):
                    expect(pool.namespace(fingerprint, group, sizes), self._part)
            except Exception as error:
                logger.debug("PegaFlow: nothing is page-locked ahead: %r", error)
        return pool, copier


def likely_namespaces(
    report: str, part: int, part_bytes: Mapping[int, int]
) -> list[tuple[int, bytes, tuple[int, ...]]]:
    """``(group, fingerprint, bytes of each part)`` of the fullest namespace of each group in which this part has the
    right length. ``report``: the JSON of ``_native.inspect``."""
    if len(report) > REPORT_BYTES_MAX:
        return []
    best: dict[int, tuple[int, bytes, tuple[int, ...]]] = {}
    for one in json.loads(report)["namespaces"]:
        group, sizes = int(one["group"]), tuple(int(size) for size in one["part_bytes"])
        if part < len(sizes) and part_bytes.get(group) == sizes[part] and one["slots"]:
            found = (int(one["bytes_sealed"]), bytes.fromhex(one["fingerprint"]), sizes)
            best[group] = max(best.get(group, found), found)
    return [(group, fingerprint, sizes) for group, (_, fingerprint, sizes) in sorted(best.items())]


def _close(made: "tuple[Pool, Copier]") -> None:
    pool, copier = made
    copier.close()
    pool.close()
