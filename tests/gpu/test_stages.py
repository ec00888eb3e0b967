"""Loads in stages: work that waits for a stage, and for nothing else, sees all bytes of that stage."""

import itertools
import time
from collections.abc import Callable

import pytest
import torch

from pegaflow import _native
from tests.gpu.kv import FINGERPRINT, LAYOUTS, Cache, finish, keys, registered, reserve

STAGES = 4
ROUNDS = 6
DELAY_CYCLES = 20_000_000
BLOCKS = 64
QUEUED_WAIT_S = 60.0


@pytest.mark.parametrize("backend", ["auto", "staged", "direct", "kernel"])
@pytest.mark.parametrize("name", ["flash_attention", "flashinfer", "mla", "fp8_with_scales", "tensor_parallel_70b"])
def test_a_stream_behind_a_stage_sees_its_bytes(
    pool: _native.Pool, copier_of: Callable[..., _native.CudaCopier], name: str, backend: str
) -> None:
    source, target = Cache(LAYOUTS[name], BLOCKS, 1), Cache(LAYOUTS[name], BLOCKS, 2)
    namespace = pool.namespace(FINGERPRINT, 0, [source.block_bytes])
    copier = copier_of(backend=backend)
    refs = reserve(pool, namespace, keys(BLOCKS))
    registered(copier, namespace)
    ids = list(range(BLOCKS))
    assert finish(copier, copier.save(0, source.layout, refs, ids, 0)).ok
    assert pool.publish(refs) == BLOCKS
    leased = namespace.lease(keys(BLOCKS))
    ends = list(itertools.accumulate(length for _, length in target.shapes))
    last_regions = [len(ends) * (stage + 1) // STAGES - 1 for stage in range(STAGES)]
    stream = torch.cuda.Stream()
    for _ in range(ROUNDS):
        for buffer in target.buffers:
            buffer.zero_()
        torch.cuda._sleep(DELAY_CYCLES)  # so that the load cannot be over before it is asked for
        job = copier.load(0, target.layout, leased, ids, 0, [ends[region] for region in last_regions])
        wait_until_queued(copier, job)
        seen: list[torch.Tensor] = []
        for stage, last in enumerate(last_regions):
            copier.wait_stage(job, stage, stream.cuda_stream)
            with torch.cuda.stream(stream):
                seen += [buffer.clone() for buffer in target.buffers[len(seen) : last + 1]]
        assert finish(copier, job).ok
        stream.synchronize()
        for early, buffer, (_, length) in zip(seen, source.buffers, source.shapes, strict=True):
            assert torch.equal(early[:, :length], buffer[:, :length])
    pool.release(leased)


def wait_until_queued(copier: _native.CudaCopier, job: int) -> None:
    """Until the device has been told of the whole load."""
    deadline = time.monotonic() + QUEUED_WAIT_S
    while job not in copier.take_queued():
        assert time.monotonic() < deadline, "the load was never handed to the device"
