"""How close does the copy engine for host memory come to plain memcpy on the same number of threads?"""

import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy

from benchmarks._common import Result, cpus, finish, median, note, pool_place, seconds_of
from pegaflow import _native

KIB = 1 << 10
MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
BLOCKS = 128
TOTAL_BYTES = BLOCKS * BLOCK_BYTES
FRAGMENTS = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, BLOCK_BYTES)
ROUNDS = 9
WAIT_MS_MAX = 60_000
FINGERPRINT = b"host_copy benchmark".ljust(32, b"\0")
KEYS = [index.to_bytes(16, "big") for index in range(BLOCKS)]


@dataclass(frozen=True)
class Speed:
    """Median of the rounds, without the first."""

    save: float
    load: float


def main() -> None:
    """Run, print, write."""
    results = []
    counts = sorted({1, min(4, cpus())})
    with pool_place(4 * TOTAL_BYTES) as place:
        pool = _native.Pool.open("bench", shm_dir=str(place), pool_bytes=2 * TOTAL_BYTES)
        namespace = pool.namespace(FINGERPRINT, 0, [BLOCK_BYTES], label="host_copy")
        host = numpy.random.default_rng(1).integers(0, 256, TOTAL_BYTES, dtype=numpy.uint8)
        for threads in counts:
            note(f"memcpy, {threads} threads ...")
            plain = memcpy_speed(place, host, threads)
            for checksum in (False, True):
                for fragment in FRAGMENTS:
                    name = f"{fragment_name(fragment)}, {threads} threads, checksum {'on' if checksum else 'off'}"
                    note(f"{name} ...")
                    ours = copier_speed(pool, namespace, host, fragment, threads, checksum)
                    results.append(Result(f"save {name}", ours.save, "GB/s", "memcpy", plain.save))
                    results.append(Result(f"load {name}", ours.load, "GB/s", "memcpy", plain.load))
        pool.close()
    finish("host_copy", results)


def memcpy_speed(place: Path, host: "numpy.ndarray", threads: int) -> Speed:
    """One large contiguous memcpy per thread, between private and shared memory."""
    with open(place / "memcpy", "w+b") as file:
        file.truncate(TOTAL_BYTES)
        shared = mmap.mmap(file.fileno(), TOTAL_BYTES)
    other = numpy.frombuffer(shared, dtype=numpy.uint8)
    back = numpy.zeros_like(host)
    save = speed(lambda: on_threads(threads, lambda piece: numpy.copyto(other[piece], host[piece])))
    load = speed(lambda: on_threads(threads, lambda piece: numpy.copyto(back[piece], other[piece])))
    if not numpy.array_equal(back, host):
        raise SystemExit("memcpy copied other bytes than it was given.")
    (place / "memcpy").unlink()
    return Speed(save, load)


def on_threads(threads: int, copy: Callable[[slice], None]) -> None:
    """Run ``copy`` on equal pieces at the same time; numpy releases the GIL while it copies."""
    step = TOTAL_BYTES // threads
    workers = [
        threading.Thread(target=copy, args=(slice(index * step, (index + 1) * step),)) for index in range(1, threads)
    ]
    for worker in workers:
        worker.start()
    copy(slice(0, step))
    for worker in workers:
        worker.join()


def copier_speed(
    pool: _native.Pool, namespace: _native.Namespace, host: "numpy.ndarray", fragment: int, threads: int, checksum: bool
) -> Speed:
    """The engine's copier, from fragments to slots and back; the bytes that come back are compared."""
    copier = _native.HostCopier(pool, threads=threads, checksum=checksum)
    back = numpy.zeros_like(host)
    save_seconds = []
    for last in [False] * (ROUNDS - 1) + [True]:
        refs = reserve_all(pool, namespace)
        save_seconds.append(seconds_of(partial(run, copier, copier.save, host, fragment, refs)))
        if not last:
            pool.abort(refs)
    if pool.publish(refs) != BLOCKS:
        raise SystemExit("Saved blocks were not published.")
    leased = namespace.lease(KEYS)
    load_seconds = [seconds_of(lambda: run(copier, copier.load, back, fragment, leased)) for _ in range(ROUNDS)]
    pool.release(leased)
    copier.close()
    namespace.reset()
    if not numpy.array_equal(back, host):
        raise SystemExit("The copier copied other bytes than it was given.")
    return Speed(gigabytes_per_second(save_seconds), gigabytes_per_second(load_seconds))


def reserve_all(pool: _native.Pool, namespace: _native.Namespace) -> list[int]:
    """A slot for every block; the pool grows in the background, so the first call may have to come back."""
    for _ in range(1000):
        reserved = namespace.reserve(KEYS)
        refs = [ref for _, ref in reserved]
        if len(refs) == BLOCKS:
            return refs
        pool.abort(refs)
        pool.grow_ahead(namespace)
        threading.Event().wait(0.01)
    raise SystemExit(f"The pool did not grow: {pool.last_grow_error() or 'no reason given'}")


def run(
    copier: _native.HostCopier, start: Callable[..., int], memory: "numpy.ndarray", fragment: int, refs: list[int]
) -> None:
    """One job over all blocks. Fragment *f* of all blocks lies together, as layers do in vLLM's cache."""
    address = memory.ctypes.data
    fragments = BLOCK_BYTES // fragment
    regions = [(address + index * BLOCKS * fragment, fragment, fragment) for index in range(fragments)]
    layout = _native.KVLayout(regions, BLOCKS)
    job = start(0, layout, refs, list(range(BLOCKS)))
    for done in copier.wait(WAIT_MS_MAX):
        if done.job != job or not done.ok:
            raise SystemExit(f"A copy failed for blocks {done.failed}.")
        return
    raise SystemExit("A copy did not finish.")


def speed(copy: Callable[[], None]) -> float:
    """GB/s of copying everything."""
    return gigabytes_per_second([seconds_of(copy) for _ in range(ROUNDS)])


def gigabytes_per_second(seconds: list[float]) -> float:
    """From the median of all rounds but the first, which touches fresh memory."""
    return TOTAL_BYTES / median(seconds[1:]) / 1e9


def fragment_name(fragment: int) -> str:
    """``4 KiB``, or ``contiguous`` for a whole block."""
    if fragment == BLOCK_BYTES:
        return "contiguous"
    return f"{fragment // KIB} KiB" if fragment < MIB else f"{fragment // MIB} MiB"


if __name__ == "__main__":
    main()
