"""How close does the copy engine for host memory come to plain memcpy on the same number of threads?"""

import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy
import numpy.typing as npt

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
Bytes = npt.NDArray[numpy.uint8]
KEYS = [index.to_bytes(16, "big") for index in range(BLOCKS)]


@dataclass
class Seconds:
    """Times of all rounds."""

    copier: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)

    def result(self, name: str) -> Result:
        """GB/s from the medians of all rounds but the first, which touches fresh memory."""
        speeds = [TOTAL_BYTES / median(times[1:]) / 1e9 for times in (self.copier, self.memcpy)]
        return Result(name, speeds[0], "GB/s", "memcpy", speeds[1])


class Bench:
    """A pool, and private memory to copy from and to."""

    def __init__(self, place: Path) -> None:
        self.pool = _native.Pool.open("bench", shm_dir=str(place), pool_bytes=2 * TOTAL_BYTES)
        self.namespace = self.pool.namespace(FINGERPRINT, 0, [BLOCK_BYTES], label="host_copy")
        self.host = numpy.random.default_rng(1).integers(0, 256, TOTAL_BYTES, dtype=numpy.uint8)
        self.back = numpy.zeros_like(self.host)
        with open(place / "memcpy", "w+b") as file:
            file.truncate(TOTAL_BYTES)
            self._mapped = mmap.mmap(file.fileno(), TOTAL_BYTES)
        self.shared = numpy.frombuffer(self._mapped, dtype=numpy.uint8)

    def measure(self, fragment: int, threads: int, checksum: bool) -> list[Result]:
        """Both directions. Engine and memcpy take turns, so that what else runs on the host slows both."""
        copier = _native.HostCopier(self.pool, threads=threads, checksum=checksum)
        name = f"{fragment_name(fragment)}, threads {threads}, checksum {'on' if checksum else 'off'}"
        note(f"{name} ...")
        saves = self._save_rounds(copier, fragment, threads)
        loads = self._load_rounds(copier, fragment, threads)
        copier.close()
        self.namespace.reset()
        return [saves.result(f"save {name}"), loads.result(f"load {name}")]

    def _save_rounds(self, copier: _native.HostCopier, fragment: int, threads: int) -> Seconds:
        seconds = Seconds()
        refs: list[int] = []
        for _ in range(ROUNDS):
            self.pool.abort(refs)
            refs = reserve_all(self.pool, self.namespace)
            seconds.memcpy.append(seconds_of(partial(memcpy, self.shared, self.host, threads)))
            seconds.copier.append(seconds_of(partial(run, copier, copier.save, self.host, fragment, refs)))
        if self.pool.publish(refs) != BLOCKS:
            raise SystemExit("Saved blocks were not published.")
        return seconds

    def _load_rounds(self, copier: _native.HostCopier, fragment: int, threads: int) -> Seconds:
        seconds = Seconds()
        refs = self.namespace.lease(KEYS)
        for _ in range(ROUNDS):
            seconds.memcpy.append(seconds_of(partial(memcpy, self.back, self.shared, threads)))
            self.back[:: BLOCK_BYTES // 2] ^= 0xFF
            seconds.copier.append(seconds_of(partial(run, copier, copier.load, self.back, fragment, refs)))
            if not numpy.array_equal(self.back, self.host):
                raise SystemExit("The copier copied other bytes than it was given.")
        self.pool.release(refs)
        return seconds


def main() -> None:
    """Run, print, write."""
    results = []
    with pool_place(4 * TOTAL_BYTES) as place:
        bench = Bench(place)
        for threads in sorted({1, min(4, cpus())}):
            for checksum in (False, True):
                for fragment in FRAGMENTS:
                    results += bench.measure(fragment, threads, checksum)
        bench.pool.close()
    finish("host_copy", results)


def memcpy(target: Bytes, source: Bytes, threads: int) -> None:
    """One large contiguous memcpy per thread at the same time; numpy releases the GIL while it copies."""
    step = TOTAL_BYTES // threads
    pieces = [slice(index * step, (index + 1) * step) for index in range(threads)]
    workers = [threading.Thread(target=numpy.copyto, args=(target[piece], source[piece])) for piece in pieces[1:]]
    for worker in workers:
        worker.start()
    numpy.copyto(target[pieces[0]], source[pieces[0]])
    for worker in workers:
        worker.join()


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


def run(copier: _native.HostCopier, start: Callable[..., int], memory: Bytes, fragment: int, refs: list[int]) -> None:
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


def fragment_name(fragment: int) -> str:
    """``4 KiB``, or ``contiguous`` for a whole block."""
    if fragment == BLOCK_BYTES:
        return "contiguous"
    return f"{fragment // KIB} KiB" if fragment < MIB else f"{fragment // MIB} MiB"


if __name__ == "__main__":
    main()
