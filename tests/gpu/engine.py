"""The small engine of the tests, its caches in device memory: steps fill blocks behind kernels that delay them."""

import itertools
import time
from typing import Any

import torch

from pegaflow import _native
from pegaflow.config import ConnectorConfig
from pegaflow.connector.copies import NativeTypes
from pegaflow.connector.device import DeviceCopier
from pegaflow.connector.geometry import Geometry
from tests.unit.mini_engine import SINGLE, MiniEngine

DEVICE = "cuda:0"
DELAY_CYCLES_MAX = 3_000_000
"""About a millisecond and a half: some steps are delayed by that, others not at all."""
EMPTY_STEP_S = 0.0002
GROWTH_WAIT_S = 60.0
SLOW_BYTES_PER_SECOND = 200_000_000
"""A save then takes as long as a delay or more, so blocks are wanted again long before they are saved."""


class DeviceMemory:
    """The cache of one group on the device; writes are queued on the current stream, as a forward pass is."""

    device = DEVICE
    part_bytes = 32 << 10
    """Bytes of a block."""

    def __init__(self, size: int) -> None:
        self._tensor = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        self.address = self._tensor.data_ptr()

    def write(self, offset: int, data: bytes) -> None:
        """Bytes from ``offset`` on, whenever the stream comes to it."""
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8).pin_memory()
        self._tensor[offset : offset + len(data)].copy_(content, non_blocking=True)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from ``offset`` on, behind all that was queued."""
        return bytes(self._tensor[offset : offset + size].cpu().numpy())


class DeviceEngine(MiniEngine):
    """An engine whose steps take the device a while, as those of a model do, and that runs one step ahead of it."""

    _delays = itertools.cycle((0.0, 1.0, 0.3, 0.0, 0.6))
    _last_step: torch.cuda.Event | None = None

    def _run_workers(self, plan: Any, scheduled: Any) -> None:
        if not scheduled:
            time.sleep(EMPTY_STEP_S)
            super()._run_workers(plan, scheduled)
            return
        torch.cuda._sleep(int(next(self._delays) * DELAY_CYCLES_MAX))
        super()._run_workers(plan, scheduled)
        last, self._last_step = self._last_step, torch.cuda.Event()
        self._last_step.record()
        if last is not None:
            last.synchronize()


def engine_on(
    pool: _native.Pool,
    backend: str,
    save_rate: int = 0,
    geometry: Geometry = SINGLE,
    *,
    kind: type[MiniEngine] = DeviceEngine,
    memory: Any = DeviceMemory,
    layout: Any = _native.KVLayout,
    **options: Any,
) -> MiniEngine:
    """An engine on a pool that has room for its first blocks. ``save_rate``: bytes per second at most, 0: no limit."""

    def attach(name: str, shm_dir: str) -> _native.Pool:
        return _native.Pool.open(name, shm_dir=shm_dir, create=False)

    config = ConnectorConfig(transfer_backend=backend, save_bytes_per_second_max=save_rate)
    native = NativeTypes(attach, lambda opened, device: DeviceCopier(opened, device, config), layout)
    engine = kind(geometry, pool, native=native, memory=memory, **options)
    deadline = time.monotonic() + GROWTH_WAIT_S
    while not all(space.stats()["slots_free"] for space in (engine.store.namespaces() or {}).values()):
        assert time.monotonic() < deadline, f"the pool did not grow: {pool.last_grow_error()}"
    return engine
