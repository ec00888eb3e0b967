"""KV caches on the device in the shapes that occur, and what the tests do with them."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from pegaflow import _native
from tests.kv_round_trip import WAIT_MS, reserve

__all__ = ["FINGERPRINT", "LAYOUTS", "Cache", "finish", "keys", "registered", "reserve", "slot_bytes", "synchronize"]

DEVICE = "cuda"
FINGERPRINT = b"tests on a GPU".ljust(32, b"\0")
KIB = 1 << 10

LAYOUTS: dict[str, list[tuple[int, int]]] = {
    "flash_attention": [(32 * KIB, 32 * KIB)] * 32,
    "flashinfer": [(64 * KIB, 64 * KIB)] * 16,
    "mla": [(18 * KIB, 18 * KIB)] * 27,
    "cross_layer": [(2048 * KIB, 2048 * KIB)],
    "packed_pages": [(96 * KIB, 40 * KIB), (96 * KIB, 24 * KIB), (96 * KIB, 8 * KIB)] * 4,
    "fp8_with_scales": [(8 * KIB, 8 * KIB), (64, 64)] * 24,
    "scales_of_12_bytes": [(4 * KIB, 4 * KIB), (12, 12)] * 10,
    "tensor_parallel_70b": [(4 * KIB, 4 * KIB)] * 80,
    "longer_than_a_ring_buffer": [(9000 * KIB, 9000 * KIB)] * 3,
    "odd": [(1003, 1001), (77, 77)],
}
"""By name: ``(stride_bytes, length_bytes)`` of each region."""


class Cache:
    """One buffer of random bytes per region."""

    def __init__(self, shapes: Sequence[tuple[int, int]], blocks: int, seed: int) -> None:
        generator = torch.Generator(device=DEVICE).manual_seed(seed)
        self.shapes, self.blocks = list(shapes), blocks
        self.buffers = [
            torch.randint(0, 256, (blocks, stride), dtype=torch.uint8, device=DEVICE, generator=generator)
            for stride, _ in shapes
        ]
        regions = [
            (buffer.data_ptr(), stride, length) for buffer, (stride, length) in zip(self.buffers, shapes, strict=True)
        ]
        self.layout = _native.KVLayout(regions, blocks)
        synchronize()

    @property
    def block_bytes(self) -> int:
        """Bytes of a packed block."""
        return sum(length for _, length in self.shapes)

    def packed(self, ids: Sequence[int]) -> torch.Tensor:
        """The bytes of blocks, packed; on the device."""
        rows = [buffer[list(ids), :length] for buffer, (_, length) in zip(self.buffers, self.shapes, strict=True)]
        return torch.cat(rows, dim=1)

    def copies(self) -> list[torch.Tensor]:
        """All bytes as they are now."""
        return [buffer.clone() for buffer in self.buffers]

    def differs_only_in(self, ids: Sequence[int], before: Sequence[torch.Tensor]) -> bool:
        """Whether nothing but these blocks changed, not even between their rows."""
        for now, then, (_, length) in zip(self.buffers, before, self.shapes, strict=True):
            expected = then.clone()
            expected[list(ids), :length] = now[list(ids), :length]
            if not torch.equal(now, expected):
                return False
        return True


def synchronize() -> None:
    """Wait for what the tests themselves have queued."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def keys(count: int, prefix: bytes = b"key") -> list[bytes]:
    """Distinct keys of one chain."""
    return [prefix + index.to_bytes(8, "big") for index in range(count)]


def finish(copier: _native.CudaCopier, job: int) -> _native.CopyDone:
    """Wait for a job, the only one."""
    (done,) = copier.wait(WAIT_MS)
    assert done.job == job
    return done


def registered(copier: _native.CudaCopier, namespace: _native.Namespace, part: int = 0) -> None:
    """Page-lock all segments of a namespace now."""
    copier.register(namespace, part)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        progress = copier.progress()
        assert progress["problem"] is None
        if progress["segments"] and progress["bytes_registered"] == progress["bytes_seen"]:
            return
        time.sleep(0.002)
    raise AssertionError(f"segments are not page-locked: {copier.progress()}")


def slot_bytes(pool: _native.Pool, ref: int, part: int = 0) -> bytes:
    """What a slot holds, read from the pool's files."""
    place = pool.locate(ref, part)
    assert place is not None
    name, offset, length = place
    with Path(name).open("rb") as file:
        file.seek(offset)
        return file.read(length)
