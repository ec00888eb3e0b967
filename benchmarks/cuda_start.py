"""What does a process find that comes to a full pool: how soon is it page-locked, and how fast are the first loads?"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks._common import Result, digits, finish, median, note, pool_place, seconds_of
from pegaflow import _native
from pegaflow.cli.cuda_probe import probe_cuda

MIB, GIB = 1 << 20, 1 << 30
FRAGMENTS, FRAGMENT_BYTES = 64, 32 << 10
BLOCK_BYTES = FRAGMENTS * FRAGMENT_BYTES
JOB_BLOCKS = 625
"""Of one load: the KV cache of a prompt of 10,000 tokens of an 8B model."""
JOBS = 8
FINGERPRINT = b"cuda_start benchmark".ljust(32, b"\0")
FILL_THREADS = 8
CHILD_SECONDS_MAX = 240.0
WAIT_MS = 60_000
MODES = ("idle", "beside decoding", "beside decoding, untold", "loads at once", "loads after 1 s", "never page-locked")


def main() -> None:
    """Fill a pool, start processes that find it, print and write what they measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=int, default=16, help="size of the pool")
    parser.add_argument("--huge-pages", action="store_true", help="keep the pool in reserved huge pages")
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--pool", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sys.stdout.write("\n" + json.dumps(child(options.child, options.pool)))
        return
    driver = probe_cuda()
    if isinstance(driver, str) or not driver.devices:
        note(f"cuda_start needs a GPU: {driver if isinstance(driver, str) else 'there is none'}")
        return
    results: list[Result] = []
    with pool_place((1 if options.huge_pages else options.gib + 1) * GIB) as place:
        try:
            results += show(Result("filling the pool", fill(place, options.gib * GIB, options.huge_pages), "GB/s"))
            for mode in MODES:
                results += show(
                    *[Result(f"{mode}: {name}", value, unit) for name, value, unit in measured(mode, place)]
                )
        finally:
            for path in place.glob("pegaflow-v*"):
                _native.remove(str(path), True)
    finish("cuda_start_huge" if options.huge_pages else "cuda_start", results)


def fill(place: Path, pool_bytes: int, huge_pages: bool) -> float:
    """A pool full of blocks, each of which holds its number again and again. Returns GB/s of growing and writing."""
    import numpy

    pool = _native.Pool.open(
        "full", shm_dir=str(place), pool_bytes=pool_bytes, segment_bytes=GIB, huge_pages=huge_pages
    )
    namespace = pool.namespace(FINGERPRINT, 0, [BLOCK_BYTES], label="cuda_start")
    started = time.perf_counter()
    keys = [number.to_bytes(16, "big") for number in range(pool_bytes // BLOCK_BYTES)]
    refs: list[int] = []
    while len(refs) < len(keys):
        refs += [ref for _, ref in namespace.reserve(keys[len(refs) : len(refs) + 512])]
        if time.perf_counter() - started > CHILD_SECONDS_MAX:
            raise SystemExit(f"The pool did not grow: {pool.last_grow_error()}")
    grown = time.perf_counter() - started

    files: dict[str, numpy.memmap] = {}

    def fill_one(numbered: tuple[int, int]) -> None:
        number, ref = numbered
        found = pool.locate(ref, 0)
        assert found is not None
        path, offset, _ = found
        if path not in files:
            files[path] = numpy.memmap(path, dtype=numpy.int64, mode="r+")
        files[path][offset // 8 : (offset + BLOCK_BYTES) // 8] = number

    with ThreadPoolExecutor(FILL_THREADS) as threads:
        list(threads.map(fill_one, enumerate(refs)))
    pool.mark_written(0, refs)
    if pool.publish(refs) != len(refs):
        raise SystemExit("Not all blocks were published.")
    note(f"{len(refs)} blocks, of {pool_bytes / grown / 1e9:.2f} GB/s of growth")
    path = Path(pool.path)
    if huge_pages and any(path.glob("segment-*")):
        raise SystemExit("The pool is not in huge pages: see the log line above.")
    pool.close()
    return pool_bytes / (time.perf_counter() - started) / 1e9


def measured(mode: str, place: Path) -> list[tuple[str, float, str]]:
    """What a fresh process says."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cuda_start", "--child", mode, "--pool", str(place)],
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS_MAX,
        check=False,
    )
    if done.returncode:
        note(f"{mode}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
        return []
    return [(name, value, unit) for name, value, unit in json.loads(done.stdout.splitlines()[-1])]


class Finder:
    """A process that comes to the pool: a KV cache on the device and a copier."""

    def __init__(self, place: str, *, register: bool) -> None:
        import torch

        self._torch = torch
        blocks = JOB_BLOCKS + 1
        self.memory = torch.zeros((FRAGMENTS, blocks, FRAGMENT_BYTES // 8), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        step = blocks * FRAGMENT_BYTES
        start = self.memory.data_ptr()
        regions = [(start + index * step, FRAGMENT_BYTES, FRAGMENT_BYTES) for index in range(FRAGMENTS)]
        self.layout = _native.KVLayout(regions, blocks)
        self.pool = _native.Pool.open("full", shm_dir=place, create=False)
        self.namespace = self.pool.namespace(FINGERPRINT, 0, [BLOCK_BYTES])
        self.blocks = self.pool.pool_bytes // BLOCK_BYTES
        self.copier_ms = seconds_of(lambda: self._make(register)) * 1e3

    def _make(self, register: bool) -> None:
        self.copier = _native.CudaCopier(self.pool, register=register)

    def register(self) -> None:
        """Begin to page-lock."""
        self.copier.register(self.namespace, 0)

    def is_locked(self) -> bool:
        """Whether all is page-locked."""
        progress = self.copier.progress()
        if progress["problem"]:
            raise SystemExit(progress["problem"])
        return bool(progress["bytes_registered"] >= self.blocks * BLOCK_BYTES)

    def load(self, job: int) -> float:
        """Load the blocks of one prompt and look at them. Returns GB/s."""
        first = job * JOB_BLOCKS % (self.blocks - JOB_BLOCKS + 1)
        numbers = range(first, first + JOB_BLOCKS)
        refs = self.namespace.lease([number.to_bytes(16, "big") for number in numbers])
        started = time.perf_counter()
        self.copier.load(0, self.layout, refs, list(range(1, JOB_BLOCKS + 1)))
        done = self.copier.wait(WAIT_MS)
        seconds = time.perf_counter() - started
        self.pool.release(refs)
        expected = self._torch.tensor(list(numbers), device="cuda")
        same = bool((self.memory[:, 1:, :] == expected[None, :, None]).all())
        if not (len(done) == 1 and done[0].ok and same):
            raise SystemExit(f"A load brought other bytes: {done}")
        return JOB_BLOCKS * BLOCK_BYTES / seconds / 1e9


def child(mode: str, place: str) -> list[tuple[str, float, str]]:
    """One process: ``(name, value, unit)`` of what it saw."""
    finder = Finder(place, register=mode != "never page-locked")
    rows = [("making the copier", finder.copier_ms, "ms")]
    if mode == "idle":
        started = time.perf_counter()
        finder.register()
        wait_for(finder.is_locked)
        rows += locking_rows(finder, time.perf_counter() - started)
        rows += [("load afterwards", median([finder.load(job) for job in range(JOBS)]), "GB/s")]
    elif mode.startswith("beside"):
        rows += beside_decoding(finder, told=mode == "beside decoding")
    else:
        if mode != "never page-locked":
            finder.register()
        if mode == "loads after 1 s":
            time.sleep(1.0)
        rates = [finder.load(job) for job in range(JOBS)]
        rows += [(f"load {number + 1}", rate, "GB/s") for number, rate in enumerate(rates)]
        again = [finder.load(job) for job in range(JOBS)]
        rows += [("loads of the same again", median(again), "GB/s")]
        rows += [("moved by the CPU", finder.copier.stats()["bytes_bounced"] / 1e9, "GB")]
    finder.copier.close()
    finder.pool.close()
    return rows


def locking_rows(finder: Finder, seconds: float) -> list[tuple[str, float, str]]:
    """How fast all was page-locked."""
    gigabytes = finder.blocks * BLOCK_BYTES / 1e9
    return [
        ("seconds until all is page-locked", seconds, "s"),
        ("page-locking", gigabytes / seconds, "GB/s"),
        ("in the driver", gigabytes / finder.copier.progress()["driver_seconds"], "GB/s"),
    ]


def beside_decoding(finder: Finder, *, told: bool) -> list[tuple[str, float, str]]:
    """Steps while all is page-locked. ``told``: the copier knows of the steps, as in vLLM once it serves."""
    from benchmarks._gpu import DecodeLoad

    decode = DecodeLoad()
    alone = decode.steps(1.0)
    times: list[float] = []
    stop = threading.Event()

    def step() -> None:
        while not stop.is_set():
            finder.copier.set_stepping(told)
            times.extend(decode.steps(0.02))

    thread = threading.Thread(target=step)
    thread.start()
    time.sleep(0.2)
    times.clear()
    started = time.perf_counter()
    finder.register()
    wait_for(finder.is_locked)
    seconds = time.perf_counter() - started
    stop.set()
    thread.join()
    return [
        *locking_rows(finder, seconds),
        ("step alone, median", median(alone), "ms"),
        ("step alone, worst", max(alone), "ms"),
        ("step, median", median(times), "ms"),
        ("step, worst", max(times), "ms"),
    ]


def wait_for(condition: Callable[[], bool]) -> None:
    """Look every millisecond, for up to two minutes."""
    deadline = time.monotonic() + CHILD_SECONDS_MAX / 2
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("The pool was not page-locked in time.")
        time.sleep(0.001)


def show(*rows: Result) -> Sequence[Result]:
    """Print rows as they come; what is printed survives whatever happens next."""
    for row in rows:
        note(f"{row.name}: {digits(row.value)} {row.unit}")
    return rows


if __name__ == "__main__":
    main()
