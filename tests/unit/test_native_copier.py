"""The host copier over a real pool."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegaflow import _native
from pegaflow.errors import ForkedProcess, InvalidArgument, PoolClosed
from tests.patience import PAUSE_SECONDS
from tests.unit.native_pools import FINGERPRINT, address_of, keys, open_pool, reserve_all

PART_BYTES = 6144
BLOCKS = 40
WAIT_MS = 240_000
MANY = 10_000
"""Times all blocks: 2.5 GB."""
RING_SECONDS = 0.02
ATTEMPTS_MAX = 20


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[_native.Pool]:
    opened = open_pool(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def namespace(pool: _native.Pool) -> _native.Namespace:
    return pool.namespace(FINGERPRINT, 0, [PART_BYTES])


def layers(buffer: bytearray) -> _native.KVLayout:
    """Three layers of unequal fragments, each layer's blocks in a row."""
    regions, offset = [], 0
    for length in (4096, 1024, 1024):
        regions.append((address_of(buffer) + offset, length, length))
        offset += length * BLOCKS
    return _native.KVLayout(regions, BLOCKS)


def block_of(buffer: bytearray, index: int) -> bytes:
    """The bytes of one block of ``layers``."""
    parts, offset = [], 0
    for length in (4096, 1024, 1024):
        parts.append(bytes(buffer[offset + index * length : offset + (index + 1) * length]))
        offset += length * BLOCKS
    return b"".join(parts)


def only(copier: _native.HostCopier, job: int) -> _native.CopyDone:
    (done,) = copier.wait(WAIT_MS)
    assert done.job == job
    return done


def stored(pool: _native.Pool, namespace: _native.Namespace, source: bytearray, *, checksum: bool = True) -> list[int]:
    """Blocks of ``source`` in the pool, leased."""
    refs = reserve_all(namespace, keys(BLOCKS))
    copier = _native.HostCopier(pool, threads=2, checksum=checksum)
    assert only(copier, copier.save(0, layers(source), refs, range(BLOCKS))).ok
    copier.close()
    assert pool.publish(refs) == BLOCKS
    return namespace.lease(keys(BLOCKS))


@pytest.mark.parametrize("checksum", [True, False])
def test_blocks_come_back_equal_in_any_order(pool: Any, namespace: Any, checksum: bool) -> None:
    source, target = bytearray(os.urandom(PART_BYTES * BLOCKS)), bytearray(PART_BYTES * BLOCKS)
    refs = stored(pool, namespace, source, checksum=checksum)
    ids = random.Random(1).sample(range(BLOCKS), BLOCKS)
    copier = _native.HostCopier(pool, checksum=checksum)
    done = only(copier, copier.load(0, layers(target), refs, ids))
    assert (done.ok, done.failed, done.bytes) == (True, [], PART_BYTES * BLOCKS)
    assert done.seconds > 0
    assert all(block_of(target, place) == block_of(source, index) for index, place in enumerate(ids))
    pool.release(refs)


def test_stale_ref_fails_alone(pool: Any, namespace: Any) -> None:
    source, target = bytearray(os.urandom(PART_BYTES * BLOCKS)), bytearray(PART_BYTES * BLOCKS)
    refs = stored(pool, namespace, source)
    wrong = list(refs)
    wrong[7] += 1 << 32
    copier = _native.HostCopier(pool)
    done = only(copier, copier.load(0, layers(target), wrong, range(BLOCKS)))
    assert (done.ok, done.failed) == (False, [7])
    assert block_of(target, 7) == bytes(PART_BYTES)
    assert block_of(target, 8) == block_of(source, 8)


def test_flipped_byte_is_found_by_its_checksum(pool: Any, namespace: Any) -> None:
    source, target = bytearray(os.urandom(PART_BYTES * BLOCKS)), bytearray(PART_BYTES * BLOCKS)
    refs = stored(pool, namespace, source)
    segment, offset, length = pool.locate(refs[3], 0)
    assert length == PART_BYTES
    with open(segment, "r+b") as file:
        file.seek(offset + length - 1)
        last = file.read(1)[0]
        file.seek(offset + length - 1)
        file.write(bytes([last ^ 1]))
    copier = _native.HostCopier(pool)
    assert only(copier, copier.load(0, layers(target), refs, range(BLOCKS))).failed == [3]


def test_slot_of_another_size_is_refused(pool: Any, namespace: Any) -> None:
    refs = reserve_all(namespace, keys(2))
    buffer = bytearray(4096)
    layout = _native.KVLayout([(address_of(buffer), 2048, 2048)], 2)
    copier = _native.HostCopier(pool)
    assert only(copier, copier.save(0, layout, refs, [0, 1])).failed == [0, 1]
    assert pool.publish(refs) == 0


def test_nothing_to_copy_completes_at_once(pool: Any) -> None:
    copier = _native.HostCopier(pool)
    done = only(copier, copier.load(0, layers(bytearray(PART_BYTES * BLOCKS)), [], []))
    assert (done.ok, done.bytes) == (True, 0)


def test_wait_returns_when_nothing_is_in_flight(pool: Any) -> None:
    copier = _native.HostCopier(pool)
    assert copier.wait(1 << 40) == []  # for longer than any machine runs, if it waited
    assert copier.poll() == []


def test_jobs_started_by_many_threads_complete_once_each(pool: Any, namespace: Any) -> None:
    source = bytearray(os.urandom(PART_BYTES * BLOCKS))
    refs = stored(pool, namespace, source)
    target = bytearray(PART_BYTES * BLOCKS)
    layout = layers(target)
    copier = _native.HostCopier(pool, threads=3)
    jobs: list[int] = []

    def start(first: int) -> None:
        jobs.extend(copier.load(0, layout, [refs[index]], [index]) for index in range(first, BLOCKS, 4))

    threads = [threading.Thread(target=start, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen: list[int] = []
    while len(seen) < BLOCKS:
        done = copier.wait(WAIT_MS)
        assert done
        assert all(one.ok for one in done)
        seen += [one.job for one in done]
    assert sorted(seen) == sorted(jobs)
    assert copier.in_flight() == 0
    assert all(block_of(target, index) == block_of(source, index) for index in range(BLOCKS))


def test_closing_finishes_what_was_started(pool: Any, namespace: Any) -> None:
    refs = stored(pool, namespace, bytearray(os.urandom(PART_BYTES * BLOCKS)))
    target = bytearray(PART_BYTES * BLOCKS)
    copier = _native.HostCopier(pool, threads=1)
    jobs = [copier.load(0, layers(target), refs, range(BLOCKS)) for _ in range(5)]
    copier.close()
    copier.close()
    assert [done.job for done in copier.poll() if done.ok] == jobs
    with pytest.raises(PoolClosed):
        copier.load(0, layers(target), refs, range(BLOCKS))


def test_pool_stays_attached_until_its_copier_is_closed(pool: Any, namespace: Any) -> None:
    source, target = bytearray(os.urandom(PART_BYTES * BLOCKS)), bytearray(PART_BYTES * BLOCKS)
    refs = stored(pool, namespace, source)
    copier = _native.HostCopier(pool)
    pool.close()
    assert only(copier, copier.load(0, layers(target), refs, range(BLOCKS))).ok
    assert target == source
    copier.close()


def test_copier_of_the_parent_is_refused_in_a_forked_child(pool: Any) -> None:
    copier = _native.HostCopier(pool)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            copier.poll()
        except ForkedProcess:
            del copier
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert copier.poll() == []


class RangError(Exception):
    """The signal came."""


def is_ended_by_a_signal(copier: Any, job: int) -> bool:
    """Whether a signal during a wait ends it. Not if the job was over before the signal came."""
    waiting = False

    def ring(*_: object) -> None:
        if waiting:
            raise RangError
        signal.setitimer(signal.ITIMER_REAL, RING_SECONDS)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, RING_SECONDS)
        # Between these two no signal is seen.
        waiting = True
        copier.wait(WAIT_MS)
        while True:  # the signal of this attempt is still to come
            time.sleep(PAUSE_SECONDS)
    except RangError:
        return int(copier.in_flight()) == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def lets_others_run(copier: Any, job: int) -> bool:
    """Whether another thread has run between the beginning and the end of a wait. Not if it had no processor."""
    waiting, over, seen = False, threading.Event(), list[bool]()

    def look() -> None:
        while not over.is_set():
            if waiting and copier.in_flight() == 1:
                seen.append(True)
                return
            time.sleep(0.001)

    thread = threading.Thread(target=look)
    thread.start()
    # Between these two no other thread has a turn unless the wait gives it one.
    waiting = True
    done = copier.wait(WAIT_MS)
    over.set()
    thread.join()
    assert [one.job for one in done if one.ok] == [job]
    return bool(seen)


@pytest.mark.parametrize("holds", [is_ended_by_a_signal, lets_others_run], ids=lambda holds: holds.__name__)
def test_a_wait_keeps_nobody_from_running(pool: Any, namespace: Any, holds: Any) -> None:
    refs = stored(pool, namespace, bytearray(PART_BYTES * BLOCKS))
    target = bytearray(PART_BYTES * BLOCKS)
    # A job that is over too soon shows nothing, so the next one is longer.
    for attempt in range(ATTEMPTS_MAX):
        many = MANY << min(attempt, 2)
        copier = _native.HostCopier(pool, threads=1)
        held = holds(copier, copier.load(0, layers(target), refs * many, list(range(BLOCKS)) * many))
        copier.close()
        if held:
            return
    raise AssertionError("nobody ever ran during a wait")


@pytest.mark.parametrize(
    ("refs", "ids", "message"),
    [
        ([1], [], "equal length"),
        ([1], [BLOCKS], "outside the layout"),
        ([1], [-1], r"block_ids\[0\] is -1"),
        ([1], [2**32], r"block_ids\[0\]"),
        (["1"], [0], r"refs\[0\] is '1'"),
        (1, [0], "refs is of type int"),
    ],
)
def test_arguments_that_fit_no_block_are_refused(pool: Any, refs: Any, ids: Any, message: str) -> None:
    copier = _native.HostCopier(pool)
    with pytest.raises(InvalidArgument, match=message):
        copier.save(0, layers(bytearray(PART_BYTES * BLOCKS)), refs, ids)
    assert copier.in_flight() == 0


@pytest.mark.parametrize(
    ("regions", "blocks"),
    [
        ([], 1),
        ([(0, 64, 64)], 1),
        ([(4096, 64, 0)], 1),
        ([(4096, 32, 64)], 2),
        ([(2**64 - 64, 64, 64)], 2),
        ([(4096, 2**62, 64)], 4),
        ([(4096, 64)], 1),
        ([(4096, 64, -1)], 1),
        ([4096], 1),
        ([(4096, 64, 64)], 0),
        (7, 1),
    ],
)
def test_impossible_layouts_are_refused(regions: Any, blocks: int) -> None:
    with pytest.raises(InvalidArgument):
        _native.KVLayout(regions, blocks)


def test_layout_knows_its_sizes() -> None:
    layout = _native.KVLayout([(4096, 100, 64), (65536, 200, 32)], 7)
    assert (layout.block_bytes, layout.blocks) == (96, 7)


def test_number_of_threads_is_bounded(pool: Any) -> None:
    assert _native.HostCopier(pool, threads=3).threads == 3
    assert 1 <= _native.HostCopier(pool).threads <= 4
    with pytest.raises(InvalidArgument, match="too many"):
        _native.HostCopier(pool, threads=10_000)
