"""What does looking at a pool cost those who use it? Lookups and puts with and without a scraper of the exporter at 1
and 10 Hz, in turns, and with and without counting each prompt in the pool's statistics.

Exporter and scraper are processes of their own, as in service. Throughput is that of one process that goes round and
round: look a prompt up, count it, lease it, store what is absent. Last, how long one scrape of a million slots takes.
"""

import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import _bigpool
from benchmarks._common import Result, finish, median, note, pool_place, seconds_of
from benchmarks._vllm_rounds import interval
from pegaflow import _native
from pegaflow.exporter import FRESH_SECONDS

BLOCKS = 8_192
BLOCK_BYTES = 16 << 10
PROMPT_BLOCKS = 256
PROMPTS = 64
"""Twice as many blocks as fit."""
PLACE_BYTES = 256 << 20
ROUNDS = 12
ROUND_SECONDS = 3.0
FREQUENCIES = (1, 10)
AIM_RATIO = 0.99
SCRAPES = 20
SCRAPE_INTERVAL_SECONDS = 15.0
"""Prometheus asks so often unless told otherwise."""
SCRAPER = """
import sys, time, urllib.request
while True:
    started = time.monotonic()
    urllib.request.urlopen(sys.argv[1], timeout=30).read()
    print("asked", flush=True)
    time.sleep(max(0.0, float(sys.argv[2]) - (time.monotonic() - started)))
"""


def main() -> None:
    """Run, print, write."""
    results: list[Result] = []
    with pool_place(PLACE_BYTES) as place, exporter(place) as address:
        pool = _native.Pool.open("default", shm_dir=str(place), pool_bytes=BLOCKS * BLOCK_BYTES)
        namespace = pool.namespace(bytes(32), 0, [BLOCK_BYTES], label="benchmark")
        work = Work(pool, namespace)
        for _ in range(4):
            work.run(ROUND_SECONDS, count=True)
        settings: list[tuple[str, float, bool]] = [("nobody looks", 0, True), ("nothing counted", 0, False)]
        settings += [(f"scraped at {frequency} Hz", frequency, True) for frequency in FREQUENCIES]
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in settings}
        lot = random.Random(1)
        for number in range(ROUNDS):
            note(f"round {number + 1} of {ROUNDS} ...")
            for name, frequency, count in lot.sample(settings, len(settings)):
                with scraped(address, frequency):
                    rates[name].append(work.run(ROUND_SECONDS, count=count))
        pool.close()
    for kind, unit in enumerate(("blocks/s", "blocks per CPU second")):
        alone = [rate[kind] for rate in rates["nobody looks"]]
        results.append(Result("looked up and put, nobody looks", median(alone), unit))
        for name, _, _ in settings[1:]:
            # Of neighbours in time, so that what the machine does meanwhile takes part in both.
            ratios = [rate[kind] / without for rate, without in zip(rates[name], alone, strict=True)]
            counting = name == "nothing counted"
            ratios = [1 / ratio for ratio in ratios] if counting else ratios
            title = "prompts counted, by not" if counting else f"{name}, by not"
            low, high = interval(ratios)
            row = Result(f"{title}, {unit}", median(ratios), "ratio", "aim", AIM_RATIO, low, high, better="higher")
            results.append(row)
    finish("scrape", [*results, *of_a_million_slots()])


def of_a_million_slots() -> list[Result]:
    """How long a scrape of a large pool takes, and what that is of one processor when asked as Prometheus does."""
    note(f"a pool of {_bigpool.SLOTS:,} slots ...")
    with pool_place(_bigpool.PLACE_BYTES) as place, exporter(place) as address:
        pool, namespace = _bigpool.open_pool(place, create=True)
        _bigpool.fill(pool, namespace)
        took = []
        for _ in range(SCRAPES):
            took.append(seconds_of(lambda: urllib.request.urlopen(address, timeout=30).read()))
            time.sleep(FRESH_SECONDS)
        pool.close()
    share = 100 * median(took) / SCRAPE_INTERVAL_SECONDS
    return [
        Result("one scrape, a pool of a million slots, p50", 1e3 * median(took), "ms"),
        Result("one scrape, a pool of a million slots, worst", 1e3 * max(took), "ms"),
        Result(f"of one processor, a scrape every {SCRAPE_INTERVAL_SECONDS:.0f} s", share, "%", better="lower"),
    ]


class Work:
    """One engine's use of a pool that is full."""

    def __init__(self, pool: _native.Pool, namespace: _native.Namespace) -> None:
        self._pool, self._namespace, self._turn = pool, namespace, 0
        self._prompts = [
            [(prompt << 16 | block).to_bytes(32, "big") for block in range(PROMPT_BLOCKS)] for prompt in range(PROMPTS)
        ]

    def run(self, seconds: float, *, count: bool) -> tuple[float, float]:
        """Blocks per second, and per second of CPU time, which what else runs on the host changes less."""
        started, cpu = time.perf_counter(), time.process_time()
        blocks = 0
        while time.perf_counter() - started < seconds:
            self._turn += 1
            # Every other time one of the last prompts, so that half is found.
            back = 3 if self._turn % 2 else 0
            self._one(self._prompts[(self._turn // 2 - back) % PROMPTS], count)
            blocks += PROMPT_BLOCKS
        return blocks / (time.perf_counter() - started), blocks / (time.process_time() - cpu)

    def _one(self, keys: list[bytes], count: bool) -> None:
        space = self._namespace
        hit = space.lookup(keys)
        if count:
            space.note_prompt(keys, start=0, ram=hit, ssd=hit, peer=hit, late=hit)
        leased = space.lease(keys)
        refs = [ref for _, ref in space.reserve(keys)]
        self._pool.mark_written(0, refs)
        self._pool.publish(refs)
        self._pool.release(leased)


@contextmanager
def exporter(place: Path) -> Iterator[str]:
    """Address of an exporter for the pools in ``place``."""
    command = [sys.executable, "-c", "from pegaflow.cli import main; main()", "exporter", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen([*command, "--shm-dir", str(place)], stdout=subprocess.PIPE, text=True, bufsize=1)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().rpartition(" ")[2].strip()
    finally:
        process.terminate()
        process.wait()


@contextmanager
def scraped(address: str, frequency: float) -> Iterator[None]:
    """Another process asks the exporter so often meanwhile; 0: nobody."""
    if not frequency:
        yield
        return
    scraper = subprocess.Popen([sys.executable, "-c", SCRAPER, address, str(1 / frequency)], stdout=subprocess.PIPE)
    try:
        assert scraper.stdout is not None
        scraper.stdout.readline()
        yield
    finally:
        scraper.kill()
        scraper.wait()


if __name__ == "__main__":
    main()
