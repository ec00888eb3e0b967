"""Bytes out are bytes in: every layout by every backend, on random data and random block tables."""

import random
from collections.abc import Callable

import pytest
import torch

from pegaflow import _native
from tests.gpu.kv import FINGERPRINT, LAYOUTS, Cache, finish, keys, registered, reserve, slot_bytes

BACKENDS = ("auto", "staged", "direct", "kernel")
BYTES = 300 << 20


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_come_back_equal(
    pool: _native.Pool, copier_of: Callable[..., _native.CudaCopier], name: str, backend: str
) -> None:
    source, target = Cache(LAYOUTS[name], _blocks(name), 1), Cache(LAYOUTS[name], _blocks(name), 2)
    namespace = pool.namespace(FINGERPRINT, 0, [source.block_bytes])
    for locked in (False, True):
        copier = copier_of(backend=backend, ring_buffer_bytes=4 << 20, copy_streams=1 + locked)
        _round_trip(pool, namespace, copier, source, target, locked=locked)
        copier.close()


def _round_trip(
    pool: _native.Pool,
    namespace: _native.Namespace,
    copier: _native.CudaCopier,
    source: Cache,
    target: Cache,
    *,
    locked: bool,
) -> None:
    draw = random.Random(source.blocks + locked)
    count = source.blocks * 3 // 4
    source_ids, target_ids = draw.sample(range(source.blocks), count), draw.sample(range(source.blocks), count)
    wanted = keys(count, b"locked" if locked else b"loose")
    refs = reserve(pool, namespace, wanted)
    order = draw.sample(range(count), count)  # slots need not be neighbours
    if locked:
        registered(copier, namespace)
    saved = finish(copier, copier.save(0, source.layout, [refs[i] for i in order], [source_ids[i] for i in order], 0))
    assert (saved.ok, saved.error, saved.bytes) == (True, None, count * source.block_bytes)
    assert pool.publish(refs) == count
    leased = namespace.lease(wanted)
    for position in (0, count // 2, count - 1):
        assert slot_bytes(pool, leased[position]) == bytes(source.packed([source_ids[position]]).cpu().numpy())
    before = target.copies()
    loaded = finish(copier, copier.load(0, target.layout, [leased[i] for i in order], [target_ids[i] for i in order]))
    assert (loaded.ok, loaded.error) == (True, None)
    assert torch.equal(target.packed(target_ids), source.packed(source_ids))
    assert target.differs_only_in(target_ids, before)
    pool.release(leased)
    stats = copier.stats()
    assert (stats["bytes_bounced"] == 0) == locked


def _blocks(name: str) -> int:
    block_bytes = sum(stride for stride, _ in LAYOUTS[name])
    return max(8, min(400, BYTES // block_bytes))
