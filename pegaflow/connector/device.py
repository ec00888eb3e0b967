"""Copies to and from the memory of one CUDA device, in the order of vLLM's own work on it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegaflow import _native
from pegaflow.config import ConnectorConfig
from pegaflow.connector.log import logger

if TYPE_CHECKING:
    from pegaflow._native import CopyDone, KVLayout, Namespace, Pool

RING_BUFFERS = 3
"""Buffers of one direction."""

RING_UNIT_BYTES = 1 << 16
"""A buffer is a multiple of this."""

MOVED = ("bytes_bounced", "bytes_loaded", "bytes_saved", "load_moving_us", "save_moving_us")
"""What a copier counts of its copies."""


class DeviceCopier:
    """The native copier of one device; every job starts behind what vLLM has queued on its current stream."""

    def __init__(self, pool: "Pool", device: str, config: ConnectorConfig) -> None:
        """``device``: as PyTorch names it, such as ``"cuda:0"``. Raises ``DeviceError`` if it cannot be used."""
        import torch

        self._device = torch.device(device)
        self._current_stream = torch.cuda.current_stream
        self._copier = _native.CudaCopier(
            pool,
            self._device.index or 0,
            backend=config.transfer_backend,
            ctas=config.cuda_ctas,
            ring_buffers=RING_BUFFERS,
            ring_buffer_bytes=config.cuda_ring_bytes // (2 * RING_BUFFERS * RING_UNIT_BYTES) * RING_UNIT_BYTES,
            direct_save_bytes_min=config.direct_save_bytes_min,
            save_bytes_per_second_max=config.save_bytes_per_second_max,
        )
        self._expected: dict[tuple[int, int], Namespace] = {}
        logger.info(
            "PegaFlow: copies to and from %s take %d MB of its memory, beside vLLM's KV cache and what "
            "gpu_memory_utilization counts: if memory runs out, lower that or pegaflow.cuda_ring_size.",
            device, self._copier.stats()["ring_bytes"] // 10**6,
        )  # fmt: skip

    def expect(self, namespace: "Namespace", part: int) -> None:
        """Page-lock what this rank probably needs, before it is known; see ``forget_expected``."""
        self._expected[namespace.id, part] = namespace
        self._copier.register(namespace, part)

    def register(self, namespace: "Namespace", part: int) -> None:
        """Page-lock this rank's part of the blocks in the background."""
        self._copier.register(namespace, part)
        self._expected.pop((namespace.id, part), None)

    def forget_expected(self) -> None:
        """All that is needed is registered: what was only expected is not."""
        for (_, part), namespace in self._expected.items():
            self._copier.unregister(namespace, part)
        self._expected.clear()

    def set_stepping(self, stepping: bool) -> None:
        """A step of the model begins or ends: beside it, page-locking holds back."""
        self._copier.set_stepping(stepping)

    def progress(self) -> dict[str, int]:
        """``bytes_registered`` now, ``bytes_total`` page-locked so far, ``bytes_bounced`` for want of it; and the bytes
        and microseconds of ``CudaCopier.stats`` by direction."""
        progress, stats = self._copier.progress(), self._copier.stats()
        return {
            "bytes_registered": progress["bytes_registered"],
            "bytes_total": progress["bytes_total"],
            **{name: stats[name] for name in MOVED},
        }

    def save(self, part: int, layout: "KVLayout", refs: Sequence[int], block_ids: Sequence[int]) -> int:
        """Start copying blocks into reserved slots, behind the kernels that fill them."""
        return self._copier.save(part, layout, refs, block_ids, self.stream())

    def load(
        self,
        part: int,
        layout: "KVLayout",
        refs: Sequence[int],
        block_ids: Sequence[int],
        stage_ends: Sequence[int] | None = None,
    ) -> int:
        """Start copying leased slots into blocks, behind the kernels that may still read what the blocks held; in
        stages that streams can wait for if ``stage_ends`` says where in a block they end."""
        return self._copier.load(part, layout, refs, block_ids, self.stream(), stage_ends)

    def take_queued(self) -> list[int]:
        """Loads in stages of which all was handed to the device since the last call."""
        return self._copier.take_queued()

    def wait_stage(self, copy: int, stage: int, stream: int) -> None:
        """Let a stream wait for a stage of a load."""
        self._copier.wait_stage(copy, stage, stream)

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

    def stream(self) -> int:
        """The stream that vLLM's work goes to at the moment."""
        return int(self._current_stream(self._device).cuda_stream)
