"""Copies against everything that happens beside them: the streams of others, graphs, reuse, other processes."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pegaflow import _native
from tests.gpu.kv import FINGERPRINT, LAYOUTS, Cache, finish, keys, registered, reserve

DELAY_CYCLES = 150_000_000
BLOCKS = 64
SHAPES = LAYOUTS["flash_attention"]
IDS = list(range(BLOCKS))


def _stored(pool: _native.Pool, copier: _native.CudaCopier, cache: Cache) -> tuple[_native.Namespace, list[int]]:
    """The blocks of a cache in the pool, page-locked and leased."""
    namespace = pool.namespace(FINGERPRINT, 0, [cache.block_bytes])
    refs = reserve(pool, namespace, keys(BLOCKS))
    registered(copier, namespace)
    assert finish(copier, copier.save(0, cache.layout, refs, IDS, 0)).ok
    assert pool.publish(refs) == BLOCKS
    return namespace, namespace.lease(keys(BLOCKS))


def test_a_save_sees_what_the_stream_writes_before_it(
    pool: _native.Pool, copier_of: Callable[..., _native.CudaCopier]
) -> None:
    for number, backend in enumerate(("staged", "direct", "kernel")):
        copier = copier_of(backend=backend)
        cache, back = Cache(SHAPES, BLOCKS, 1), Cache(SHAPES, BLOCKS, 2)
        namespace = pool.namespace(FINGERPRINT, number, [cache.block_bytes])
        refs = reserve(pool, namespace, keys(BLOCKS))
        registered(copier, namespace)
        fresh = Cache(SHAPES, BLOCKS, 3)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES)
            for buffer, content in zip(cache.buffers, fresh.buffers, strict=True):
                buffer.copy_(content)
        job = copier.save(0, cache.layout, refs, IDS, stream.cuda_stream)
        assert copier.poll() == []
        assert finish(copier, job).ok
        pool.publish(refs)
        leased = namespace.lease(keys(BLOCKS))
        assert finish(copier, copier.load(0, back.layout, leased, IDS)).ok
        assert torch.equal(back.packed(IDS), fresh.packed(IDS)), backend
        pool.release(leased)


def test_a_load_does_not_overwrite_what_the_stream_still_reads(
    pool: _native.Pool, copier_of: Callable[..., _native.CudaCopier]
) -> None:
    source = Cache(SHAPES, BLOCKS, 1)
    namespace, leased = _stored(pool, copier_of(), source)
    for backend in ("staged", "direct", "kernel"):
        copier = copier_of(backend=backend)
        target = Cache(SHAPES, BLOCKS, 2)
        expected = target.packed(IDS)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES)
            seen = target.packed(IDS)
        job = copier.load(0, target.layout, leased, IDS, stream.cuda_stream)
        assert finish(copier, job).ok
        stream.synchronize()
        assert torch.equal(seen, expected), backend
        assert torch.equal(target.packed(IDS), source.packed(IDS)), backend
    assert namespace.lookup(keys(BLOCKS)) == BLOCKS


def test_blocks_may_be_reused_as_soon_as_their_job_is_reported(
    pool: _native.Pool, copier_of: Callable[..., _native.CudaCopier]
) -> None:
    copier, cache, back = copier_of(), Cache(SHAPES, BLOCKS, 1), Cache(SHAPES, BLOCKS, 2)
    namespace = pool.namespace(FINGERPRINT, 0, [cache.block_bytes])
    copier.register(namespace, 0)  # page-locking goes on meanwhile
    for number in range(12):
        wanted = keys(BLOCKS, f"round {number} ".encode())
        refs = reserve(pool, namespace, wanted)
        original = cache.packed(IDS)
        assert finish(copier, copier.save(0, cache.layout, refs, IDS, 0)).ok
        for buffer in cache.buffers:
            buffer.random_(0, 256)
        pool.publish(refs)
        leased = namespace.lease(wanted)
        assert finish(copier, copier.load(0, back.layout, leased, IDS, 0)).ok
        assert torch.equal(back.packed(IDS), original), f"round {number}"
        pool.release(leased)


def test_quarantined_slots_of_a_running_save_fail_and_nothing_else(
    pool: _native.Pool, copier_of: Callable[..., _native.CudaCopier]
) -> None:
    copier, cache = copier_of(), Cache(SHAPES, BLOCKS, 1)
    namespace = pool.namespace(FINGERPRINT, 0, [cache.block_bytes])
    refs = reserve(pool, namespace, keys(BLOCKS))
    registered(copier, namespace)
    torch.cuda._sleep(DELAY_CYCLES)
    job = copier.save(0, cache.layout, refs, IDS, 0)
    pool.quarantine(refs[BLOCKS // 2 :])
    done = finish(copier, job)
    assert done.failed == IDS[BLOCKS // 2 :]
    assert pool.publish(refs) == BLOCKS // 2
    assert copier.healthy()


def test_graphs_can_be_captured_while_copies_and_page_locking_go_on(
    pool: _native.Pool, copier_of: Callable[..., _native.CudaCopier]
) -> None:
    source, target = Cache(SHAPES, BLOCKS, 1), Cache(SHAPES, BLOCKS, 2)
    _, leased = _stored(pool, copier_of(), source)
    copier = copier_of(register_chunk_bytes=1 << 20)
    stop, problems = threading.Event(), []

    def keep_copying() -> None:
        while not stop.is_set():
            done = finish(copier, copier.load(0, target.layout, leased, IDS))
            problems.extend([done.error] if not done.ok else [])

    other = pool.namespace(FINGERPRINT, 7, [source.block_bytes])
    pool.abort(reserve(pool, other, keys(BLOCKS)))
    values = torch.ones(1 << 20, device="cuda")
    thread = threading.Thread(target=keep_copying)
    thread.start()
    copier.register(other, 0)
    try:
        for _ in range(20):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = values * 2 + 1
            graph.replay()
            torch.cuda.synchronize()
            assert torch.all(result == 3)
    finally:
        stop.set()
        thread.join()
    assert problems == []
    assert torch.equal(target.packed(IDS), source.packed(IDS))


def test_two_processes_share_a_gpu_and_a_pool_and_one_may_die(
    shm_dir: Path, pool: _native.Pool, copier_of: Callable[..., _native.CudaCopier]
) -> None:
    copier, source = copier_of(), Cache(SHAPES, BLOCKS, 1)
    namespace, leased = _stored(pool, copier, source)
    program = [sys.executable, "-m", "tests.gpu.sibling", str(shm_dir)]
    read = subprocess.run([*program, "read"], capture_output=True, text=True, timeout=120)
    assert (read.returncode, read.stdout) == (0, "equal\n"), read.stderr
    dying = subprocess.Popen([*program, "loop"], stdout=subprocess.PIPE, text=True)
    assert dying.stdout is not None
    assert dying.stdout.readline() == "copying\n"
    back = Cache(SHAPES, BLOCKS, 2)
    assert finish(copier, copier.load(0, back.layout, leased, IDS)).ok
    dying.kill()
    dying.wait()
    pool.reap()
    for buffer in back.buffers:
        buffer.zero_()
    assert finish(copier, copier.load(0, back.layout, leased, IDS, 0)).ok
    assert torch.equal(back.packed(IDS), source.packed(IDS))
    assert namespace.lookup(keys(BLOCKS)) == BLOCKS


@pytest.mark.parametrize(("word", "answer"), [("lose", "lost"), ("go-on", "gone on")])
def test_a_lost_device_fails_jobs_and_not_the_process(shm_dir: Path, word: str, answer: str) -> None:
    program = [sys.executable, "-m", "tests.gpu.sibling", str(shm_dir), word]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{answer}\n"), done.stderr
