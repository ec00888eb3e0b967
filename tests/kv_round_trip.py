"""Blocks go from one KV cache to a pool and from there to another, with random bytes and random block tables."""

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from pegaflow import _native
from tests.kv_tensors import Cache, Maker

if TYPE_CHECKING:
    from pegaflow.connector.copies import Copier

WAIT_MS = 240_000
GROWTH_WAIT_S = 240.0


def reserve(pool: _native.Pool, namespace: _native.Namespace, wanted: Sequence[bytes]) -> list[int]:
    """A slot for every key, in order, waiting for the pool to grow."""
    refs: list[int] = []
    deadline = time.monotonic() + GROWTH_WAIT_S
    while len(refs) < len(wanted):
        if time.monotonic() > deadline:
            raise AssertionError(f"the pool did not grow: {pool.last_grow_error()}")
        first = len(refs)
        parents = [wanted[index - 1] if index else None for index in range(first, len(wanted))]
        got = namespace.reserve(wanted[first:], parents=parents)
        refs += [ref for _, ref in got]
        if not got:
            pool.grow_ahead(namespace)
            time.sleep(0.002)
    return refs


def round_trip(
    pool: _native.Pool,
    copier: "Copier",
    make: Maker,
    device: str,
    seed: int,
    ready: Callable[[_native.Namespace], None] = lambda namespace: None,
) -> None:
    """Save blocks of one cache and load them into another of the same kind; all bytes of that one are compared with
    what plain indexing makes of it. ``ready`` is called with the namespace of each group before its first copy."""
    draw = random.Random(seed)
    source, target, expected = make(device), make(device), make(device)
    source.fill(seed)
    target.fill(seed + 1)
    expected.fill(seed + 1)
    for group, (saved_ids, loaded_ids) in enumerate(zip(tables(draw, source), tables(draw, target), strict=True)):
        layout, target_layout = source.layouts()[group], target.layouts()[group]
        assert layout.digest == target_layout.digest
        namespace = pool.namespace(bytes.fromhex(layout.digest), group, [layout.part_bytes])
        ready(namespace)
        keys = [f"{seed} {index}".encode() for index in range(len(saved_ids))]
        refs = reserve(pool, namespace, keys)
        order = draw.sample(range(len(refs)), len(refs))  # slots need not be neighbours
        blocks = _native.KVLayout(layout.regions, source.blocks)
        finish(copier, copier.save(0, blocks, [refs[i] for i in order], [saved_ids[i] for i in order]))
        assert pool.publish(refs) == len(refs)
        leased = namespace.lease(keys)
        blocks = _native.KVLayout(target_layout.regions, target.blocks)
        finish(copier, copier.load(0, blocks, [leased[i] for i in order], [loaded_ids[i] for i in order]))
        pool.release(leased)
        expected.assign(group, loaded_ids, source, saved_ids)
    assert all(torch.equal(now, then) for now, then in zip(target.backings, expected.backings, strict=True))


def tables(draw: random.Random, cache: Cache) -> list[list[int]]:
    """Block ids of each group: distinct, in random order, and not all of them."""
    ids = draw.sample(range(cache.blocks), cache.blocks * 3 // 4)
    share = len(ids) // len(cache.groups)
    return [ids[group * share : (group + 1) * share] for group in range(len(cache.groups))]


def finish(copier: "Copier", job: int) -> None:
    """Wait for a job, the only one, that has to succeed."""
    (done,) = copier.wait(WAIT_MS)
    assert (done.job, done.ok, done.failed, done.error) == (job, True, [], None)
