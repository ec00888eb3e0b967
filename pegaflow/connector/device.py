"""Copies to and from the memory of one CUDA device, in the order of vLLM's own work on it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegaflow import _native

if TYPE_CHECKING:
    from pegaflow._native import CopyDone, KVLayout, Namespace, Pool


class DeviceCopier:
    """The native copier of one device; every job starts behind what vLLM has queued on its current stream."""

    def __init__(self, pool: "Pool", device: str, backend: str) -> None:
        """``device``: as PyTorch names it, such as ``"cuda:0"``. Raises ``DeviceError`` if it cannot be used."""
        import torch

        self._device = torch.device(device)
        self._current_stream = torch.cuda.current_stream
        self._copier = _native.CudaCopier(pool, self._device.index or 0, backend=backend)

    def register(self, namespace: "Namespace", part: int) -> None:
        """Page-lock this rank's part of the blocks in the background."""
        self._copier.register(namespace, part)

    def save(self, part: int, layout: "KVLayout", refs: Sequence[int], block_ids: Sequence[int]) -> int:
        """Start copying blocks into reserved slots, behind the kernels that fill them."""
        return self._copier.save(part, layout, refs, block_ids, self._stream())

    def load(self, part: int, layout: "KVLayout", refs: Sequence[int], block_ids: Sequence[int]) -> int:
        """Start copying leased slots into blocks, behind the kernels that may still read what the blocks held."""
        return self._copier.load(part, layout, refs, block_ids, self._stream())

    def poll(self) -> "list[CopyDone]":
        """Jobs that completed since the last call."""
        return self._copier.poll()

    def wait(self, timeout_ms: int) -> "list[CopyDone]":
        """Like ``poll``, but waits a while for one."""
        return self._copier.wait(timeout_ms)

    def in_flight(self) -> int:
        """Jobs that are not completed."""
        return self._copier.in_flight()

    def problem(self) -> str | None:
        """Why the device is lost, if it is."""
        return self._copier.problem()

    def close(self) -> None:
        """Finish and stop."""
        self._copier.close()

    def _stream(self) -> int:
        return int(self._current_stream(self._device).cuda_stream)
