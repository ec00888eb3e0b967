"""What a process does to get ready, beside what vLLM does meanwhile: page-locking and copiers against graphs."""

import threading
from collections.abc import Callable

import torch

from pegaflow import _native
from tests.gpu.kv import FINGERPRINT, LAYOUTS, Cache, finish, keys, registered, reserve

BLOCKS = 64
SHAPES = LAYOUTS["flash_attention"]
IDS = list(range(BLOCKS))
CAPTURES = 40
ROUNDS = 6


def test_getting_ready_does_not_disturb_graphs_that_are_captured_meanwhile(pool: _native.Pool) -> None:
    cache = Cache(SHAPES, BLOCKS, 1)
    namespace = pool.namespace(FINGERPRINT, 0, [cache.block_bytes])
    pool.abort(reserve(pool, namespace, keys(BLOCKS)))
    problems: list[BaseException] = []

    def get_ready() -> None:
        try:
            for _ in range(ROUNDS):
                copier = _native.CudaCopier(pool, 0)
                registered(copier, namespace)
                copier.unregister(namespace, 0)
                copier.close()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=get_ready)
    thread.start()
    weight = torch.randn((512, 512), device="cuda")
    expected = weight @ weight @ weight
    captured = 0
    while captured < CAPTURES or thread.is_alive():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = weight @ weight
            result = result @ weight
        graph.replay()
        torch.cuda.synchronize()
        assert torch.allclose(result, expected, rtol=1e-2, atol=1e-1)
        captured += 1
    thread.join()
    assert not problems, problems


def test_loads_are_right_while_their_memory_is_being_page_locked_and_unlocked(
    pool: _native.Pool, copier_of: Callable[..., _native.CudaCopier]
) -> None:
    source = Cache(SHAPES, BLOCKS, 1)
    namespace = pool.namespace(FINGERPRINT, 0, [source.block_bytes])
    refs = reserve(pool, namespace, keys(BLOCKS))
    saver = copier_of(register=False)
    assert finish(saver, saver.save(0, source.layout, refs, IDS, 0)).ok
    assert pool.publish(refs) == BLOCKS
    leased = namespace.lease(keys(BLOCKS))
    copier = copier_of(register_chunk_bytes=1 << 20)
    for number in range(ROUNDS):
        target = Cache(SHAPES, BLOCKS, 2 + number)
        copier.set_stepping(number % 2 == 0)
        copier.register(namespace, 0)
        for _ in range(3):
            assert finish(copier, copier.load(0, target.layout, leased, IDS, 0)).ok
            assert torch.equal(target.packed(IDS), source.packed(IDS)), number
            target.buffers[0].zero_()
        copier.unregister(namespace, 0)
    pool.release(leased)
