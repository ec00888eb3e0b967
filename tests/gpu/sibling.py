"""Another process for the tests: ``python -m tests.gpu.sibling SHM_DIR read|loop|lose|go-on``."""

import sys
from collections.abc import Sequence

import torch

from pegaflow import _native
from tests.engine_races import STEPS_MAX
from tests.gpu.engine import DEVICE, engine_on
from tests.gpu.kv import FINGERPRINT, LAYOUTS, Cache, finish, keys, registered, reserve
from tests.unit.mini_engine import HostMemory, MiniEngine

BLOCKS = 64
SHAPES = LAYOUTS["flash_attention"]
IDS = list(range(BLOCKS))


def read(shm_dir: str, *, forever: bool) -> None:
    """Load what the parent stored, and compare it with what the parent made it of."""
    pool = _native.Pool.open("gpu", shm_dir=shm_dir, create=False)
    expected, target = Cache(SHAPES, BLOCKS, 1), Cache(SHAPES, BLOCKS, 5)
    namespace = pool.namespace(FINGERPRINT, 0, [expected.block_bytes])
    copier = _native.CudaCopier(pool)
    copier.register(namespace, 0)
    leased = namespace.lease(keys(BLOCKS))
    said = False
    while True:
        done = finish(copier, copier.load(0, target.layout, leased, IDS))
        if not done.ok or not torch.equal(target.packed(IDS), expected.packed(IDS)):
            raise SystemExit(f"other bytes came: {done.failed} {done.error}")
        if not forever:
            break
        if not said:
            say("copying")
            said = True
    pool.release(leased)
    copier.close()
    pool.close()
    say("equal")


def lose(shm_dir: str) -> None:
    """Make the kernel touch memory that is not there; every job has to fail, and nothing else may happen."""
    pool = _native.Pool.open("lost", shm_dir=shm_dir, pool_bytes=256 << 20, segment_bytes=64 << 20)
    cache = Cache(SHAPES, BLOCKS, 1)
    namespace = pool.namespace(FINGERPRINT, 0, [cache.block_bytes])
    refs = reserve(pool, namespace, keys(16))
    copier = _native.CudaCopier(pool)
    registered(copier, namespace)
    nowhere = _native.KVLayout([(4096 + (index << 20), length, length) for index, (_, length) in enumerate(SHAPES)], 16)
    for layout in (nowhere, cache.layout):
        done = finish(copier, copier.save(0, layout, refs, range(16), 0))
        if done.ok or len(done.failed) != 16 or "700" not in (done.error or "") or copier.healthy():
            raise SystemExit(f"{done.failed} {done.error} {copier.problem()}")
    pool.quarantine(refs)
    copier.close()
    pool.close()
    say("lost")


class ElsewhereMemory(HostMemory):
    """A cache that is said to be on the device. Nothing is left of a context in which a kernel went astray."""

    device = DEVICE
    part_bytes = 32 << 10


def nowhere(regions: Sequence[tuple[int, int, int]], blocks: int) -> _native.KVLayout:
    """A layout of memory that is not there."""
    return _native.KVLayout([(4096, stride, length) for _, stride, length in regions], blocks)


def go_on(shm_dir: str) -> None:
    """An engine whose copies make the device fail: the cache goes off, each request ends all the same."""
    pool = _native.Pool.open("going-on", shm_dir=shm_dir, pool_bytes=256 << 20, segment_bytes=64 << 20)
    engine = engine_on(pool, "staged", kind=MiniEngine, memory=ElsewhereMemory, layout=nowhere)
    requests = [engine.add(list(range(first, first + 40)), more=4) for first in (0, 100)]
    engine.run(STEPS_MAX)
    off = engine.store.off or ""
    if "700" not in off or any(request.num_tokens != 44 for request in requests):
        raise SystemExit(f"off: {off!r}, tokens: {[request.num_tokens for request in requests]}")
    engine.assert_nothing_held()
    say("gone on")


def say(word: str) -> None:
    """Tell the parent."""
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[2] == "lose":
        lose(sys.argv[1])
    elif sys.argv[2] == "go-on":
        go_on(sys.argv[1])
    else:
        read(sys.argv[1], forever=sys.argv[2] == "loop")
