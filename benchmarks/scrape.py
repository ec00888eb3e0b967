"""What does looking at a pool cost those who use it? Lookups and puts with and without a scraper of the exporter at 1
and 10 Hz, in turns, and with and without counting each prompt in the pool's statistics.

The exporter is a process of its own, as in service. Throughput is that of one process that goes round and round:
look a prompt up, count it, lease it, store what is absent.
"""

import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks._common import Result, finish, median, note, pool_place
from pegaflow import _native

BLOCKS = 8_192
BLOCK_BYTES = 16 << 10
PROMPT_BLOCKS = 256
PROMPTS = 64
"""Twice as many blocks as fit."""
PLACE_BYTES = 256 << 20
ROUNDS = 12
ROUND_SECONDS = 2.0
FREQUENCIES = (1, 10)
AIM_RATIO = 0.99


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
        rates: dict[str, list[float]] = {name: [] for name, _, _ in settings}
        for number in range(ROUNDS):
            note(f"round {number + 1} of {ROUNDS} ...")
            for name, frequency, count in settings[number % 2 :] + settings[: number % 2]:
                with scraped(address, frequency):
                    rates[name].append(work.run(ROUND_SECONDS, count=count))
        pool.close()
    alone = median(rates["nobody looks"])
    results.append(Result("blocks looked up and put, nobody looks", alone, "blocks/s"))
    for name, _, _ in settings[1:]:
        # Of neighbours in time, so that what the machine does meanwhile takes part in both.
        ratio = median([with_it / without for with_it, without in zip(rates[name], rates["nobody looks"], strict=True)])
        if name == "nothing counted":
            results.append(Result("with counting, by without", 1 / ratio, "ratio", "aim", AIM_RATIO))
        else:
            results.append(Result(f"{name}, by nobody looks", ratio, "ratio", "aim", AIM_RATIO))
    finish("scrape", results)


class Work:
    """One engine's use of a pool that is full."""

    def __init__(self, pool: _native.Pool, namespace: _native.Namespace) -> None:
        self._pool, self._namespace, self._turn = pool, namespace, 0
        self._prompts = [
            [(prompt << 16 | block).to_bytes(32, "big") for block in range(PROMPT_BLOCKS)] for prompt in range(PROMPTS)
        ]

    def run(self, seconds: float, *, count: bool) -> float:
        """Blocks per second."""
        started = time.perf_counter()
        blocks = 0
        while time.perf_counter() - started < seconds:
            self._turn += 1
            # Every other time one of the last prompts, so that half is found.
            back = 3 if self._turn % 2 else 0
            self._one(self._prompts[(self._turn // 2 - back) % PROMPTS], count)
            blocks += PROMPT_BLOCKS
        return blocks / (time.perf_counter() - started)

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
    """Somebody asks the exporter so often meanwhile; 0: nobody."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(1 / frequency):
            with urllib.request.urlopen(address, timeout=30) as answer:
                answer.read()

    scraper = threading.Thread(target=ask, daemon=True)
    if frequency:
        scraper.start()
    try:
        yield
    finally:
        stop.set()
        if frequency:
            scraper.join()


if __name__ == "__main__":
    main()
