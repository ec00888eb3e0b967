"""A GPU's side of the benchmarks: plain copies to compare with, and a load that steps as decoding does."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks._common import median, seconds_of

GIB = 1 << 30
ROUNDS = 5
WARM_UP_SECONDS = 0.3


@dataclass(frozen=True)
class Beside:
    """What a copy did while a load was stepping, and what it did to the steps."""

    gb_per_s: float
    step_ms: float
    step_ms_worst: float


class DecodeLoad:
    """Steps of a model of some 11 GB at batch 8: one graph of matrix products that are bound by memory."""

    LAYERS, WIDTH, INNER, BATCH = 32, 4096, 14_336, 8

    def __init__(self) -> None:
        def weights(rows: int, columns: int) -> list[torch.Tensor]:
            shape = (rows, columns)
            return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") / rows**0.5 for _ in range(self.LAYERS)]

        self._up, self._down = weights(self.WIDTH, 2 * self.INNER), weights(self.INNER, self.WIDTH)
        self._state = torch.randn((self.BATCH, self.WIDTH), dtype=torch.bfloat16, device="cuda")
        self._forward()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = self._forward()
        self._done = torch.cuda.Event()

    def _forward(self) -> torch.Tensor:
        state = self._state
        for up, down in zip(self._up, self._down, strict=True):
            gate, value = (state @ up).chunk(2, dim=1)
            state = torch.nn.functional.silu(gate) * value @ down
        return state

    def steps(self, seconds: float) -> list[float]:
        """Milliseconds of each step, for about so long."""
        times, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            self._graph.replay()
            self._done.record()
            self._done.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    def launches(self, seconds: float) -> list[float]:
        """Milliseconds that launches of single kernels keep the CPU, for about so long."""
        times, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            self._state.add_(0)
            times.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
        return times

    def beside(self, copy: Callable[[], int], seconds: float = 0.6) -> Beside:
        """Step while another thread calls ``copy``, which returns bytes, over and over."""
        stop, copied, problems = threading.Event(), 0, []
        copy_seconds = 0.0

        def keep_copying() -> None:
            nonlocal copied, copy_seconds
            try:
                copy()
                start = time.perf_counter()
                while not stop.is_set():
                    copied += copy()
                copy_seconds = time.perf_counter() - start
            except BaseException as error:
                problems.append(error)

        thread = threading.Thread(target=keep_copying)
        thread.start()
        self.steps(WARM_UP_SECONDS)
        times = self.steps(seconds)
        stop.set()
        thread.join()
        if problems:
            raise problems[0]
        return Beside(copied / copy_seconds / 1e9, median(times), max(times))


def contiguous_gb_per_s() -> tuple[float, float, float]:
    """One contiguous copy of 1 GiB from and to page-locked memory: to the device, to the host, both ways in sum."""
    host = [torch.empty(GIB, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy(*ways: int) -> None:
        for way in ways:
            with torch.cuda.stream(streams[way]):
                target, source = (device[0], host[0]) if way == 0 else (host[1], device[1])
                target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    def speed(*ways: int) -> float:
        copy(*ways)
        return len(ways) * GIB / median([seconds_of(lambda: copy(*ways)) for _ in range(ROUNDS)]) / 1e9

    return speed(0), speed(1), speed(0, 1)


def contiguous_beside(load: DecodeLoad) -> tuple[Beside, Beside]:
    """The same beside a load: to the device, to the host."""
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()

    def copy(target: torch.Tensor, source: torch.Tensor) -> int:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.synchronize()
        return GIB

    return load.beside(lambda: copy(device, host)), load.beside(lambda: copy(host, device))
