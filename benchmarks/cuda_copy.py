"""How close do copies between a GPU's KV cache and the pool come to the bus, and what do they cost a decoding step?"""

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._common import Result, digits, finish, median, note, pool_place, seconds_of
from pegaflow import _native
from pegaflow.cli.cuda_probe import probe_cuda

if TYPE_CHECKING:
    from benchmarks._gpu_cache import Cache

MIB, GIB = 1 << 20, 1 << 30
ROUNDS = 5
LOCKED_BYTES = 4 * GIB
SHAPES = {4: 80, 16: 64, 32: 64, 64: 64, 128: 32, 256: 16, 1024: 4}
"""Fragments of a block, by KiB of one fragment. The first is a rank of a 70B model over 8 GPUs."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "staged": {"backend": "staged"},
    "direct": {"backend": "direct"},
    "kernel, 8 CTAs": {"backend": "kernel", "ctas": 8},
}
SWEEP: list[tuple[int, bool, dict[str, Any]]] = [
    (4, False, {"ctas": 8}),
    (4, False, {"ctas": 16}),
    (4, False, {"ctas": 64}),
    (4, False, {"ring_buffer_bytes": 4 * MIB}),
    (4, False, {"ring_buffer_bytes": 8 * MIB}),
    (4, False, {"copy_streams": 2}),
    (4, True, {"batch_copies": False}),
    (4, True, {"batch_copies": False, "copy_streams": 2}),
    (4, True, {}),
    (4, True, {"copy_streams": 2}),
    (4, True, {"copy_streams": 3}),
    (32, True, {"batch_copies": False}),
    (32, True, {}),
    (32, False, {"save_bytes_per_second_max": 10_000_000_000}),
    (32, False, {"save_bytes_per_second_max": 25_000_000_000}),
    (256, False, {"backend": "direct", "batch_copies": False}),
    (1024, False, {"backend": "direct", "batch_copies": False}),
]
"""KiB of a fragment, whether slots are in random order, options: what the defaults were chosen from."""
CHUNKS_MIB = (16, 4, 8, 16, 32, 64, 256)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true", help="measure the choices behind the defaults as well")
    parser.add_argument("--kib", nargs="+", type=int, choices=SHAPES, default=list(SHAPES), help="of fragments")
    options = parser.parse_args()
    driver = probe_cuda()
    if isinstance(driver, str) or not driver.devices:
        note(f"cuda_copy needs a GPU: {driver if isinstance(driver, str) else 'there is none'}")
        return
    from benchmarks._gpu import DecodeLoad, contiguous_beside, contiguous_gb_per_s

    results: list[Result] = []
    plain = contiguous_gb_per_s()
    for name, value in zip(("load", "save", "both ways"), plain, strict=True):
        results += show(Result(f"contiguous {name}", value, "GB/s"))
    decode = DecodeLoad()
    alone = decode.steps(1.0)
    results += show(Result("step alone, median", median(alone), "ms"), Result("step alone, worst", max(alone), "ms"))
    for name, beside in zip(("load", "save"), contiguous_beside(decode), strict=True):
        results += beside_rows(f"contiguous {name}", beside, plain[name == "save"], median(alone))
    with pool_place(LOCKED_BYTES + GIB) as place:
        results += strategies(options.kib, place, plain, decode, median(alone))
        if options.sweep:
            results += sweep_rows(place, plain, decode, median(alone))
        results += registration(place, decode, median(alone))
    finish("cuda_copy", results)


def strategies(kibs: Sequence[int], place: Path, plain: Sequence[float], decode: Any, step_ms: float) -> list[Result]:
    """Every strategy at these fragments, idle and beside the load."""
    from benchmarks._gpu_cache import cache_of

    results = []
    for kib in kibs:
        with cache_of(place, kib, SHAPES[kib]) as cache:
            for strategy, options in STRATEGIES.items():
                if strategy == "direct" and kib < 32:
                    continue  # below, its rate is that of the calls
                results += measure(f"{strategy}, {kib} KiB", cache, options, plain, decode, step_ms)
            if kib in (4, 32):
                results += both_ways_and_small(f"staged, {kib} KiB", cache, plain[2])
    return results


def sweep_rows(place: Path, plain: Sequence[float], decode: Any, step_ms: float) -> list[Result]:
    """The choices behind the defaults."""
    from benchmarks._gpu_cache import cache_of

    results = []
    for kib in sorted({kib for kib, _, _ in SWEEP}):
        with cache_of(place, kib, SHAPES[kib]) as cache:
            for row_kib, scattered, options in SWEEP:
                if row_kib == kib:
                    chosen = ", ".join(f"{key} {value}" for key, value in options.items())
                    name = f"{kib} KiB{', scattered' if scattered else ''}: {chosen or 'defaults'}"
                    quick = scattered or "backend" in options
                    load = None if quick else decode
                    results += measure(name, cache, options, plain, load, step_ms, scattered=scattered)
            if kib == 4:
                results += measure("4 KiB, not page-locked", cache, {"register": False}, plain, decode, step_ms)
            if kib == 32:
                results += first_load("32 KiB, load that begins with page-locking", cache, plain)
    return results


def measure(
    name: str,
    cache: "Cache",
    options: dict[str, Any],
    plain: Sequence[float],
    decode: Any,
    step_ms: float,
    *,
    scattered: bool = False,
) -> list[Result]:
    """Save and load, idle and beside the load if there is one."""
    from benchmarks._gpu_cache import Mover

    mover = Mover(cache, options, scattered=scattered, locked=options.get("register", True))
    rows = idle_row(f"{name}: save", mover.save, plain[1])
    if decode is not None:
        rows += beside_rows(f"{name}: save", decode.beside(mover.save), plain[1], step_ms)
    mover.publish()
    mover.check()
    rows += idle_row(f"{name}: load", mover.load, plain[0])
    if decode is not None:
        rows += beside_rows(f"{name}: load", decode.beside(mover.load), plain[0], step_ms)
    mover.close()
    return rows


def idle_row(name: str, copy: Callable[[], int], plain: float) -> list[Result]:
    """GB/s of the median round."""
    copy()
    seconds = median([seconds_of(copy) for _ in range(ROUNDS)])
    return show(Result(f"{name}, idle", copy() / seconds / 1e9, "GB/s", "contiguous, idle", plain))


def beside_rows(name: str, beside: Any, plain: float, step_ms: float) -> list[Result]:
    """GB/s, and milliseconds of a step."""
    return show(
        Result(f"{name}, beside", beside.gb_per_s, "GB/s", "contiguous, idle", plain),
        Result(f"{name}, beside, step median", beside.step_ms, "ms", "step alone, median", step_ms),
        Result(f"{name}, beside, step worst", beside.step_ms_worst, "ms", "step alone, median", step_ms),
    )


def first_load(name: str, cache: "Cache", plain: Sequence[float]) -> list[Result]:
    """What the first request of a fresh process finds: nothing is page-locked yet, and page-locking begins with it."""
    from benchmarks._gpu_cache import Mover

    mover = Mover(cache, {}, locked=False)
    mover.save()
    mover.publish()
    assert cache.namespace is not None
    mover.copier.register(cache.namespace, 0)
    seconds = [seconds_of(mover.load) for _ in range(4)]
    mover.close()
    rows = [
        Result(f"{name}, round {number + 1}", cache.bytes / one / 1e9, "GB/s", "contiguous, idle", plain[0])
        for number, one in enumerate(seconds)
    ]
    return show(*rows)


def both_ways_and_small(name: str, cache: "Cache", plain: float) -> list[Result]:
    """Loads and saves at the same time; and how long a small job takes, from its call to the return of the wait."""
    from benchmarks._gpu_cache import WAIT_MS, Mover

    mover = Mover(cache, {"backend": "staged"})
    mover.save()
    mover.publish()
    mover.reserve_more()
    rows = idle_row(f"{name}: load and save at once", mover.both, plain)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(10):
        mover.load()
    busy = (time.process_time() - cpu) / (time.perf_counter() - wall)
    rows += show(Result(f"{name}: load, CPUs in use", busy, "CPUs"))
    for blocks in (1, 16):
        refs, ids = mover.leased[:blocks], cache.ids[:blocks]

        def one(refs: list[int] = refs, ids: list[int] = ids) -> None:
            mover.copier.load(0, cache.layout, refs, ids)
            mover.copier.wait(WAIT_MS)

        times = [seconds_of(one) for _ in range(200)]
        rows += show(Result(f"{name}: load of {blocks} blocks", median(times) * 1e6, "us"))
    mover.close()
    return rows


def registration(place: Path, decode: Any, step_ms: float) -> list[Result]:
    """How fast segments are page-locked, and what that does to steps, by length of a chunk."""
    from benchmarks._gpu_cache import FINGERPRINT, reserve_all, wait_until

    pool = _native.Pool.open("locking", shm_dir=str(place), pool_bytes=LOCKED_BYTES, segment_bytes=GIB)
    namespace = pool.namespace(FINGERPRINT, 0, [2 * MIB])
    pool.abort(reserve_all(pool, namespace, [index.to_bytes(16, "big") for index in range(LOCKED_BYTES // (2 * MIB))]))
    results = []
    launch_ms = max(decode.launches(0.5))
    for mib in CHUNKS_MIB:
        copier = _native.CudaCopier(pool, register_chunk_bytes=mib * MIB)
        times: list[float] = []
        launches: list[float] = []
        stop = threading.Event()

        def step(times: list[float] = times, launches: list[float] = launches, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                times.extend(decode.steps(0.04))
                launches.extend(decode.launches(0.01))

        thread = threading.Thread(target=step)
        thread.start()
        time.sleep(0.2)
        copier.register(namespace, 0)
        wait_until(lambda copier=copier: copier.progress()["bytes_registered"] >= LOCKED_BYTES, "not page-locked")
        stop.set()
        thread.join()
        progress = copier.progress()
        closing_ms = seconds_of(copier.close) * 1e3
        name = f"page-locking{'' if results else ' what is not mapped yet'}, chunks of {mib} MiB"
        results += show(
            Result(name, LOCKED_BYTES / progress["seconds"] / 1e9, "GB/s"),
            Result(f"{name}, in the driver", LOCKED_BYTES / progress["driver_seconds"] / 1e9, "GB/s"),
            Result(f"{name}, step median", median(times), "ms", "step alone, median", step_ms),
            Result(f"{name}, step worst", max(times), "ms", "step alone, median", step_ms),
            Result(f"{name}, launch worst", max(launches), "ms", "launch alone, worst", launch_ms),
            Result(f"{name}, undone for {LOCKED_BYTES // GIB} GiB", closing_ms, "ms"),
        )
    pool.close()
    return results


def show(*rows: Result) -> list[Result]:
    """Print rows as they come; what is printed survives whatever happens next."""
    for row in rows:
        note(f"{row.name}: {digits(row.value)} {row.unit}")
    return list(rows)


if __name__ == "__main__":
    main()
